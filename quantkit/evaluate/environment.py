"""Where and with what a figure was measured: recorded beside every result."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from quantkit.version import __version__


def versions() -> dict[str, str]:
    """Return the versions of Python, quantkit and the libraries that decide a figure."""

    numbers = {"python": platform.python_version(), "quantkit": __version__}
    for name in ("torch", "transformers", "tokenizers", "numpy"):
        numbers[name] = metadata.version(name)
    for name in ("numba", "triton"):  # kernels: absent where they are not installed
        with contextlib.suppress(metadata.PackageNotFoundError):
            numbers[name] = metadata.version(name)
    return numbers


def hardware() -> dict[str, Any]:
    """Describe processor, cores, threads that torch uses, memory, instruction set and, where there is one, the GPU."""
    import torch

    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": pages * page,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return facts


def _processor() -> str:
    """Return the processor's name; the architecture where the system does not tell it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
