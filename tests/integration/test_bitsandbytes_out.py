"""A model rounded by bitsandbytes: the folder holds the library's own tensors, and reads back to its own numbers."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional, nn

import quantkit as qk
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import FolderSource
from quantkit.convert.engines.lint import lint_folder
from quantkit.core.qtensor import BlockTensor
from quantkit.core.scheme import OF_BITSANDBYTES, Scheme
from quantkit.errors import MissingExtra, NumericsError, RequestError
from quantkit.formats.bitsandbytes import BitsAndBytes
from quantkit.formats.bitsandbytes_library import encode_weight
from quantkit.formats.reader import QuantizedReader

NAMES = list(OF_BITSANDBYTES)
LINEAR = "model.layers.1.mlp.down_proj"  # 96 inputs: blocks of 64 run across the ends of its rows


def convert(model: Path, out: Path, scheme: str, **options: Any) -> Any:
    return qk.convert(model, out, format="bitsandbytes", scheme=scheme, **options)


def of_the_library(weight: torch.Tensor, scheme: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a layer of bitsandbytes stores after it was given a weight, and the numbers that it computes with."""
    rows, width = weight.shape
    if scheme == "llm-int8":
        layer: Any = nn.Linear8bitLt(width, rows, bias=False, has_fp16_weights=False)
        layer.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        stored = layer.to("cpu").state_dict()
        return stored, stored["weight"].float() * (stored["SCB"] / 127)[:, None]
    given = {"quant_type": scheme.removesuffix("-double"), "compress_statistics": scheme.endswith("-double")}
    layer = nn.Linear4bit(width, rows, bias=False, **given)
    layer.weight = nn.Params4bit(weight, requires_grad=False, **given)
    stored = layer.to("cpu").state_dict()
    # As one row: of rows that 64 does not divide, its kernel for AVX512 begins a block with every row (0.50.2).
    state = copy.copy(layer.weight.quant_state)
    state.shape = torch.Size([1, rows * width])
    return stored, functional.dequantize_4bit(layer.weight.data, state).reshape(rows, width)


@pytest.mark.parametrize("scheme", NAMES)
def test_the_folder_holds_the_librarys_tensors_and_reads_back_to_its_numbers(
    scheme: str, tiny_model: Path, tmp_path: Path
) -> None:
    report = convert(tiny_model, tmp_path / "out", scheme)
    assert (report.method, report.scheme, len(report.layers)) == ("rtn", Scheme.of(scheme).describe(), 21)
    source = FolderSource(tmp_path / "out")
    reader = QuantizedReader(source)
    stored, numbers = of_the_library(FolderSource(tiny_model).read(f"{LINEAR}.weight").float(), scheme)
    assert {name: value.dtype for name, value in stored.items()} == {
        local: source.info(f"{LINEAR}.{local}").dtype for local in reader.modules[LINEAR]
    }
    for local, value in stored.items():
        assert torch.equal(source.read(f"{LINEAR}.{local}").flatten(), value.flatten()), local
    found = reader.module(LINEAR)
    assert isinstance(found, BlockTensor)
    torch.testing.assert_close(found.dequantize(), numbers, rtol=1e-6, atol=0)
    assert report.sample is not None


def test_config_names_what_stays_at_16_bit_as_transformers_does(tiny_model: Path, tmp_path: Path) -> None:
    report = convert(tiny_model, tmp_path / "out", "nf4-double", rules=["layers.0.*=keep"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["load_in_4bit"], config["bnb_4bit_quant_type"], config["bnb_4bit_use_double_quant"]) == (
        True, "nf4", True,
    )  # fmt: skip
    assert config["bnb_4bit_compute_dtype"] == "float16"
    assert {"lm_head", "model.layers.0.mlp.up_proj"} < set(config["llm_int8_skip_modules"])
    assert len(config["llm_int8_skip_modules"]) == 8
    assert not any("short group" in warning for warning in report.warnings)
    from transformers import BitsAndBytesConfig

    assert BitsAndBytesConfig(**config).quantization_method() == "nf4"


@pytest.mark.parametrize("scheme", ["nf4", "llm-int8"])
def test_what_is_loaded_computes_with_the_read_weights(
    scheme: str, tiny_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    convert(tiny_model, tmp_path / "out", scheme)
    ids = torch.arange(10, 42)[None]
    packed = qk.load(tmp_path / "out", dtype="float32")(ids)
    dense = qk.load(tmp_path / "out", dtype="float32", dequantize=True)(ids)
    torch.testing.assert_close(packed, dense, rtol=1e-4, atol=1e-4)
    found = qk.evaluate(tmp_path / "out", baseline=tiny_model, data=str(calibration_text), seq_len=64)
    assert found.kl_mean is not None
    assert 0 < found.kl_mean < 0.1
    verdicts = {verdict.engine: verdict for verdict in lint_folder(open_source(tmp_path / "out"))}
    assert [name for name, verdict in verdicts.items() if verdict.loads] == ["quantkit", "transformers"]
    assert "accelerate" in verdicts["transformers"].line()
    wrong = "on a CPU with AVX512 no: model.layers.0.mlp.down_proj has 64 outputs and 96 inputs"
    assert (wrong in verdicts["transformers"].line()) == (scheme != "llm-int8")
    assert verdicts["vLLM"].unread_format == "bitsandbytes"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scheme": None}, "which scheme. Add --scheme nf4"),
        ({"format": "compressed-tensors"}, "Add --format bitsandbytes"),
        ({"scheme": "fp8"}, "its schemes are nf4, nf4-double, fp4, llm-int8"),
        ({"method": "gptq"}, "--method gptq: the library rounds"),
        ({"preset": "balanced"}, "--preset balanced: the library rounds"),
        ({"bits": 8}, "--bits 8: --scheme nf4 is W4 nf4"),
        ({"kv_bits": 4}, "cache of its own"),
        ({"target_bpw": 4.5}, "one scheme has one size"),
        ({"scales": "minmax"}, "largest value of a block"),
        ({"distil": 4}, "learns scales of integer schemes"),
        ({"rules": ["lm_head=bits:8"]}, "a rule can only keep modules"),
        ({"imatrix": "x.gguf"}, "goes with --format gguf"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(
    options: dict[str, Any], said: str, tiny_original: Path, tmp_path: Path
) -> None:
    given = {"format": "bitsandbytes", "scheme": "nf4", **options}
    with pytest.raises(RequestError, match=said):
        qk.convert(tiny_original, tmp_path / "out", **{key: value for key, value in given.items() if value is not None})


def test_a_quantized_source_is_told_to_give_the_original(tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path / "out", "nf4")
    with pytest.raises(RequestError, match="16-bit original with --format bitsandbytes"):
        convert(tmp_path / "out", tmp_path / "again", "nf4")
    with pytest.raises(RequestError, match="are nf4, not integers"):
        qk.convert(tmp_path / "out", tmp_path / "again", format="gptq")


def test_without_the_library_the_extra_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"quantkit\[bnb\]"):
        convert(tiny_model, tmp_path / "out", "nf4")


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("shape", [(3, 50), (64, 256)], ids=str)
def test_the_bytes_that_a_plan_counts_are_those_that_are_written(scheme: str, shape: tuple[int, int]) -> None:
    parts = encode_weight(torch.randn(shape, generator=torch.Generator().manual_seed(0)), scheme)
    written = sum(value.numel() * value.itemsize for value in parts.values())
    assert abs(BitsAndBytes.stored_bytes(Scheme.of(scheme), *shape) - written) <= 120  # the JSON's length varies
    assert BitsAndBytes.read_module("x", parts, {}).shape == shape


def test_weights_beyond_float16_are_refused_by_int8() -> None:
    with pytest.raises(NumericsError, match="beyond float16"):
        encode_weight(torch.full((2, 64), 1e6), "llm-int8")
