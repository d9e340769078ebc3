"""FP8, NVFP4 and MXFP4 in compressed-tensors and in the layouts of other tools: bytes, golden vectors, damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.open import open_source
from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.float_activations import round_mxfp4
from quantkit.core.rounding.numbers import round_e2m1
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.compressed_tensors import CompressedTensors
from quantkit.formats.floats import gpt_oss
from quantkit.formats.interface import CheckpointLayout
from quantkit.formats.reader import QuantizedReader

SCHEMES = {name: Scheme.of(name) for name in ("fp8", "fp8-block", "fp8-tensor", "nvfp4", "mxfp4")}
SCHEMES["fp8-a8"] = replace(Scheme.of("fp8"), activations="fp8")
SCHEMES["fp8-block-a8"] = replace(Scheme.of("fp8-block"), activations="fp8")
SCHEMES["fp8-bf16"] = replace(Scheme.of("fp8"), scale_dtype="bfloat16")
SCHEMES["nvfp4-a4"] = replace(Scheme.of("nvfp4"), activations="nvfp4", input_global_scale=300.0)


def quantized(scheme: Scheme, shape: tuple[int, int] = (128, 256)) -> QuantTensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.1
    scheme = affine.fixed(w, scheme)
    scales, zeros = affine.searched_params(w, scheme)
    return QuantTensor(affine.quantize(w, scales, zeros, scheme), scales, zeros, scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_decode_undoes_encode_and_the_config_names_the_scheme(name: str) -> None:
    q = quantized(SCHEMES[name])
    parts = CompressedTensors.encode(q)
    assert CompressedTensors.stored_bytes(SCHEMES[name], 128, 256) == sum(part.nbytes for part in parts.values())
    assert 8 * sum(part.nbytes for part in parts.values()) == q.bits_stored
    config = json.loads(json.dumps(CompressedTensors.config(CheckpointLayout({"a": SCHEMES[name]}), "1")))
    names = [f"a.{part}" for part in parts]
    (local,) = CompressedTensors.modules(names, config).values()
    assert set(local) == set(parts)
    read = CompressedTensors.read_module("a", parts, config)
    assert read.equal(q)
    assert CompressedTensors.shape(parts, q.scheme.bits) == (128, 256)


def test_golden_bytes() -> None:
    """E2M1 codes of -6 -4 -3 -2 -1.5 -1 -0.5 0 ... two a byte, the even input low; E8M0 and E4M3 scales."""
    row = torch.tensor([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 0])
    packed = "efcdab0921436507"
    w = torch.cat([row, row])[None]
    mx = CompressedTensors.encode(
        QuantTensor(affine.quantize(w, torch.ones(1, 1), None, Scheme.of("mxfp4")), torch.ones(1, 1), None,
                    Scheme.of("mxfp4"))
    )  # fmt: skip
    assert bytes(mx["weight_packed"][0].tolist()).hex() == packed * 2
    assert mx["weight_scale"].tolist() == [[127]]
    scheme = replace(Scheme.of("nvfp4"), global_scale=64.0)
    scales = torch.tensor([[1 / 64, 4.5 / 64]])
    nv = CompressedTensors.encode(QuantTensor(affine.quantize(row[None] / 64, scales[:, :1], None, scheme).repeat(1, 2),
                                              scales, None, scheme))  # fmt: skip
    assert bytes(nv["weight_packed"][0].tolist()).hex() == packed * 2
    assert bytes(nv["weight_scale"].view(torch.uint8)[0].tolist()).hex() == "3849"  # 1.0 and 4.5
    assert nv["weight_global_scale"].tolist() == [64.0]
    fp = QuantTensor(affine.quantize(torch.tensor([[448.0, -1.0, 0.0]]), torch.ones(1, 1), None, Scheme.of("fp8")),
                     torch.ones(1, 1), None, Scheme.of("fp8"))  # fmt: skip
    assert bytes(CompressedTensors.encode(fp)["weight"].view(torch.uint8)[0].tolist()).hex() == "7eb800"


def test_mxfp4_of_minus_16_to_15_is_the_golden_vector_of_other_tools() -> None:
    """The same scale and numbers as GGUF's MXFP4 block ``81 0e0e...`` of arange(-16, 16), in compressed-tensors' order.

    GGUF's byte j holds inputs j (low) and j + 16 (high), and its scale byte is that of half the scale.
    """
    gguf = bytes.fromhex("810e0e1d1d2d2d3c3c4c4b4b5a5a595960")
    w = torch.arange(-16.0, 16.0)[None]
    scheme = Scheme.of("mxfp4")
    scale, _ = affine.minmax_params(w, scheme)
    codes = affine.quantize(w, scale, None, scheme)[0].tolist()
    assert CompressedTensors.encode(QuantTensor(torch.tensor([codes], dtype=torch.uint8), scale, None, scheme))[
        "weight_scale"
    ].tolist() == [[gguf[0]]]
    theirs = [byte & 15 for byte in gguf[1:]] + [byte >> 4 for byte in gguf[1:]]
    different = [(mine, other) for mine, other in zip(codes, theirs, strict=True) if mine != other]
    assert all(abs(mine - other) == 1 for mine, other in different), different  # ties: GGUF's writer rounds them down


def test_the_library_reads_the_same_weights() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    if not hasattr(compressors.BaseCompressor, "decompress"):
        pytest.skip("another interface than that of 0.19")
    for name, scheme in SCHEMES.items():
        q = quantized(scheme)
        config = CompressedTensors.config(CheckpointLayout({"a": scheme}), "1")
        (group,) = quantization.QuantizationConfig.model_validate(config).config_groups.values()
        compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
        theirs = compressor.decompress(CompressedTensors.encode(q), group)["weight"]
        assert torch.equal(theirs.float(), q.dequantize().to(theirs.dtype).float()), name


# -- other tools' checkpoints -----------------------------------------------------------------------------------------


def reader(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> QuantizedReader:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return QuantizedReader(open_source(folder))


def e4m3(rows: int = 200, width: int = 300) -> Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 50).to(torch.float8_e4m3fn)


DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_deepseeks_blocks_are_read_also_where_they_do_not_divide(tmp_path: Path) -> None:
    weight, scales = e4m3(), torch.rand(2, 3) + 0.01
    read = reader(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, DEEPSEEK)
    q = read.module("a")
    spread = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(q.dequantize(), weight.float() * spread)
    assert read.scheme("a").describe() == "W8A8 fp8 128x128"  # type: ignore[union-attr]
    assert read.shape("a") == (200, 300)


@pytest.mark.parametrize("shape", [(200, 1), (1,), ()], ids=str)
def test_scales_per_channel_and_per_tensor_are_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weight, scales = e4m3(), torch.rand(shape) + 0.01
    config = {"quant_method": "fp8", "activation_scheme": "static"}
    read = reader(tmp_path, {"a.weight": weight, "a.weight_scale": scales, "a.input_scale": torch.ones(())}, config)
    assert torch.equal(read.module("a").dequantize(), weight.float() * scales)
    assert read.scheme("a").activations is None  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8_of_llm_compressor_with_static_activations_is_read(tmp_path: Path, strategy: str) -> None:
    config = CompressedTensors.config(CheckpointLayout({"a": Scheme.of("fp8")}), "1")
    group = config["config_groups"]["group_0"]
    group["weights"]["strategy"] = strategy
    group["input_activations"] = {**group["weights"], "strategy": "tensor", "dynamic": False}
    weight = e4m3()
    scales = torch.rand((200, 1) if strategy == "channel" else (1,), dtype=torch.float32).bfloat16() + 0.01
    tensors = {"a.weight": weight, "a.weight_scale": scales, "a.input_scale": torch.ones(1)}
    assert torch.equal(reader(tmp_path, tensors, config).module("a").dequantize(), weight.float() * scales.float())


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def modelopt() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randint(0, 256, (8, 32), dtype=torch.uint8, generator=generator),
        "a.weight_scale": (torch.rand(8, 4, generator=generator) * 400 + 1).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.tensor(0.000123),
        "a.input_scale": torch.tensor(0.01),
    }


def test_nvfp4_of_modelopt_is_read_with_its_factor(tmp_path: Path) -> None:
    tensors = modelopt()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([tensors["a.weight"] & 15, tensors["a.weight"] >> 4], -1).flatten(1)
    scales = tensors["a.weight_scale"].float() * tensors["a.weight_scale_2"]
    expected = table[codes.long()] * scales.repeat_interleave(16, 1)
    read = reader(tmp_path, tensors, MODELOPT)
    assert torch.equal(read.module("a").dequantize(), expected)
    assert read.shape("a") == (8, 64)


def test_experts_of_gpt_oss_are_read_exactly() -> None:
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 130, (6, 2), dtype=torch.uint8, generator=generator)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2)
    expected = (table[codes.long()] * 2.0 ** (scales.float() - 127)[..., None]).flatten(1).T
    read = gpt_oss.decode_expert(blocks, scales)
    assert torch.equal(read, expected)
    assert torch.equal(read.bfloat16().float(), expected)


def damaged(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors = modelopt() | {f"a.{name}": tensor for name, tensor in changes.items() if tensor is not None}
    return {
        name: tensor for name, tensor in tensors.items() if changes.get(name.removeprefix("a."), tensor) is not None
    }


NAN_SCALES = torch.full((8, 4), float("nan")).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (damaged(weight_scale_2=None), "weight_scale_2"),
        (damaged(weight_scale_2=torch.tensor(0.0)), "weight_scale_2 .*positive"),
        (damaged(weight_scale_2=torch.tensor(float("nan"))), "weight_scale_2 .*not finite"),
        (damaged(weight_scale=NAN_SCALES), "weight_scale holds numbers that are not finite"),
        (damaged(weight_scale=torch.ones(8, 3).to(torch.float8_e4m3fn)), "weight_scale .*does not fit"),
        (damaged(weight=torch.ones(8, 32)), "weight is torch.float32; expected uint8"),
    ],
    ids=["no factor", "zero factor", "nan factor", "nan scales", "shape", "dtype"],
)
def test_damaged_nvfp4_is_refused_by_the_tensors_name(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reader(tmp_path, tensors, MODELOPT).module("a")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"b.weight": e4m3(), "a.weight": e4m3(), "a.weight_scale_inv": torch.ones(2, 3)},
            "b.weight .*scale is missing",
        ),
        ({"a.weight": e4m3(), "a.weight_scale_inv": torch.ones(3, 3)}, "weight_scale_inv .*does not fit"),
        ({"a.weight": e4m3(), "a.weight_scale_inv": torch.zeros(2, 3)}, "weight_scale_inv .*not positive"),
        ({"a.weight": e4m3(), "a.weight_scale_inv": torch.full((2, 3), float("nan"))}, "weight_scale_inv .*not finite"),
        ({"a.weight_scale_inv": torch.ones(2, 3)}, "a lacks its tensor 'weight'"),
        ({"a.weight": e4m3().float(), "a.weight_scale_inv": torch.ones(2, 3)}, "weight is torch.float32"),
    ],
    ids=["no scale", "shape", "zero", "nan", "no weight", "dtype"],
)
def test_damaged_fp8_is_refused_by_the_tensors_name(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reader(tmp_path, tensors, DEEPSEEK).module("a")


def test_a_nan_in_fp8_weights_is_refused(tmp_path: Path) -> None:
    weight = e4m3()
    weight.view(torch.uint8)[3, 5] = 0x7F
    with pytest.raises(CheckpointError, match="weight holds numbers that are not finite"):
        reader(tmp_path, {"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 3)}, DEEPSEEK).module("a")


def test_a_global_scale_of_zero_and_an_e8m0_nan_are_refused() -> None:
    parts = CompressedTensors.encode(quantized(SCHEMES["nvfp4"]))
    with pytest.raises(CheckpointError, match="weight_global_scale"):
        CompressedTensors.decode({**parts, "weight_global_scale": torch.zeros(1)}, SCHEMES["nvfp4"])
    parts = CompressedTensors.encode(quantized(SCHEMES["mxfp4"]))
    parts["weight_scale"][0, 0] = 255
    with pytest.raises(CheckpointError, match="weight_scale holds 255"):
        CompressedTensors.decode(parts, SCHEMES["mxfp4"])


def test_half_of_an_expert_is_refused() -> None:
    with pytest.raises(CheckpointError, match="x_scales is missing"):
        gpt_oss.parameters(["x_blocks"])
    with pytest.raises(CheckpointError, match=r"expected .experts, out"):
        gpt_oss.dense_shape((4, 6, 2, 16), (4, 6, 3))


def test_mxfp4_activations_have_the_scales_of_the_compressed_tensors_library() -> None:
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 64)[:, None]
    x[0, :32], x[1, 0], x[2, 0] = 0, 1.75 * 2**20, 1.7499 * 2**20
    parts = x.reshape(64, 3, 32)
    most = parts.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = 2.0 ** (generate_mx_scales(most) - 127)
    theirs = (round_e2m1(parts / scale) * scale).reshape(64, 96)
    assert torch.equal(round_mxfp4(x), theirs)
    assert torch.equal(round_mxfp4(round_mxfp4(x)), round_mxfp4(x))
