"""Streaming text: nothing shown is ever taken back, and stop strings do not leak."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.runtime.generate.text_stream import TextStream


def feed(tokenizer: Any, text: str, stop: tuple[str, ...] = (), prompt: str = "Hi") -> tuple[list[str], TextStream]:
    """Push ``text`` byte by byte (the tokenizer knows bytes only) and then finish."""
    stream = TextStream(tokenizer, tokenizer(prompt)["input_ids"], stop)
    pieces = []
    for token in tokenizer(text)["input_ids"]:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, stream
    pieces.append(stream.finish())
    return pieces, stream


@pytest.mark.parametrize("text", ["plain words", " leading space", "naïve – 日本語 🙂 end", "🙂", "a\n\n b\t"])
def test_pieces_join_to_the_text_and_characters_stay_whole(tokenizer: Any, text: str) -> None:
    pieces, stream = feed(tokenizer, text)
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_unfinished_bytes_appear_only_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer("a🙂")["input_ids"][:-1]
    stream = TextStream(tokenizer, tokenizer("Hi")["input_ids"], ())
    assert [stream.push(token) for token in ids] == ["a", "", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.text == "a\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("aaaab", ("aab",), "aa"),
        ("x日本y", ("日本",), "x"),
        ("first B then A", ("A", "B"), "first "),
        ("abc", ("bcd", "abc"), ""),
        ("ends with EN", ("END",), "ends with EN"),
    ],
)
def test_a_stop_string_ends_the_text_and_never_leaks(
    tokenizer: Any, text: str, stop: tuple[str, ...], expected: str
) -> None:
    pieces, stream = feed(tokenizer, text, stop)
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == any(s in text for s in stop)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab🙂", max_size=20), st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3))
def test_streaming_equals_cutting_the_whole_text(tokenizer: Any, text: str, stop: list[str]) -> None:
    pieces, stream = feed(tokenizer, text, tuple(stop))
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    # the first stop string that is completed wins; of several completed by one character, the earliest beginning
    first = min((end for end, _ in ends), default=None)
    cut = min((at for end, at in ends if end == first), default=len(text))
    assert "".join(pieces) == stream.text == text[:cut]


def test_special_tokens_are_not_shown(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, [1, 2], ())
    assert stream.push(tokenizer.eos_token_id) == ""
