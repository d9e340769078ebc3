"""A tokenizer that is made to do harm is refused by name within 10 seconds and 1 GB."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile.limits import Limited

from quantkit.convert.api import plan_request
from quantkit.errors import SourceError

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


FOREIGN = [
    {"tokenizer_class": "MineTokenizer"},
    {"tokenizer_class": "MineTokenizerFast", "auto_map": {"AutoTokenizer": ["tokenization_m.E", None]}},
    {"tokenizer_class": None, "auto_map": {"AutoTokenizer": ["tokenization_m.E", "tokenization_m.E"]}},
    {"tokenizer_class": "MineTokenizer", "auto_map": ["org/name--tokenization_m.E", None]},
]


@pytest.mark.parametrize("change", FOREIGN, ids=lambda change: str(change)[:60])
def test_a_tokenizer_that_names_code_is_read_from_its_file(
    change: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    from quantkit.checkpoint.tokenizer import load_tokenizer, repair_config, token_ids

    whole = load_tokenizer(tiny_model)
    config = tiny_model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    (tiny_model / "tokenization_m.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass E:\n    pass\n")
    loaded = load_tokenizer(tiny_model)
    assert token_ids(loaded, LONG, special=True) == token_ids(whole, LONG, special=True)
    assert loaded.special_tokens_map == whole.special_tokens_map
    assert loaded.chat_template == whole.chat_template
    repair_config(tiny_model)  # as it goes into an output
    written = json.loads(config.read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "auto_map" not in written
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("change", FOREIGN[1:], ids=lambda change: str(change)[:60])
def test_a_tokenizer_that_is_code_alone_is_refused(change: dict[str, Any], tiny_model: Path, limited: Limited) -> None:
    config = tiny_model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    (tiny_model / "tokenizer.json").rename(tiny_model / "tokenizer.model")
    outcome = limited(READ, str(tiny_model))
    outcome.refused("tokenizer_config.json", "which is not run", "no tokenizer.json")
    assert "trust_remote_code" not in outcome.message


@pytest.mark.parametrize("named", [["../other.json"], ["tokenizer.4.0.0.json"], "tokenizer.json", {"a": 1}])
def test_other_files_in_the_place_of_tokenizer_json(named: Any, tiny_model: Path, limited: Limited) -> None:
    file = tiny_model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"fast_tokenizer_files": named}))
    (tiny_model / "tokenizer.4.0.0.json").write_text((tiny_model / "tokenizer.json").read_text())
    limited(READ, str(tiny_model)).refused(str(tiny_model), "fast_tokenizer_files")


@pytest.mark.parametrize("make", [os.mkfifo, sparse], ids=["FIFO", "sparse"])
def test_a_further_chat_template_that_is_none(
    make: Callable[[Path], None], tiny_model: Path, tmp_path: Path, limited: Limited
) -> None:
    """Named before a block is worked on, and neither read nor copied."""
    file = tiny_model / "additional_chat_templates" / "tools.jinja"
    file.parent.mkdir()
    make(file)
    limited(READ, str(tiny_model)).refused(str(file))
    with pytest.raises(SourceError, match=re.escape(str(file))):
        plan_request(tiny_model, tmp_path / "out", method="rtn")
