"""The device that blocks are worked on: its memory, and the precision of float32 matrix products there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from quantkit.calibrate.matmul_precision import matmul_precision
from quantkit.core.host import release_free_memory
from quantkit.core.precision import exact_products
from quantkit.errors import QuantkitError


@contextlib.contextmanager
def working_on(device: torch.device, mode: str = "float32") -> Iterator[None]:
    """Multiply float32 matrices in float32 or in ``mode``, and count device memory from here on.

    TF32 is off: with it statistics would keep 10 bits.

    device: where blocks are worked on.
    mode: the matmul precision (``calibrate.matmul_precision``).

    Raises QuantkitError in place of torch's error where the device's memory does not suffice.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with exact_products(), matmul_precision(mode):
            yield
    except torch.OutOfMemoryError as error:
        raise QuantkitError(
            f"{device}: its memory does not suffice ({str(error).partition('. ')[0]}). Does another process use it? "
            "Use --device cpu, or fewer tokens per window (--seq-len)."
        ) from error


def peak_device_bytes(device: torch.device) -> int:
    """Return the most bytes that tensors took on a GPU since ``working_on``; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def release_memory(device: torch.device) -> None:
    """Return free memory to the system, on the host and on a GPU: the next block needs pieces of other sizes."""
    release_free_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
