"""Perplexity, divergence and speed of a model, against its original.

``quantkit.evaluate`` is both this package and, called, the function ``quantkit.evaluate.api.evaluate``: Python binds
a subpackage to its parent's attribute on first import, so the module itself has to be callable for both to work.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    """The package itself, callable as ``evaluate``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from quantkit.evaluate.api import evaluate

        return evaluate(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """As ``inspect.signature`` and notebooks show it."""
        from quantkit.evaluate.api import evaluate

        return inspect.signature(evaluate)


sys.modules[__name__].__class__ = _CallablePackage
