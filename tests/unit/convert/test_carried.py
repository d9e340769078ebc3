"""Which of the source's own files go with the output."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.convert.plan import carried as module
from quantkit.convert.plan.carried import beside_sha256, carried

COPIED = (
    "LICENSE",
    "LICENCE.txt",
    "NOTICE",
    "README.md",
    "USE_POLICY.md",
    "preprocessor_config.json",
    "vocab.txt.json",
)
WRITTEN_ANEW = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json", "x.tiktoken")
LEFT = (
    "modeling_own.py",
    "quantize_config.json",
    "quantkit.json",
    "trainer_state.json",
    "all_results.json",
    "data.bin",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (*COPIED, *WRITTEN_ANEW, *LEFT, "model.safetensors", "model.gguf", ".gitattributes"):
        (tmp_path / name).write_text(name)
    (tmp_path / "original").mkdir()
    (tmp_path / "pictures.md").mkdir()
    return tmp_path


def source(path: Path) -> Any:
    return SimpleNamespace(path=path)


def test_each_file_is_copied_written_anew_or_named_as_left_behind(folder: Path) -> None:
    copied, left = carried(source(folder))
    assert sorted(path.name for path in copied) == sorted(COPIED)
    assert sorted(left) == sorted((*LEFT, "original", "pictures.md"))


def test_a_file_of_data_is_left_behind(folder: Path) -> None:
    with (folder / "README.md").open("wb") as file:
        file.truncate(module.LARGEST + 1)
    copied, left = carried(source(folder))
    assert "README.md" in left
    assert len(copied) == len(COPIED) - 1


def test_a_single_file_has_nothing_beside_it(folder: Path) -> None:
    assert carried(source(folder / "model.gguf")) == ([], [])
    assert beside_sha256(source(folder / "model.gguf")) == beside_sha256(source(folder / "nowhere"))


def test_the_digest_sees_names_and_bytes_but_not_weights(folder: Path) -> None:
    before = beside_sha256(source(folder))
    (folder / "model.safetensors").write_text("other")
    assert beside_sha256(source(folder)) == before
    (folder / "config.json").write_text("other")
    changed = beside_sha256(source(folder))
    assert changed != before
    (folder / "NOTICE").rename(folder / "NOTICES")
    assert beside_sha256(source(folder)) not in (before, changed)
