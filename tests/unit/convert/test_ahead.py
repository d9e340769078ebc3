"""Work done ahead comes back in order, no more of it than was allowed, and stops at the first error."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from quantkit.convert.output.ahead import ahead


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def torch_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return int(request.param)


def test_results_come_in_the_order_of_the_items(torch_threads: int) -> None:
    def slow_at_first(n: int) -> int:
        time.sleep(0.02 if n == 0 else 0)
        return n * n

    assert list(ahead(slow_at_first, range(20))) == [n * n for n in range(20)]


def test_no_more_is_begun_than_is_taken_and_two_beside_it(torch_threads: int) -> None:
    begun = list[int]()
    results = ahead(lambda n: begun.append(n), range(100))
    for taken in range(1, 10):
        next(results)
        assert taken <= len(begun) <= taken + (2 if torch_threads > 1 else 0)
    results.close()  # type: ignore[attr-defined]
    assert len(begun) <= 11


def test_an_error_comes_in_its_turn_and_nothing_is_begun_after_it(torch_threads: int) -> None:
    begun = list[int]()

    def fails_at_three(n: int) -> int:
        begun.append(n)
        if n == 3:
            raise ValueError("three")
        return n

    results = ahead(fails_at_three, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert len(begun) <= 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
