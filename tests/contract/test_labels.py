"""Checkpoints under labels of their own: read by the packing that they name, or refused by the tool's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.open import open_source
from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats import REFUSED, writer_format
from quantkit.formats.reader import QuantizedReader


def reader(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], **more: Any) -> QuantizedReader:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    quantization = {"quantization_config": config} if config else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **quantization, **more}))
    return QuantizedReader(open_source(folder))


def quantized(scheme: Scheme) -> QuantTensor:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    scales, zeros = affine.minmax_params(w, scheme)
    return QuantTensor(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)


def named(module: str, form: str, scheme: Scheme) -> dict[str, Tensor]:
    return {f"{module}.{part}": value for part, value in writer_format(form).encode(quantized(scheme)).items()}


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}


def test_auto_rounds_gptq_packing_is_read_with_the_settings_of_single_modules(tmp_path: Path) -> None:
    four, eight = Scheme(4, 32), Scheme(8, 32)
    tensors = named("a.0.up", "gptq", four) | named("a.1.up", "gptq", eight)
    config = {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"a.1.up": {"bits": 8}}}
    found = reader(tmp_path, tensors, config)
    assert found.format == "gptq"
    for module, scheme in (("a.0.up", four), ("a.1.up", eight)):
        q = found.module(module)
        assert isinstance(q, QuantTensor)
        assert q.equal(quantized(scheme))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("label", [{"provider": "auto-round"}, {"autoround_version": "0.16.1"}], ids=["gptq", "own"])
def test_auto_rounds_negative_scales_are_read_to_the_same_weights(
    label: dict[str, str], bits: int, tmp_path: Path
) -> None:
    """With ``sym`` it gives a group whose largest magnitude is positive a negative scale."""
    scheme = Scheme(bits, 32)
    tensors, q = named("a", "gptq", scheme), quantized(scheme)
    turned = torch.arange(2 * 32).reshape(32, 2) % 3 == 0  # [out, groups]
    tensors["a.scales"] = torch.where(turned.T, -tensors["a.scales"], tensors["a.scales"])
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True}
    read = reader(tmp_path, tensors, {**config, **label}).module("a")
    wanted = q.dequantize() * torch.where(turned, -1.0, 1.0).repeat_interleave(32, dim=1)
    assert torch.equal(read.dequantize(), wanted)
    with pytest.raises(CheckpointError, match="scales are positive numbers"):
        reader(tmp_path, tensors, config).module("a")


@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_rounds_awq_packing_is_read(symmetric: bool, tmp_path: Path) -> None:
    scheme = Scheme(4, 32, symmetric)
    config = {**AUTO_ROUND, "sym": symmetric, "packing_format": "auto_round:auto_awq"}
    q = reader(tmp_path, named("a", "awq", scheme), config).module("a")
    assert isinstance(q, QuantTensor)
    assert q.equal(quantized(scheme))


def test_other_packings_of_auto_round_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'auto_round:hocus' of AutoRound is not read"):
        reader(tmp_path, {"a.weight": torch.ones(2, 2)}, {**AUTO_ROUND, "packing_format": "auto_round:hocus"})
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        reader(
            tmp_path, named("a", "gptq", Scheme(4, 32)),
            {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": {"a": 7}},
        )  # fmt: skip


@pytest.mark.parametrize("method", REFUSED)
def test_formats_that_are_not_read_are_refused_by_the_name_that_people_know(method: str, tmp_path: Path) -> None:
    name, remedy = REFUSED[method]
    with pytest.raises(CheckpointError) as caught:
        reader(tmp_path, {"a.weight": torch.ones(2, 2)}, {"quant_method": method})
    assert f"quantized by {name}, which quantkit does not read" in str(caught.value)
    assert remedy in str(caught.value)
    assert "16-bit original" in str(caught.value)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mlx_folders_say_no_method_and_are_known_by_what_they_say(key: str, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 8, dtype=torch.uint32), "a.scales": torch.ones(2, 1)}
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    given = {key: settings}
    with pytest.raises(CheckpointError, match="quantized by MLX"):
        reader(tmp_path, tensors, given.get("quantization_config", {}), **given)


# -- FP8 under names of transformers ----------------------------------------------------------------------------------


def e4m3() -> Tensor:
    return (torch.randn(48, 64, generator=torch.Generator().manual_seed(1)) * 50).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (48, 1)], ids=str)
def test_an_inverse_scale_without_blocks_is_one_number_or_one_a_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scale = e4m3(), torch.rand(shape) + 0.1
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "a.activation_scale": torch.ones(())}
    found = reader(tmp_path, tensors, config)
    assert torch.equal(found.module("a").dequantize(), weight.float() * scale)
    scheme = found.scheme("a")
    assert isinstance(scheme, Scheme)
    assert scheme.activations is None  # fixed scales: ``load`` tells of them
    assert found.plain_names() == []


def test_an_inverse_scale_of_another_shape_needs_its_blocks(tmp_path: Path) -> None:
    tensors = {"a.weight": e4m3(), "a.weight_scale_inv": torch.ones(3, 4)}
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is \[3, 4\].*weight_block_size"):
        reader(tmp_path, tensors, {"quant_method": "fp8"}).module("a")


def test_an_activation_scale_that_is_no_positive_number_is_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": e4m3(), "a.weight_scale_inv": torch.ones(()), "a.activation_scale": torch.zeros(())}
    with pytest.raises(CheckpointError, match="activation_scale"):
        reader(tmp_path, tensors, {"quant_method": "fp8"}).module("a")
