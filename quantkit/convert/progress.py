"""The progress of a conversion, as it is passed to listeners."""

from __future__ import annotations

import time
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


class StageClock:
    """Hands progress on, and counts the seconds of every stage.

    seconds: by stage, in the order in which stages began; a stage that comes again adds to its own.
    """

    def __init__(self, listen: Listener, started: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._listen, self._stage = listen, "plan"
        self._since = time.perf_counter() if started is None else started

    def __call__(self, progress: Progress) -> None:
        self.begin(progress.stage)
        self._listen(progress)

    def begin(self, stage: str) -> None:
        """End the stage that is under way, and begin another."""
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now
