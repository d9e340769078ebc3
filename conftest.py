"""Which modules doctest may import: those of an extra that is not installed cannot be."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("numba") else ["quantkit/runtime/kernels/cpu_numba*.py"]
