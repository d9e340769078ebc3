"""quantkit quantizes large language models, proves what that cost, and runs them.

Public names, loaded on first use: ``import quantkit`` touches no GPU, file or network.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.core.compiled import offer
from quantkit.version import __version__

# OpenMP's threads, which torch's operations use, spin for milliseconds after each one and take the cores from whoever
# works next: our own threads, another process. Asked to sleep instead they cost nothing measurable (docs/cpu.md). Read
# once, when torch is imported; a value that the user set stays.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _compiled(part: str) -> Any:
    from quantkit.runtime.kernels.numba import threads

    return threads.compiled(part) if threads.available() else None


offer("ranges", partial(_compiled, "ranges"))
offer("kquant", partial(_compiled, "kquant"))

__all__ = ["QuantTensor", "Scheme", "__version__", "convert", "evaluate", "load"]

if TYPE_CHECKING:
    from quantkit.convert.api import convert
    from quantkit.core.qtensor import QuantTensor
    from quantkit.core.scheme import Scheme
    from quantkit.evaluate.api import evaluate
    from quantkit.runtime.load import load

_PUBLIC = {
    "load": ("quantkit.runtime.load", "load"),
    "Scheme": ("quantkit.core.scheme", "Scheme"),
    "QuantTensor": ("quantkit.core.qtensor", "QuantTensor"),
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("convert", "evaluate"):  # packages that are also callable
        return importlib.import_module(f"quantkit.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
