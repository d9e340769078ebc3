"""Memory of this process and of the machine as the operating system counts it; sizes in words."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from quantkit.errors import RequestError

# a callback for progress: (steps done, steps in all)
OnStep = Callable[[int, int], None]

LARGE = 8 << 20
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h


_earlier_peak = 0  # what restart_peak() forgot


def restart_peak() -> bool:
    """Let ``peak_rss(since_restart=True)`` count from now on. False where the system cannot (Linux can)."""
    global _earlier_peak
    _earlier_peak = peak_rss()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets the peak resident size
    except OSError:
        return False
    return True


def peak_rss(*, since_restart: bool = False) -> int:
    """Return the peak resident size of this process in bytes, libraries included: so far, or since ``restart_peak``."""
    mark = _high_water_mark()
    if mark is not None:
        return mark if since_restart else max(_earlier_peak, mark)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux, bytes on macOS
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _high_water_mark() -> int | None:
    """The peak resident size that /proc tells, or None.

    On Linux getrusage(2) is of no use: it starts with the size of the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def current_rss() -> int:
    """Return the resident size of this process now, in bytes; the peak so far where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss()


def usable_cpus() -> int:
    """Count the logical processors that this process may run on; all of the machine where the system does not tell."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def release_free_memory() -> None:
    """Give freed pages back to the system.

    glibc keeps them in its heap otherwise, and the resident size creeps up block by block. Other C libraries have no
    such call and return large blocks by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def map_large_blocks() -> None:
    """Let glibc map every block of more than LARGE bytes by itself, so that freeing one gives its pages back at once.

    By default the threshold rises with the blocks that are freed, up to 32 MB; tensors then come from a heap that
    fragments, and the peak grows with the number of layers (892 against 678 MB for 24 small ones). Smaller blocks stay
    in the heap and are reused without page faults: with 4 MB a third of a small model's conversion went into those.
    Holds for the rest of the process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE + (1 << 16))  # a block of just LARGE has a header, too
        mallopt(_M_TRIM_THRESHOLD, 8 * LARGE)


def available_bytes() -> int:
    """Measure the memory that can be had without swapping, within the limit of this process's control group if any."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text(encoding="ascii").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, max(0, int(most) - int(used.read_text(encoding="ascii"))))
    return free


def size_text(size: int) -> str:
    """Write a number of bytes for people: ``1.23 GB``, ``45 MB``, ``6.7 MB``, ``8 kB``."""
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    if size >= 1e6:
        return f"{size / 1e6:.{0 if size >= 1e7 else 1}f} MB"
    return f"{size / 1e3:.0f} kB"


def time_text(seconds: float) -> str:
    """Write a duration for people: ``about 40 s``, ``about 12 min``, ``about 3.5 h``."""
    if seconds < 90:
        return f"about {max(10, round(seconds, -1)):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def choose_device(device: str | torch.device) -> torch.device:
    """Resolve "auto". Raises RequestError for a device that is unknown or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise RequestError(f"device={device!r}: expected auto, cpu or cuda.") from None
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"device={device!r}: expected auto, cpu or cuda.")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("device='cuda': torch sees no CUDA device. Use --device cpu, or install torch with CUDA.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"device='{chosen}': torch sees {torch.cuda.device_count()} CUDA devices, counted from cuda:0."
        )
    return chosen


def device_name(device: torch.device) -> str:
    """``cpu``, or the model of GPU: the order of sums, and so a few codes, differ between them."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
