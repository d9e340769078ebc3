"""Sizes in words, and the peak of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quantkit.core.host import peak_rss, restart_peak, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 kB"), (8192, "8 kB"), (6_700_000, "6.7 MB"), (45_000_000, "45 MB"), (1_234_000_000, "1.23 GB")],
)
def test_sizes_in_words(size: int, text: str) -> None:
    assert size_text(size) == text


CHILD = "from quantkit.core.host import current_rss, peak_rss; print(current_rss(), peak_rss())"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system tells nothing better")
def test_a_peak_does_not_begin_with_that_of_the_process_that_started_this_one() -> None:
    # resident while the child is started, as in a suite that evaluates between conversions
    held = bytearray(b"x") * 300_000_000
    child = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True)
    now, peak = map(int, child.stdout.split())
    assert now <= peak + (8 << 20)  # the kernel counts each by itself, and not to the last page
    assert peak < now + 2 * len(held) // 3


def test_the_whole_peak_remembers_what_a_restart_forgets() -> None:
    held = bytearray(b"x") * 200_000_000
    high = peak_rss()
    del held
    if not restart_peak():
        pytest.skip("the system does not count a peak anew")
    assert peak_rss() >= high > peak_rss(since_restart=True)
