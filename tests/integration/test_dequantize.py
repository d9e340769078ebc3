"""``--dequantize``: a dense checkpoint of every kind of quantized source, which plain transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from english import with_tokenizer_of_english

import quantkit as qk
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.open import open_source
from quantkit.cli.main import cli
from quantkit.errors import RequestError
from quantkit.formats.reader import QuantizedReader

RTN = dict(method="rtn", scales="minmax")
FORMATS: dict[str, dict[str, Any]] = {
    "compressed-tensors": dict(group_size=32),
    "gptq": dict(format="gptq", group_size=32, symmetric=True),
    "awq": dict(format="awq", group_size=32),
    "native": dict(format="native", bits=3, group_size=48),
    "w8a8": dict(activations="int8", bits=8, group_size=None, symmetric=True),
    "fp8": dict(scheme="fp8"),
    "nvfp4": dict(scheme="nvfp4"),
    "mxfp4": dict(scheme="mxfp4"),
}
IDS = torch.arange(5, 29)[None]


def logits(folder: Path) -> torch.Tensor:
    """As plain transformers computes them, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_kept_in_float32_and_transformers_loads_it(
    name: str, tiny_original: Path, tmp_path: Path
) -> None:
    qk.convert(tiny_original, tmp_path / "packed", **{**RTN, **FORMATS[name]})
    report = qk.convert(tmp_path / "packed", tmp_path / "dense", dequantize=True, dtype="float32")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    reader, dense = QuantizedReader(open_source(tmp_path / "packed")), open_source(tmp_path / "dense")
    assert len(reader.modules) == 21
    assert dense.quantization() is None
    for module in reader.modules:
        assert torch.equal(dense.read(f"{module}.weight"), reader.module(module).dequantize()), module
    assert set(dense.names()) == set(open_source(tiny_original).names())
    assert report.verified_tensors == len(dense.names())
    assert not report.notes
    if name in ("compressed-tensors", "native"):
        ours = qk.load(tmp_path / "dense", device="cpu", dtype="float32")(IDS)
        torch.testing.assert_close(logits(tmp_path / "dense"), ours, rtol=0, atol=1e-4)
        names = {path.name for path in (tmp_path / "dense").iterdir()}
        assert {"tokenizer.json", "config.json", "generation_config.json", "model.safetensors"} <= names


def test_what_a_dtype_rounds_is_measured(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "packed", group_size=32, **RTN)
    report = qk.convert(tmp_path / "packed", tmp_path / "dense", dequantize=True)
    dense, reader = open_source(tmp_path / "dense"), QuantizedReader(open_source(tmp_path / "packed"))
    manifest = json.loads((tmp_path / "dense" / "quantkit.json").read_text())
    assert manifest["dequantized_from"]["format"] == "compressed-tensors"
    assert len(manifest["rounded"]) == 21
    for module in reader.modules:
        stored, exact = dense.read(f"{module}.weight"), reader.module(module).dequantize()
        assert stored.dtype == torch.float16  # the config's
        assert torch.equal(stored, exact.half())
        error = float((stored.float() - exact).norm() / exact.norm())
        assert manifest["rounded"][f"{module}.weight"] == pytest.approx(error, rel=1e-2)
    assert "float16 rounds 21 of" in report.notes[0]
    assert report.sample is not None


@pytest.mark.parametrize("kind", ["q8_0", "q6_k", "q4_1"])
def test_a_gguf_file_becomes_dense(kind: str, tiny_original: Path, tmp_path: Path) -> None:
    source = with_tokenizer_of_english(tiny_original, tmp_path / "source")
    qk.convert(source, tmp_path / "gguf", format="gguf", gguf_type=kind, method="rtn")
    (path,) = (tmp_path / "gguf").glob("*.gguf")
    qk.convert(path, tmp_path / "dense", dequantize=True, dtype="float32")
    dense, file = open_source(tmp_path / "dense"), GGUFSource(path)
    assert set(dense.names()) == set(file.names())
    for name in file.names():
        assert torch.equal(dense.read(name), file.read_as(name, torch.float32)[0]), name
    ours = qk.load(tmp_path / "dense", device="cpu", dtype="float32")(IDS)
    torch.testing.assert_close(logits(tmp_path / "dense"), ours, rtol=0, atol=1e-4)


def test_act_order_has_no_other_format_but_a_dense_one(tiny_original: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    qk.convert(tiny_original, tmp_path / "gptq", format="gptq", group_size=32, symmetric=True, **RTN)
    file = tmp_path / "gptq" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file)
    qk.convert(tmp_path / "gptq", tmp_path / "dense", dequantize=True, dtype="float32")
    dense, reader = open_source(tmp_path / "dense"), QuantizedReader(open_source(tmp_path / "gptq"))
    for module in reader.modules:
        assert torch.equal(dense.read(f"{module}.weight"), reader.module(module).dequantize())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(dequantize=True), "is not quantized"),
        (dict(dtype="float32", **RTN), "--dtype has no effect: it goes with --dequantize"),
        (dict(dequantize=True, bits=8), "--bits 8 has no effect"),
        (dict(dequantize=True, dtype="int8"), "choose auto, float16"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(
    options: dict[str, Any], words: str, tiny_original: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        qk.convert(tiny_original, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command_line_plans_and_writes(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "packed", format="awq", group_size=32, kv_bits=8, **RTN, samples=2, seq_len=32)
    call = ["convert", str(tmp_path / "packed"), "--out", str(tmp_path / "dense"), "--dequantize"]
    dry = CliRunner().invoke(cli, [*call, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "dense     awq -> float16" in dry.output
    assert "KV cache" in dry.output
    done = CliRunner().invoke(cli, call)
    assert done.exit_code == 0, done.output
    assert "dequantized from awq, float16, dense" in done.output
    assert not (tmp_path / "dense" / "quantkit_kv.safetensors").exists()
