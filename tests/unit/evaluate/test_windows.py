"""Windows: which tokens are seen and which are scored, for both protocols."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quantkit.errors import RequestError, SourceError
from quantkit.evaluate.windows import make_windows

BOS = 1000


def test_windows_without_bos_are_consecutive_and_score_all_but_the_first_token():
    windows = make_windows(range(26), protocol="gptq", seq_len=8)
    assert windows.ids.tolist() == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert windows.targets(1).tolist() == list(range(9, 16))
    assert (windows.scored, windows.stride, windows.bos) == (7, 8, False)


def test_with_bos_a_window_is_bos_and_one_text_token_less():
    windows = make_windows(range(21), protocol="gptq", seq_len=8, bos_id=BOS)
    assert windows.ids.tolist() == [[BOS, *range(7)], [BOS, *range(7, 14)], [BOS, *range(14, 21)]]
    assert windows.targets(2).tolist() == list(range(14, 21))
    assert windows.stride == 7


def test_llama_cpp_cuts_the_stream_that_starts_with_bos_and_replaces_each_windows_first_token():
    windows = make_windows(range(23), protocol="llama.cpp", seq_len=8, bos_id=BOS)
    assert windows.ids.tolist() == [[BOS, *range(7)], [BOS, *range(8, 15)], [BOS, *range(16, 23)]]
    assert windows.targets(1).tolist() == [12, 13, 14]  # after position seq_len / 2, as perplexity.cpp scores
    assert make_windows(range(23), protocol="llama.cpp", seq_len=8).ids[1].tolist() == list(range(8, 16))


def test_llama_cpp_windows_are_512_and_score_255_tokens():
    windows = make_windows(range(600), protocol="llama.cpp")
    assert (windows.seq_len, windows.scored) == (512, 255)


def test_tokens_counts_bos_and_rounds_down_to_whole_windows():
    windows = make_windows(range(1000), protocol="gptq", seq_len=10, bos_id=BOS, tokens=39)
    assert (windows.count, windows.ids.numel()) == (3, 30)


@given(st.integers(4, 40), st.integers(1, 300), st.booleans())
def test_every_text_token_is_used_once_and_only_the_tail_is_left(seq_len, length, bos):
    step = seq_len - bos
    if length < step:
        with pytest.raises(SourceError, match="Lower --tokens or --seq-len"):
            make_windows(range(length), protocol="gptq", seq_len=seq_len, bos_id=BOS if bos else None)
        return
    windows = make_windows(range(length), protocol="gptq", seq_len=seq_len, bos_id=BOS if bos else None)
    assert windows.ids[:, int(bos) :].flatten().tolist() == list(range(length // step * step))


def test_more_tokens_than_the_text_has_is_an_error_that_counts_them():
    with pytest.raises(SourceError, match="100 tokens: 10 windows of 10, and 20 are asked for"):
        make_windows(range(100), protocol="gptq", seq_len=10, tokens=200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "wikitext"}, "'wikitext' is unknown"),
        ({"protocol": "gptq", "seq_len": 3}, "at least 4"),
        ({"protocol": "gptq", "seq_len": 8, "tokens": 7}, "less than one window"),
    ],
)
def test_a_wrong_request_is_refused_with_the_remedy(options, message):
    with pytest.raises(RequestError, match=message):
        make_windows(range(100), **options)


def test_the_digest_tells_windows_apart():
    one, same = make_windows(range(64), protocol="gptq", seq_len=8), make_windows(range(64), protocol="gptq", seq_len=8)
    assert one.digest() == same.digest()
    assert one.digest() != make_windows(range(1, 65), protocol="gptq", seq_len=8).digest()
    assert one.digest() != make_windows(range(64), protocol="gptq", seq_len=16).digest()
    assert one.ids.dtype == torch.int64
