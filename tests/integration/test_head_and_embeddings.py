"""Head and embeddings quantized by a rule, tied and untied.

Every format that holds them, loading, evaluating, refusals.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit as qk
from quantkit.checkpoint.open import open_source
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.memory import CHUNK
from quantkit.convert.plan.plan import make_plan
from quantkit.core.qtensor import QuantTensor
from quantkit.errors import QuantkitError, RequestError, SourceError
from quantkit.evaluate.sizes import measure_sizes
from quantkit.formats.reader import QuantizedReader
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear

OPTIONS: dict[str, Any] = dict(method="rtn", group_size=32)
IDS = torch.arange(10, 42)[None]


@pytest.fixture
def untied_model(tiny_model: Path) -> Path:
    """The tiny model with a head of its own."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator).half() / 50
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return tiny_model


def packed(model: Any) -> dict[str, Any]:
    wanted = (QuantEmbedding, QuantLinear)
    outside = {"model.embed_tokens", "lm_head"}
    return {name: m for name, m in model.module.named_modules() if isinstance(m, wanted) and name in outside}


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens", "*.embed_tokens"])
def test_a_tied_matrix_is_quantized_once_and_serves_both(name: str, tiny_original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = qk.convert(tiny_original, out=out, format="native", rules=[f"{name}=bits:8"], **OPTIONS)
    source = open_source(out)
    assert "model.embed_tokens" in QuantizedReader(source).modules
    assert not any("lm_head" in stored or stored == "model.embed_tokens.weight" for stored in source.names())
    assert source.config["tie_word_embeddings"] is True
    assert report.layers[-1].name == "model.embed_tokens"
    assert 0 < report.layers[-1].relative_weight_error < 0.01
    model = qk.load(out, dtype="float32")
    found = packed(model)
    assert found["lm_head"].packed is found["model.embed_tokens"].packed
    exact = qk.load(out, dtype="float32", dequantize=True)
    assert exact.module.lm_head.weight is exact.module.model.embed_tokens.weight
    assert torch.allclose(model(IDS), exact(IDS), atol=0.05)
    assert len(model.generate("The old fox", max_tokens=4).tokens) == 4


def test_a_tied_matrix_is_counted_once(tiny_original: Path, tmp_path: Path) -> None:
    for name, rules in (("plain", []), ("packed", ["lm_head=bits:4,sym"])):
        qk.convert(tiny_original, out=tmp_path / name, format="native", rules=rules, **OPTIONS)
    before, after = (measure_sizes(open_source(tmp_path / name)) for name in ("plain", "packed"))
    embedding = qk.load(tiny_original, dequantize=True).module.model.embed_tokens.weight
    saved = embedding.numel() * 2 - embedding.numel() * 4 // 8 - embedding.numel() // 32 * 2
    assert before.checkpoint_bytes - after.checkpoint_bytes == pytest.approx(saved, rel=0.03)  # zeros, shape
    assert after.model_bits_per_weight < before.model_bits_per_weight
    plain, small = (qk.load(tmp_path / name, head_bits=16).memory() for name in ("plain", "packed"))
    assert small["dense"] < plain["dense"]
    assert small["quantized"] - plain["quantized"] < embedding.numel()


@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
def test_untied_head_and_embeddings_have_schemes_of_their_own(form: str, untied_model: Path, tmp_path: Path) -> None:
    rules = ["lm_head=bits:8,sym", "model.embed_tokens=bits:4,group:64,sym"]
    qk.convert(untied_model, out=tmp_path / "out", format=form, rules=rules, symmetric=True, **OPTIONS)
    reader = QuantizedReader(open_source(tmp_path / "out"))
    found = {name: reader.module(name) for name in ("lm_head", "model.embed_tokens")}
    assert all(isinstance(q, QuantTensor) for q in found.values())
    assert found["lm_head"].scheme.describe() == "W8 g32 sym"  # type: ignore[union-attr]
    assert found["model.embed_tokens"].scheme.describe() == "W4 g64 sym"  # type: ignore[union-attr]
    model = qk.load(tmp_path / "out", dtype="float32", kernel="reference")
    assert set(packed(model)) == {"lm_head", "model.embed_tokens"}
    exact = qk.load(tmp_path / "out", dtype="float32", dequantize=True)
    assert torch.allclose(model(IDS), exact(IDS), atol=1e-4)
    assert torch.equal(exact.module.lm_head.weight, found["lm_head"].dequantize())


@pytest.mark.parametrize(
    ("rules", "symmetric"),
    [
        (["lm_head=bits:8"], True),
        (["lm_head=bits:4", "model.embed_tokens=bits:4,group:64"], True),
        (["model.embed_tokens=bits:4"], False),
        (["*.down_proj=group:96", "lm_head=group:channel"], False),
    ],
)
def test_transformers_reads_quantized_heads_and_embeddings(
    rules: list[str], symmetric: bool, untied_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    report = qk.convert(untied_model, out=tmp_path / "out", rules=rules, symmetric=symmetric, **OPTIONS)
    assert {verdict.engine: verdict.loads for verdict in report.engines}["transformers"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = qk.load(tmp_path / "out", dtype="float32", dequantize=True)
    with torch.no_grad():
        assert torch.allclose(theirs(IDS).logits, ours(IDS), atol=1e-3)


@pytest.mark.parametrize(
    ("rules", "symmetric"),
    [
        (["*.down_proj=bits:8"], False),
        (["*.down_proj=sym"], False),
        (["model.embed_tokens=bits:8"], True),
        (["*.down_proj=group:48"], False),
        (["*.down_proj=group:16"], False),
    ],
)
def test_what_transformers_would_read_wrong_it_refuses_aloud(
    rules: list[str], symmetric: bool, untied_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    report = qk.convert(untied_model, out=tmp_path / "out", rules=rules, symmetric=symmetric, **OPTIONS)
    assert not {verdict.engine: verdict.loads for verdict in report.engines}["transformers"]
    with pytest.raises((RuntimeError, AttributeError)), torch.no_grad():
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(IDS)


def test_evaluation_uses_the_quantized_head(untied_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    given = dict(data=str(calibration_text), seq_len=32, tokens=128)
    fits = {}
    for bits in (8, 2):
        out = tmp_path / str(bits)
        rules = [f"lm_head=bits:{bits}", f"model.embed_tokens=bits:{bits}"]
        qk.convert(untied_model, out=out, format="native", rules=rules, bits=8, **{**OPTIONS, "group_size": None})
        fits[bits] = qk.evaluate(out, baseline=untied_model, **given)
    assert fits[8].kl_mean < fits[2].kl_mean / 20  # type: ignore[operator]
    assert fits[8].bits_per_weight is not None
    assert fits[8].bits_per_weight > fits[2].bits_per_weight  # type: ignore[operator]


def test_a_tied_matrix_is_refused_where_engines_cannot_hold_it(tiny_original: Path, tmp_path: Path) -> None:
    for form in ("compressed-tensors", "gptq", "awq"):
        with pytest.raises(QuantkitError, match=r"serves as embedding and head.*--format native"):
            qk.convert(
                tiny_original, out=tmp_path / "out", format=form, rules=["lm_head=bits:4"], symmetric=True, **OPTIONS
            )


def test_two_schemes_for_a_tied_matrix_are_refused(tiny_original: Path, tmp_path: Path) -> None:
    rules = ("lm_head=bits:8", "model.embed_tokens=bits:4")
    options = ConvertOptions(str(tiny_original), tmp_path / "out", format="native", rules=rules, **OPTIONS)
    with pytest.raises(RequestError, match="are one matrix"):
        make_plan(options)


def test_a_second_copy_in_the_file_is_dropped_if_equal_and_refused_if_not(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    qk.convert(tiny_model, out=tmp_path / "out", format="native", rules=["lm_head=bits:8"], **OPTIONS)
    assert not any("lm_head" in name for name in open_source(tmp_path / "out").names())
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match="two different matrices"):
        qk.convert(tiny_model, out=tmp_path / "other", format="native", rules=["lm_head=bits:8"], **OPTIONS)


def test_planted_nan_in_the_embeddings_is_named(untied_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(untied_model / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 7] = float("nan")
    save_file(tensors, untied_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantkitError, match=r"model\.embed_tokens\.weight.*NaN"):
        qk.convert(untied_model, out=tmp_path / "out", format="native", rules=["embed_tokens=bits:8"], **OPTIONS)


def test_the_prediction_counts_the_matrix(tiny_original: Path, tmp_path: Path) -> None:
    def phases(*rules: str) -> dict[str, int]:
        options = ConvertOptions(str(tiny_original), tmp_path / "out", format="native", rules=rules, **OPTIONS)
        return make_plan(options).prediction.phases

    vocabulary, hidden = open_source(tiny_original).info("model.embed_tokens.weight").shape
    assert "head_embeddings" not in phases()
    searched = 12 * CHUNK * 4  # a few rows as float32, their trials and errors
    # fp16 as stored, a byte for each code, and the packed words twice: encoded and being written
    assert phases("lm_head=bits:8")["head_embeddings"] == vocabulary * hidden * (2 + 1 + 2 * 1) + searched
    assert phases("lm_head=bits:4")["head_embeddings"] == vocabulary * hidden * (2 + 1 + 2 * 0.5) + searched


def test_a_rule_for_the_head_of_a_tied_model_is_told_what_to_do_instead(tiny_model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "symmetric": True, "rules": ["lm_head=bits:8"]}
    with pytest.raises(RequestError, match=r"\(they are tied\).*--format native, or --format gguf.*--rotate"):
        qk.convert(tiny_model, tmp_path / "refused", **options)
    qk.convert(tiny_model, tmp_path / "native", format="native", **options)
    report = qk.convert(tiny_model, tmp_path / "rotated", rotate=True, **options)
    assert {layer.scheme for layer in report.layers if layer.name == "lm_head"} == {"W8 g32 sym"}
