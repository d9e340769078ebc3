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

    lines = Progress(
        TextColumn("{task.description:<10}"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
        console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def listen(what: str, done: int, total: int, note: str = "") -> None:
        if what not in tasks:
            tasks[what] = lines.add_task(what, total=total, note=note)
        lines.update(tasks[what], completed=done, total=total, note=note)

    with lines:
        yield listen
