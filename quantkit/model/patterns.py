"""Match module names with list indices left out: what a layer's experts, or a model's layers, have in common."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")  # a place in a list of modules


def pattern(name: str) -> str:
    """Replace list indices in a module name by ``*``.

    >>> pattern("mlp.experts.3.up_proj")
    'mlp.experts.*.up_proj'
    """
    return _INDEX.sub("*", name)


def renumber(name: str, like: str) -> str:
    """Give ``name`` the list indices that ``like`` has."""
    numbers = iter(_INDEX.findall(like))
    return _INDEX.sub(lambda match: str(next(numbers, match.group())), name)


def by_pattern(names: Collection[str]) -> dict[str, list[str]]:
    """Group names that differ only in their list indices."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern(name), []).append(name)
    return groups


def short_names(names: Iterable[str]) -> list[str]:
    """Write module names with list indices as ``*``, each once: ``mlp.experts.*.up_proj``."""
    return list(dict.fromkeys(pattern(name) for name in names))
