"""Which modules doctest may import: those of an extra that is not installed cannot be."""

from __future__ import annotations

import importlib.util

NUMBA = ("attention", "gemv", "gptq", "ir", "page_ir", "step", "step_fields", "worker_loop")  # all but threads.py
collect_ignore_glob = (
    [] if importlib.util.find_spec("numba") else [f"quantkit/runtime/kernels/numba/{name}.py" for name in NUMBA]
)
