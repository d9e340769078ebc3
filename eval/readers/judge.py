"""What a reader's answer is worth: right, wrong, refused, or nothing that this machine can tell; our word beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

RIGHT, WRONG, REFUSED, UNTESTABLE = "right", "wrong", "refused", "not testable"
FALSE_YES, FALSE_NO = "false yes", "false no"


def difference(theirs: Any, ours: Any) -> float:
    """Mean absolute difference of log-probabilities ``[tokens, vocabulary]``; infinite if they cannot be compared."""
    if theirs.shape != ours.shape or not np.isfinite(theirs).all():
        return float("inf")
    return float(np.abs(theirs.astype(np.float64) - ours).mean())


def status(answer: dict[str, Any], found: float, limit: float, lacks: list[str]) -> str:
    """One of the four words.

    answer: of the reader's script (``loads``, ``errors`` by dtype).
    found: the difference, if it loads.
    limit: the largest that is right.
    lacks: words of errors that say what the machine lacks.
    """
    if answer["loads"]:
        return RIGHT if found <= limit else WRONG
    said = " ".join(answer["errors"].values())
    return UNTESTABLE if any(words in said for words in lacks) else REFUSED


def verdict(says: bool | None, what: str) -> str:
    """Return "" where our word and the reader's agree, or there is nothing to compare."""
    if says is None or what == UNTESTABLE:
        return ""
    if says and what != RIGHT:
        return FALSE_YES
    return FALSE_NO if not says and what == RIGHT else ""


def has_flags(wanted: list[str]) -> bool:
    """Tell whether the processor has all these flags of /proc/cpuinfo; without that file it has none."""
    info = Path("/proc/cpuinfo")
    found = info.read_text(encoding="utf-8", errors="replace").split() if info.exists() else []
    return set(wanted) <= set(found)
