"""``--calibration self``: the model writes its calibration text.

The same for the same seed, and only as much as helps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.texts import load_text
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan, self_calibration
from quantkit.convert.report.dry_run import describe
from quantkit.errors import RequestError, SourceError


def written(folder: Path, **options: Any) -> Any:
    asked = ConvertOptions(
        **{"source": str(folder), "out": Path("out"), "calibration": "self", "samples": 3, "seq_len": 16} | options
    )
    source = open_source(folder)
    return self_calibration.write(source, load_tokenizer(source), asked, lambda done, total: None)


def test_the_same_seed_writes_the_same_tokens_and_another_does_not(tiny_model: Path) -> None:
    one, two, other = written(tiny_model), written(tiny_model), written(tiny_model, seed=1)
    assert one.digest() == two.digest() != other.digest()
    assert one.text_sha256 == two.text_sha256 != other.text_sha256
    assert one.ids.shape == (3, 16)
    assert one.ids.dtype == torch.int64
    assert len({tuple(row) for row in one.ids.tolist()}) == 3


def test_what_is_written_is_what_the_model_finds_likely(tiny_model: Path) -> None:
    """A model that always answers with one token writes that token."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    head = torch.zeros_like(tensors["model.embed_tokens.weight"])
    head[77] = tensors["model.norm.weight"].sign()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].abs() + 1
    tensors["lm_head.weight"] = 50 * head
    for name, tensor in tensors.items():
        if ".o_proj." in name or ".down_proj." in name:  # nothing but the embedding reaches the head
            tensors[name] = torch.zeros_like(tensor)
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    assert set(written(tiny_model).ids[:, 1:].flatten().tolist()) == {77}


def test_bos_opens_each_window_where_the_model_wants_it(tiny_model: Path) -> None:
    file = tiny_model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": True}))
    tokens = json.loads((tiny_model / "tokenizer.json").read_text())
    tokens["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (tiny_model / "tokenizer.json").write_text(json.dumps(tokens))
    found = written(tiny_model)
    assert found.bos
    assert found.ids.shape == (3, 16)
    assert set(found.ids[:, 0].tolist()) == {0}


def test_beyond_the_bound_windows_overlap_instead_of_more_being_written(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_calibration, "TOKENS", 32)
    asked: list[tuple[int, int]] = []
    source = open_source(tiny_model)
    options = ConvertOptions(source=str(tiny_model), out=Path("out"), samples=7, seq_len=16)
    found = self_calibration.write(source, load_tokenizer(source), options, lambda *step: asked.append(step))
    assert asked[-1] == (32, 32)
    assert found.ids.shape == (7, 16)
    assert len({tuple(row) for row in found.ids.tolist()}) == 7


def test_windows_cover_the_text_from_end_to_end() -> None:
    ids = torch.arange(40)
    assert self_calibration.cut(ids, 4, 10).tolist() == ids.reshape(4, 10).tolist()
    dense = self_calibration.cut(ids, 9, 10)
    assert (int(dense[0, 0]), int(dense[-1, -1]), len(set(dense.flatten().tolist()))) == (0, 39, 40)
    assert self_calibration.cut(ids, 1, 10).tolist() == [list(range(10))]


def test_a_start_is_an_ordinary_token_that_the_model_knows(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(open_source(tiny_model))
    starts = self_calibration.first_tokens(tokenizer, 10, 500, 0)
    assert set(starts.tolist()) == set(range(2, 10))  # 0 and 1 are <s> and </s>
    with pytest.raises(SourceError, match="special tokens only"):
        self_calibration.first_tokens(tokenizer, 2, 5, 0)


def test_the_plan_says_that_the_whole_model_is_needed_and_counts_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("quantkit.runtime.load.load", None)  # a plan writes nothing
    options = dict(source=str(tiny_model), out=tmp_path / "out", samples=4, seq_len=16, group_size=32, format="native")
    plan = make_plan(ConvertOptions(**options, calibration="self"))
    assert "the model writes 4 x 16 tokens first; for this it is in memory whole" in describe(plan)
    parameters = sum(p.numel() for p in quantkit_parameters(tiny_model))
    cache = 2 * 3 * 2 * 16 * 4 * 16  # keys and values, layers, heads, width, windows, tokens
    assert plan.prediction.phases["self"] == 4 * (parameters + cache)


def quantkit_parameters(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).parameters()


def test_a_conversion_without_any_text_records_what_was_written(tiny_model: Path, tmp_path: Path) -> None:
    options = dict(method="gptq", group_size=32, format="native", calibration="self", samples=4, seq_len=16)
    steps: list[str] = []
    quantkit.convert(tiny_model, tmp_path / "out", on_progress=lambda p: steps.append(p.stage), **options)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())["calibration"]
    expected = written(tiny_model, samples=4)
    assert manifest["text"] == "self"
    assert (manifest["text_sha256"], manifest["tokens_sha256"]) == (expected.text_sha256, expected.digest())
    assert list(dict.fromkeys(steps))[:3] == ["read", "self", "blocks"]


def test_it_is_no_text_for_evaluating() -> None:
    with pytest.raises(RequestError, match="convert --calibration self"):
        load_text("self", split="evaluation")
