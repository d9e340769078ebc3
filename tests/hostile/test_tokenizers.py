"""A tokenizer that is made to do harm is refused by name within 10 seconds and 1 GB."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile.limits import Limited

READ = "hostile.test_tokenizers:read"
LONG = "a" * 60 + "b"
WRITER = {"type": "Replace", "pattern": {"String": "a"}}


def read(folder: str) -> int:
    """What the child with limits calls."""
    from quantkit.checkpoint.tokenizer import load_tokenizer, token_ids

    return len(token_ids(load_tokenizer(Path(folder)), LONG))


def split(pattern: str) -> dict[str, Any]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (split("(a+)+$"), "cannot be used on this text"),
        (split("("), "cannot be loaded"),
        ({"normalizer": {**WRITER, "content": "b" * 1_000_000}}, "more than 64 times as long"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{**WRITER, "content": "aaaaaaaaaa"}] * 12}}, "64 times"),
        ({"decoder": {**WRITER, "content": "a" * 1000}}, "64 times"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "no", "type_id": 0}}],
                             "pair": [], "special_tokens": {}}}, "cannot be used"),
        ({"post_processor": {"type": "TemplateProcessing",
                             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 9999,
                             "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}}},
         "9999 tokens|makes"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_hostile_tokenizer_is_refused_by_name(
    change: dict[str, Any], words: str, tiny_model: Path, limited: Limited
) -> None:
    file = tiny_model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    outcome = limited(READ, str(tiny_model))
    outcome.refused(str(tiny_model))
    assert any(word in outcome.message for word in words.split("|")), outcome


@pytest.mark.parametrize("value", ['"long"', "{}", "[1]", "true", "null", "1e999", "NaN"])
def test_a_longest_text_that_is_no_number_is_named(value: str, tiny_model: Path, limited: Limited) -> None:
    file = tiny_model / "tokenizer_config.json"
    content = json.loads(file.read_text()) | {"model_max_length": "MARK"}
    file.write_text(json.dumps(content).replace('"MARK"', value))
    outcome = limited(READ, str(tiny_model))
    if value in ("1e999", "NaN", "null"):  # no limit
        assert outcome.kind in ("passed", "refused"), outcome
    else:
        outcome.refused("tokenizer_config.json", "model_max_length")


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(10**11)


@pytest.mark.parametrize("make", [os.mkfifo, sparse, lambda path: path.mkdir()], ids=["FIFO", "sparse", "folder"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_a_tokenizer_file_that_is_none_is_named(
    make: Callable[[Path], None], name: str, tiny_model: Path, limited: Limited
) -> None:
    (tiny_model / name).unlink(missing_ok=True)
    make(tiny_model / name)
    limited(READ, str(tiny_model)).refused(name)
