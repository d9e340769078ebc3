"""Head and embeddings: rounded whole as the algorithm rounds them, and tied ones written under the right name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model
from safetensors.torch import load_file, save_file
from stage_models import Stored, stored

from quantkit.algorithms.rtn import rtn
from quantkit.checkpoint.source import FolderSource
from quantkit.convert.plan.memory import CHUNK
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import BlockResult, decision_sha256
from quantkit.convert.stages.head_embeddings import quantize_head_or_embedding
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError, SourceError
from quantkit.formats import writer_format
from quantkit.model.skeleton import build_skeleton, find_blocks
from quantkit.model.weights import Weights

NATIVE, CPU = writer_format("native"), torch.device("cpu")
EMBED = "model.embed_tokens"


def target(name: str, kind: str, scheme: Scheme, rows: int = 100) -> Target:
    return Target(name, f"{name}.weight", rows, 32, scheme, kind)


def quantized(weights: Weights, of: Target, **changes: Any) -> BlockResult:
    result = BlockResult()
    quantize_head_or_embedding(
        of, result, **{"weights": weights, "format": NATIVE, "device": CPU, "scales": "search", **changes}
    )
    return result


@pytest.mark.parametrize("scales", ["search", "minmax"])
@pytest.mark.parametrize("scheme", [Scheme(4, 16, False), Scheme(8, 32, True)], ids=str)
@pytest.mark.parametrize("name", ["lm_head", EMBED])
def test_each_is_rounded_as_the_algorithm_does_and_stored_under_its_own_name(
    name: str, scheme: Scheme, scales: Any, tmp_path: Path
) -> None:
    model = stored(tmp_path, tie_word_embeddings=False)
    weight = model.original.get_submodule(name).weight.detach()
    result = quantized(model.weights, target(name, "head" if name == "lm_head" else "embedding", scheme), scales=scales)
    expected = rtn(weight, scheme, scales).quantized
    assert result.digests == {name: decision_sha256(expected)}
    assert {part.rpartition(".")[0] for part in result.parts} == {name}
    read = NATIVE.decode({part: result.parts[f"{name}.{part}"] for part in NATIVE.encode(expected)}, scheme)
    assert torch.equal(read.dequantize(), expected.dequantize())
    (report,) = result.layers
    relative = float((expected.dequantize() - weight).double().norm() / weight.double().norm())
    assert report.relative_weight_error == pytest.approx(relative, rel=1e-6)
    assert (report.name, report.weights, report.bits, report.tokens) == (name, 3200, expected.bits_stored, 0)
    assert report.relative_output_error is None


def test_a_vocabulary_that_is_worked_through_in_pieces_comes_out_as_if_it_were_whole(tmp_path: Path) -> None:
    rows = CHUNK // 32 + 1000
    model, scheme = stored(tmp_path, vocab_size=rows, num_hidden_layers=1), Scheme(4, 32, False)
    result = quantized(model.weights, target(EMBED, "embedding", scheme, rows), scales="minmax")
    expected = rtn(model.original.get_input_embeddings().weight.detach(), scheme, "minmax").quantized
    assert result.digests[EMBED] == decision_sha256(expected)


def twice(folder: Path, change: float = 0.0) -> Stored:
    """A model whose config ties head and embeddings, and whose file stores both."""
    original = tiny_model("llama", tie_word_embeddings=True)
    original.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors[f"{EMBED}.weight"].clone()
    tensors["lm_head.weight"][7, 7] += change
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    source = FolderSource(folder)
    model = build_skeleton(source.config)
    return Stored(original, model, find_blocks(model), Weights(model, source))


def test_a_tied_matrix_has_the_name_of_the_embeddings_alone_also_where_the_file_stores_it_twice(tmp_path: Path) -> None:
    model, scheme = twice(tmp_path), Scheme(4, 16, False)
    result = quantized(model.weights, target(EMBED, "tied", scheme))
    expected = rtn(model.original.get_input_embeddings().weight.detach(), scheme, "search").quantized
    assert result.digests == {EMBED: decision_sha256(expected)}
    assert all(part.startswith(f"{EMBED}.") for part in result.parts)


def test_two_different_matrices_that_the_config_calls_tied_are_refused_by_name(tmp_path: Path) -> None:
    model = twice(tmp_path, change=0.5)
    with pytest.raises(SourceError, match=r"ties 'lm_head\.weight' to 'model\.embed_tokens\.weight'"):
        quantized(model.weights, target(EMBED, "tied", Scheme(4, 16, False)))


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "NaN"), (1e9, EMBED)])
def test_a_value_that_is_none_or_too_large_is_told_with_the_name(value: float, words: str, tmp_path: Path) -> None:
    stored(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{EMBED}.weight"][99, 31] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = build_skeleton(FolderSource(tmp_path).config)
    with pytest.raises(NumericsError, match=words) as raised:
        quantized(Weights(model, FolderSource(tmp_path)), target(EMBED, "embedding", Scheme(4, 16, False)))
    assert EMBED in str(raised.value)
