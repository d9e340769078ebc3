"""Parts of a file mapped into memory: pages that nobody reads take none, and those that are read are the file's own."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """A tensor of a mapped file, or one in memory of its own.

    value: not to be written to.
    forget: give pages that were read back to the system; they are read again when somebody looks.
    """

    value: Tensor
    forget: Callable[[], None]


def owned(value: Tensor) -> View:
    """A view of a tensor that has its own memory: there is nothing to give back."""
    return View(value, lambda: None)


def map_bytes(file: Path, begin: int, size: int) -> tuple[Tensor, Callable[[], None]]:
    """Return ``size`` bytes of a file as uint8 ``[size]``, and what gives their pages back to the system.

    The mapping ends with the last tensor that looks at it,
    and holds an open file until then. The file must keep its length: a page behind its end kills
    the process that reads it.

    Raises OSError for a file that cannot be read, or ends too soon.
    """
    first = begin - begin % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as stream:
        if stream.seek(0, 2) < begin + size:
            raise OSError("the file became shorter")
        # a copy of its own where somebody writes: torch has no tensors that are read only
        mapped = mmap.mmap(stream.fileno(), begin + size - first, access=mmap.ACCESS_COPY, offset=first)

    def forget() -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin - first), forget
