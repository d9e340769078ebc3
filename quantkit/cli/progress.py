"""The progress bar of every long command: on stderr, silent when stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Listen(Protocol):
    """Called with what is being done, how much of how much, and a word beside the bar."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None: ...


@contextmanager
def bar() -> Iterator[Listen]:
    """One line per activity (``what``), the latest at the bottom: bar, count, time taken and left, note."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    wide = console.width >= 90  # a narrow terminal keeps the times and does without the note
    notes = [TextColumn("{task.fields[note]}")] if wide else []
    lines = Progress(
        TextColumn("{task.description:<10}"), BarColumn(bar_width=24 if wide else 10), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), *notes,
        console=console, disable=not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def listen(what: str, done: int, total: int, note: str = "") -> None:
        if what not in tasks:
            # what a resumed job finds done must not count as the speed of this one
            tasks[what] = lines.add_task(what, total=total, completed=done, note=note)
        lines.update(tasks[what], completed=done, total=total, note=note)

    with lines:
        yield listen
