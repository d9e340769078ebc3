"""The progress of every long command, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Listen(Protocol):
    """Called with what is being done, how much of how much, and a word beside the bar."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None: ...


EVERY = 30.0  # seconds between lines where there is no terminal


class _Lines:
    """For logs: after half a minute, and then every half minute, how far the job is."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.began: dict[str, tuple[float, int]] = {}

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        start, first = self.began.setdefault(what, (now, done))
        if now - self.last < EVERY:
            return
        self.last = now
        spent = now - start
        left = f", about {spent / (done - first) * (total - done):.0f} s left" if done > first else ""
        print(f"{what} {done}/{total}, {spent:.0f} s{left}{f'  {note}' if note else ''}", file=sys.stderr, flush=True)


@contextmanager
def bar() -> Iterator[Listen]:
    """Show one line per activity (``what``), the latest at the bottom: bar, count, time taken and left, note."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    wide = console.width >= 90  # a narrow terminal keeps the times and does without the note
    notes = [TextColumn("{task.fields[note]}")] if wide else []
    lines = Progress(
        TextColumn("{task.description:<10}"), BarColumn(bar_width=24 if wide else 10),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), *notes,
        console=console, transient=True,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def listen(what: str, done: int, total: int, note: str = "") -> None:
        if what not in tasks:
            # what a resumed job finds done must not count as the speed of this one
            tasks[what] = lines.add_task(what, total=total, completed=done, note=note)
        lines.update(tasks[what], completed=done, total=total, note=note)

    with lines:
        yield listen
