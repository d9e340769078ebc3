"""How many threads decode: all, or one fewer where another job keeps a core busy.

A step ends with its slowest thread. Where another process has a core for itself, the thread that shares it is given
every other slice of some milliseconds, and all others wait for it at barriers: one thread fewer is then faster, on a
machine with few cores. Nobody tells a process who else runs on its cores. So it is measured: now and then a few steps
are done in the other number of threads, and what was faster stays. What a step computes does not depend on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

TRIAL = 4  # steps that a trial takes
WINDOW = 16  # steps that a trial is compared with
SOONEST, LATEST = 16, 1024  # steps between trials; a trial that changes nothing doubles them
GAIN = 0.9  # of the time a step takes: less changes the number of threads
TROUBLE = 1.3  # times the best of WINDOW steps: a reason for a trial
VALID = 0.1  # seconds after a step in which other work of the same token follows its number


class Crew:
    """Chooses the number of threads of steps that follow each other; not for several threads at once.

    clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._key: tuple[int, int] = (0, 0)
        self._last = -1.0
        self._restart()

    def _restart(self) -> None:
        self._fewer = False
        self._wait, self._until_trial = SOONEST, SOONEST
        self._forget()

    def _forget(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._trial: list[float] | None = None
        self._best = float("inf")

    def choose(self, most: int, sequences: int) -> int:
        """Return the number of threads for the next step, and start its time.

        most: threads at most.
        sequences: that the step decodes: steps of other sizes are not compared.
        """
        if (most, sequences) != self._key:
            if most != self._key[0]:
                self._restart()
            self._forget()
            self._key = most, sequences
        self._began = self._clock()
        return most - (most > 1 and self._fewer != (self._trial is not None))

    def done(self) -> None:
        """Take the time of the step that ``choose`` began."""
        self._last = self._clock()
        if self._key[0] == 1:
            return
        seconds = self._last - self._began
        if self._trial is None:
            self._steps.append(seconds)
            self._until_trial -= 1
            if len(self._steps) == WINDOW and (self._until_trial <= 0 or self._slower()):
                self._trial = []
            return
        self._trial.append(seconds)
        if len(self._trial) == TRIAL:
            self._decide(sum(self._trial[1:]) / (TRIAL - 1))  # the first one wakes threads, or misses caches

    def _slower(self) -> bool:
        """Whether steps became slower than they were, and the last trial is some time ago."""
        mean = sum(self._steps) / WINDOW
        self._best = min(self._best, mean)
        return mean > TROUBLE * self._best and self._wait - self._until_trial >= SOONEST

    def _decide(self, tried: float) -> None:
        held = sum(self._steps) / WINDOW
        changes = tried < GAIN * held
        if changes:
            self._fewer, self._wait = not self._fewer, SOONEST
        else:
            self._wait = min(2 * self._wait, LATEST if not self._fewer else 4 * SOONEST)
        self._until_trial = self._wait
        self._forget()
        self._best = tried if changes else held  # what these steps cost when they were last compared

    def now(self, most: int) -> int:
        """Return the number of threads for other work on the token of the last step: the head."""
        recent = most == self._key[0] and self._clock() - self._last < VALID
        return most - (recent and most > 1 and self._fewer)
