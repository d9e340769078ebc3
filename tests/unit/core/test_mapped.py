"""Parts of a file mapped into memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from quantkit.core.host import current_rss
from quantkit.core.mapped import map_bytes


@pytest.mark.parametrize("begin", [0, 1, 4095, 4096, 70_000])
def test_bytes_are_those_of_the_file_wherever_they_begin(begin: int, tmp_path: Path) -> None:
    content = np.random.default_rng(1).integers(0, 256, 100_000).astype(np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    found, forget = map_bytes(tmp_path / "file", begin, 30_000)
    assert np.array_equal(found.numpy(), content[begin : begin + 30_000])
    forget()
    assert np.array_equal(found.numpy(), content[begin : begin + 30_000])


def test_a_file_that_ends_too_soon_is_refused_before_anybody_reads_behind_its_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    with pytest.raises(OSError, match="shorter"):
        map_bytes(tmp_path / "file", 500, 501)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system gives no pages back")
def test_pages_that_are_forgotten_are_no_longer_this_process_s(tmp_path: Path) -> None:
    size = 64 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    found, forget = map_bytes(tmp_path / "file", 0, size)
    before = current_rss()
    assert not bool(found.any())
    assert current_rss() - before > size // 2
    forget()
    assert current_rss() - before < size // 4
