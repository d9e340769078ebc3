"""Predict what a conversion needs before it starts: host memory, disk. (Device memory is 0: converting runs on the CPU.)"""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import dataclass
from typing import Any

BATCH_TOKENS = 4096  # tokens per forward of a block: enough to keep a matmul busy, little memory


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes. Host memory is the process's resident peak, interpreter and libraries included."""

    host: int
    device: int
    disk: int
    output: int
    phases: dict[str, int]  # what each phase adds to the resident size at the start

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_host_bytes": self.host,
            "peak_device_bytes": self.device,
            "peak_disk_bytes": self.disk,
            "output_bytes": self.output,
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the prediction is made from: element counts, and bytes where named so."""

    before_blocks: int  # parameters loaded to embed tokens
    stored_itemsize: int
    largest_plain: int  # elements of the largest tensor copied unchanged
    block: int  # parameters of the largest block
    widths: tuple[int, ...]  # in_features of each distinct input of a block
    largest_group: int  # elements of the largest stack of linears with one input
    inner: int  # activations per token inside a block
    hidden: int
    tokens: int  # calibration tokens, 0 without data
    seq_len: int
    plain_bytes: int
    packed_bytes: int
    calibrated: bool
    kv_sample_bytes: int


def peak_rss() -> int:
    """Largest resident size of this process so far, in bytes (the operating system's accounting)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def current_rss() -> int:
    """Resident size of this process now, in bytes; the peak so far where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss()


def release_free_memory() -> None:
    """Give freed pages back to the system. glibc keeps them in its heap otherwise, and the resident size creeps up block
    by block. Other C libraries have no such call and return large blocks by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def map_large_blocks() -> None:
    """Let glibc map every block of 4 MB and more by itself, so that freeing one gives its pages back at once.

    By default the threshold rises with the blocks that are freed, up to 32 MB; tensors then come from a heap that
    fragments, and the peak grows with the number of layers (892 against 678 MB for 24 small ones). Smaller blocks stay in
    the heap: the temporaries of the inner loops are reused without page faults. Holds for the rest of the process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)


_M_MMAP_THRESHOLD = -3  # malloc.h


def predict(sizes: Sizes) -> Prediction:
    """The largest phase, on top of what the process holds now.

    embed:  the embedding is read (stored copy + its finite mask + float32), then the states fill
    block:  states + a block in float32 + one Hessian per input in float64 + one batch of activations
    solve:  states + block + Hessians + float64 copies for the factorisation + search and rounding temporaries
    copy:   states + three stored copies of the largest plain tensor (read, written, read back)
    """
    f32 = 4
    states = sizes.tokens * sizes.hidden * f32
    hessians = sum(w * w for w in sizes.widths) * 8 if sizes.calibrated else 0
    widest = max(sizes.widths)
    batch = min(sizes.tokens, max(BATCH_TOKENS, sizes.seq_len))
    read_block = sizes.block * f32
    phases = {"copy": 3 * sizes.largest_plain * sizes.stored_itemsize}
    if sizes.tokens:
        # the embedding's float32 copy stays until the states are filled, its stored copy only while it is read
        reading = sizes.before_blocks * (f32 + sizes.stored_itemsize + 1)
        phases["embed"] = max(reading, sizes.before_blocks * f32 + states + batch * sizes.hidden * f32 * 3)
        phases["block"] = states + read_block + hessians + batch * sizes.inner * f32 + sizes.kv_sample_bytes
    factor = 5 * widest * widest * 8 if sizes.calibrated else 0
    phases["solve"] = states + read_block + hessians + factor + 9 * sizes.largest_group * f32
    host = max(peak_rss(), current_rss() + max(phases.values()))
    output = sizes.plain_bytes + sizes.packed_bytes
    return Prediction(host, 0, 2 * output, output, phases)
