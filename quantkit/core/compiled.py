"""Compiled twins of functions of lower rooms, which need no library themselves: offered from above, looked up by name.

``quantkit`` offers them as it is imported. A twin gives the same numbers, sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_offered: dict[str, Callable[[], Any]] = {}


def offer(name: str, load: Callable[[], Any]) -> None:
    """Name a module of compiled functions. ``load`` imports and returns it, or None where its library is missing."""
    _offered[name] = load


def twin(name: str) -> Any:
    """Return the module of this name, or None."""
    load = _offered.get(name)
    return None if load is None else load()
