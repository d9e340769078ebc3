"""GGUF files and quantized folders, one repacked into the other: no weight of a linear changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from architectures import with_tokenizer_of
from click.testing import CliRunner
from english import with_tokenizer_of_english

import quantkit as qk
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.open import open_source
from quantkit.cli.main import cli
from quantkit.core.qtensor import QuantTensor
from quantkit.errors import QuantkitError, RequestError
from quantkit.formats.reader import QuantizedReader

EMBEDDING = "model.embed_tokens.weight"
RTN = dict(method="rtn", scales="minmax")


def weights(folder: Path) -> dict[str, QuantTensor]:
    reader = QuantizedReader(open_source(folder))
    return {name: q for name in reader.modules if isinstance(q := reader.module(name), QuantTensor)}


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.gguf")
    return path


def exact(path: Path, name: str) -> torch.Tensor:
    return GGUFSource(path).read_as(name, torch.float32)[0]


def kinds(path: Path) -> set[str]:
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.fixture(scope="module")
def q4_0(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As llama.cpp writes a Q4_0 file: scales of both signs, the embedding in another type."""
    folder = tmp_path_factory.mktemp("gguf") / "f16"
    source = with_tokenizer_of_english(tiny_original, folder.with_name("source"))
    qk.convert(source, folder, format="gguf", gguf_type="f16")
    reader, path = gguf.GGUFReader(file_of(folder)), folder.with_name("model-Q4_0.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            extra = {"sub_type": field.types[-1]} if kind == gguf.GGUFValueType.ARRAY else {}
            writer.add_key_value(field.name, field.contents(), kind, **extra)
    for tensor in reader.tensors:
        values = tensor.data.astype(np.float32)
        kind = {"token_embd.weight": "Q8_0", "blk.2.ffn_down.weight": "Q4_1"}.get(tensor.name, "Q4_0")
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        code = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq", "native"])
def test_a_q4_0_file_keeps_its_linears_in_every_format(form: str, q4_0: Path, tmp_path: Path) -> None:
    report = qk.convert(q4_0, tmp_path / "out", format=form, repack=True)
    assert report.repacked_from == "gguf"
    found = weights(tmp_path / "out")
    linears = {name for name in found if ".layers." in name}
    assert len(linears) == 20  # of 21: one has minima that no zero point says
    for name in found:
        assert torch.equal(found[name].dequantize(), exact(q4_0, f"{name}.weight")), name
    source = open_source(tmp_path / "out")
    assert torch.equal(
        source.read("model.layers.2.mlp.down_proj.weight").float(),
        exact(q4_0, "model.layers.2.mlp.down_proj.weight").half().float(),
    )
    assert ("model.embed_tokens" in found) == (form == "native")
    told = "\n".join(report.notes)
    assert "1 tensor of Q4_1 (first model.layers.2.mlp.down_proj.weight): written in 16 bits, rounded by" in told
    rounded = json.loads((tmp_path / "out" / "quantkit.json").read_text())["rounded"]
    assert 0 < rounded["model.layers.2.mlp.down_proj.weight"] < 1e-3
    assert ("model.embed_tokens.weight" in rounded) == (form != "native")
    ids = torch.arange(5, 29)[None]
    a, b = (qk.load(path, device="cpu", dtype="float32")(ids) for path in (q4_0, tmp_path / "out"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * float(a.abs().max()))


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq", "native"])
def test_the_blocks_of_a_q4_0_file_come_back_byte_by_byte(form: str, q4_0: Path, tmp_path: Path) -> None:
    qk.convert(q4_0, tmp_path / "packed", format=form, repack=True)
    report = qk.convert(tmp_path / "packed", tmp_path / "back", format="gguf")
    assert {layer.scheme for layer in report.layers} <= {"Q4_0", "Q8_0"}
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(q4_0).tensors}
    after = {tensor.name: tensor for tensor in gguf.GGUFReader(file_of(tmp_path / "back")).tensors}
    assert set(before) == set(after)
    same = {name for name in before if np.array_equal(before[name].data, after[name].data)}
    assert set(before) - same == {"blk.2.ffn_down.weight", "token_embd.weight"}
    if form == "native":  # all but the row of a token without numbers, whose scale, 0, becomes the smallest
        embeddings = [torch.from_numpy(tensors["token_embd.weight"].data.copy()) for tensors in (before, after)]
        assert (embeddings[0] != embeddings[1]).any(1).sum() == 1
        assert torch.equal(exact(q4_0, EMBEDDING), exact(file_of(tmp_path / "back"), EMBEDDING))
    assert [verdict.engine for verdict in report.engines if verdict.loads] == ["quantkit", "llama.cpp"]
    assert report.sample is not None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (dict(symmetric=True), {"Q4_0"}),
        (dict(symmetric=True, group_size=64), {"Q4_0"}),
        (dict(symmetric=True, group_size=None), {"Q4_0"}),
        (dict(symmetric=True, bits=8), {"Q8_0"}),
        (dict(symmetric=True, bits=3, format="native"), {"Q4_0"}),
        (dict(symmetric=False), {"Q5_0"}),
        (dict(symmetric=False, bits=5, format="native"), {"Q8_0"}),
        (dict(symmetric=True, scale_dtype="bfloat16"), {"Q4_0"}),
    ],
    ids=str,
)
def test_integer_codes_become_blocks_of_the_same_weights(
    options: dict[str, Any], wanted: set[str], tiny_original: Path, tmp_path: Path
) -> None:
    qk.convert(tiny_original, tmp_path / "packed", **{**RTN, "group_size": 32, **options})
    qk.convert(tmp_path / "packed", tmp_path / "out", format="gguf")
    path = file_of(tmp_path / "out")
    assert path.name == f"model-{next(iter(wanted))}.gguf"
    assert kinds(path) - {"F32", "F16"} == wanted
    packed = weights(tmp_path / "packed")
    assert len(packed) == 21
    for name, q in packed.items():
        assert torch.equal(exact(path, f"{name}.weight"), q.dequantize()), name
    original = open_source(tiny_original)
    assert torch.equal(exact(path, "model.embed_tokens.weight"), original.read("model.embed_tokens.weight").float())


def test_minima_are_rounded_only_when_asked_for_and_measured(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "packed", format="awq", group_size=32, **RTN)
    report = qk.convert(tmp_path / "packed", tmp_path / "out", format="gguf", allow_rounding=True)
    assert kinds(file_of(tmp_path / "out")) - {"F32", "F16"} == {"Q4_1"}
    rounded = json.loads((tmp_path / "out" / "quantkit.json").read_text())["rounded"]
    for layer in report.layers:
        assert 0 < rounded[layer.name] < 2e-3
    packed, path = weights(tmp_path / "packed"), file_of(tmp_path / "out")
    name = "model.layers.1.mlp.up_proj"
    there = exact(path, f"{name}.weight")
    measured = float((there - packed[name].dequantize()).norm() / packed[name].dequantize().norm())
    assert rounded[name] == pytest.approx(measured, rel=1e-2)
    with pytest.raises(RequestError, match="Q4_1 x 21"):  # what was rounded is no zero point any more
        qk.convert(path, tmp_path / "again", format="awq", repack=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(gguf_type="q4_0"), ["--gguf-type q4_0", "its codes decide the type"]),
        (dict(kv_bits=8), ["--kv-bits", "no place", "--cache-type-k"]),
    ],
    ids=str,
)
def test_options_without_a_place_in_the_file_are_refused(
    options: dict[str, Any], words: list[str], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    qk.convert(tiny_original, tmp_path / "packed", group_size=32, symmetric=True, **RTN)
    text = dict(calibration=str(calibration_text), samples=4, seq_len=32) if "kv_bits" in options else {}
    with pytest.raises(RequestError) as caught:
        qk.convert(tmp_path / "packed", tmp_path / "out", format="gguf", **options, **text)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_k_quants_are_no_integers_with_scales(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "k", format="gguf", gguf_type="iq4_nl", **{**RTN, "scales": "search"})
    with pytest.raises(RequestError, match=r"IQ4_NL x .*--dequantize"):
        qk.convert(file_of(tmp_path / "k"), tmp_path / "out", repack=True)
    with pytest.raises(RequestError, match="GGUF file already"):
        qk.convert(file_of(tmp_path / "k"), tmp_path / "out", format="gguf", repack=True)


def test_groups_that_cross_blocks_are_refused(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "packed", group_size=48, format="native", symmetric=True, **RTN)
    with pytest.raises(QuantkitError, match="groups of 48"):
        qk.convert(tmp_path / "packed", tmp_path / "out", format="gguf")


def test_repack_of_an_original_and_gguf_without_a_type_are_refused(tiny_original: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--repack: .* is not quantized"):
        qk.convert(tiny_original, tmp_path / "out", repack=True)
    with pytest.raises(RequestError, match="which type"):
        qk.convert(tiny_original, tmp_path / "out", format="gguf")
    with pytest.raises(RequestError, match="--allow-rounding has no effect"):
        qk.convert(tiny_original, tmp_path / "out", allow_rounding=True)


def test_without_repack_a_gguf_file_is_quantized_like_any_original(q4_0: Path, tmp_path: Path) -> None:
    report = qk.convert(q4_0, tmp_path / "out", group_size=32, symmetric=True, **RTN)
    assert report.repacked_from is None
    assert any("--repack" in warning for warning in report.warnings)


def test_the_command_line_repacks_both_ways(q4_0: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["convert", str(q4_0), "--out", str(tmp_path / "a"), "--repack", "--json"])
    assert done.exit_code == 0, done.output
    dry = CliRunner().invoke(
        cli, ["convert", str(tmp_path / "a"), "--out", str(tmp_path / "b"), "--format", "gguf", "--dry-run"]
    )
    assert dry.exit_code == 0, dry.output
    assert "compressed-tensors -> gguf: the same codes" in dry.output


def test_experts_of_different_schemes_are_no_tensor_of_a_file(tiny_original: Path, tmp_path: Path) -> None:
    small = dict(hidden_size=64, moe_intermediate_size=64, num_experts=4, head_dim=16, mlp_only_layers=[])
    source = with_tokenizer_of(tiny_original, "qwen3_moe", tmp_path / "source", **small)
    rules = ["*.experts.1.up_proj=bits:8", "*.experts.1.gate_proj=bits:8"]
    given = dict(bits=4, group_size=32, symmetric=True, rules=rules, format="native", **RTN)
    qk.convert(source, tmp_path / "mixed", **given)
    with pytest.raises(RequestError, match=r"_exps\.weight and 5 more: its experts are one tensor in a"):
        qk.convert(tmp_path / "mixed", tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()
