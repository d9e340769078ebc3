"""The progress of a conversion, as it is passed to listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a conversion: a step of a stage.

    For a bar, or a line per block. Stage ``chosen`` comes once, when bits have been allocated: its note is the curve
    and the choice.
    """

    stage: str
    done: int
    total: int
    note: str = ""


Listener = Callable[[Progress], None]
