"""Which modules doctest may import: those of an extra that is not installed cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parent / "quantkit/runtime/kernels/numba"
NEED_NUMBA = sorted(file for file in FOLDER.glob("*.py") if file.name not in ("__init__.py", "threads.py"))
collect_ignore = [] if importlib.util.find_spec("numba") else [str(file) for file in NEED_NUMBA]
