"""Patterns of a stranger's config: matched in a moment, or refused by name."""

from __future__ import annotations

import itertools
import re

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


def test_what_several_open_ends_match_is_what_the_library_says() -> None:
    pieces = ["a", "b.", "ab$", "", r"\."]
    names = ["".join(letters) for length in range(6) for letters in itertools.product("ab.", repeat=length)]
    for chosen in itertools.product(pieces, repeat=4):
        text = ".*".join(chosen)
        for name in names[::7]:
            assert match_pattern(text, name) == bool(re.match(text, name)), (text, name)


def test_five_open_ends_over_thousands_of_names() -> None:
    """Some 10**9 ways to divide each name: without a bound this takes hours."""
    assert not any(match_pattern(".*a.*a.*a.*a.*b", f"{number}" + "a" * 400) for number in range(2000))


@pytest.mark.parametrize("slow", [".*(a|ab).*(a|ab).*(a|ab).*x", "a+.*a+.*x"])
def test_pieces_of_several_lengths_over_a_long_name(slow: str) -> None:
    with pytest.raises(CheckpointError, match="for ever"):
        match_pattern(slow, "a" * 200)
    assert not match_pattern(".*(q|k|v|gate)_proj.*x.*$", NAME[:60])
