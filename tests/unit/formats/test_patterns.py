"""Patterns of a stranger's config: matched in a moment, or refused by name."""

from __future__ import annotations

import pytest

from quantkit.errors import CheckpointError
from quantkit.formats.common import match_pattern
from quantkit.formats.gptq_rules import pattern

NAME = "model.layers.10.self_attn.q_proj" + "a" * 60


@pytest.mark.parametrize("slow", ["(a+)+$", "(.*)*x", "((a|a)+)+$", "(?:a{1,})+$", ".*.*.*.*.*.*x", "(a*){30}$"])
def test_a_pattern_that_would_take_for_ever(slow: str) -> None:
    with pytest.raises(CheckpointError, match="for ever"):
        match_pattern(slow, NAME)


@pytest.mark.parametrize(
    "usual", [".*q_proj", r".*\\.10\\..*proj.*", "model.layers.(?:1|10).self_attn.q_proj", r"\\w+\\.layers"]
)
def test_a_pattern_that_configs_have(usual: str) -> None:
    assert match_pattern(usual.replace("\\\\", "\\"), NAME)


def test_patterns_that_we_write() -> None:
    names = [f"model.layers.{n}.mlp.{part}_proj" for n in range(100) for part in ("up", "gate")]
    assert all(match_pattern(pattern(names), name) for name in names)
