"""Where a conversion stands: what it tells whoever listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a conversion stands.

    For a bar, or a line per block. ``chosen`` comes once, when bits have been allocated: its note is the curve and the
    choice.
    """

    stage: str
    done: int
    total: int
    note: str = ""


Listener = Callable[[Progress], None]
