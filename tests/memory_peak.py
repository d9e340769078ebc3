"""What work takes of this process's memory at its peak, without the noise of a resident size.

Pages of libraries count in a resident size: the system drops them when memory is short, and they are read in again when
they are used. So what is mapped from files does not count here. What remains errs upwards: a heap that earlier tests
have torn has no room for what would fit otherwise. So a test that finds a peak too high may measure again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.core.host import current_rss, map_large_blocks, peak_rss, release_free_memory, restart_peak


def mapped_files() -> int:
    """Bytes of this process's resident size that are pages of files; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile")), 0)


def own_bytes() -> int:
    """Bytes of this process's resident size that are not pages of files."""
    return current_rss() - mapped_files()


@contextmanager
def peak_taken(taken: list[int]) -> Iterator[None]:
    """Append to ``taken`` the bytes that the ``with`` statement needs at its peak beyond what the process holds before.

    Skips the test where the system does not count a peak anew.
    """
    map_large_blocks()  # as every conversion does first: without it the same work took 97 MB or 162 MB
    gc.collect()  # what earlier tests left in cycles
    release_free_memory()
    before, mapped = current_rss(), mapped_files()
    if not restart_peak():
        pytest.skip("the system does not count a peak anew")
    yield
    taken.append(peak_rss(since_restart=True) - before - (mapped_files() - mapped))


def least_of_three(measure: Callable[[], float], most: float) -> float:
    """The least of up to three measurements; the first one that is not above ``most`` is the last."""
    least = measure()
    for _ in range(2):
        if least > most:
            least = min(least, measure())
    return least
