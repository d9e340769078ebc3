"""Sizes in words, and interrupts that wait while something is tidied up."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from quantkit.core.host import size_text, undisturbed


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 kB"), (8192, "8 kB"), (6_700_000, "6.7 MB"), (45_000_000, "45 MB"), (1_234_000_000, "1.23 GB")],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_everything_is_tidied_up(number: signal.Signals) -> None:
    done, wait = [], threading.Event()
    before = signal.signal(number, lambda *_: done.append("interrupted"))
    try:
        other = threading.Thread(target=wait.wait)
        other.start()
        with undisturbed():
            os.kill(os.getpid(), number)  # to the process: the system picks the thread
            done.append("tidied up")
    finally:
        signal.signal(number, before)
        wait.set()
        other.join()
    assert done == ["tidied up", "interrupted"]
