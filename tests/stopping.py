"""Stop a conversion at a chosen place, as Ctrl-C does, and see what a resumed one does: through ``on_progress``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stop_at(stage: str, done: int = 0, error: BaseException | type[BaseException] = KeyboardInterrupt) -> Any:
    """A listener that raises as soon as ``stage`` has come to ``done``."""

    def listen(progress: Any) -> None:
        if (progress.stage, progress.done) == (stage, done):
            raise error

    return listen


def watch(stages: list[str]) -> Callable[[Any], None]:
    """A listener that appends each stage as it begins."""
    return lambda progress: stages.append(progress.stage) if stages[-1:] != [progress.stage] else None
