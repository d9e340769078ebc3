"""An engine's answer on a checkpoint: whether it loads, where, what stops it, and the command; in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """One engine's answer.

    engine: its name.
    version: the version whose source was read.
    loads: whether it loads the checkpoint.
    tensor_parallel: the largest size that loads (1: one GPU), None where it does not load.
    reason: why not, or what stops the next size.
    reader: the file and line that decides.
    notes: restrictions of a checkpoint that loads.
    unread_format: the checkpoint's format, if the engine reads nothing in it.
    devices: where a checkpoint loads, then where it does not: ``("on an NVIDIA GPU", "on a CPU no: 4 bits only")``.
    command: that serves or loads it, None where it does not load.
    """

    engine: str
    version: str
    loads: bool
    tensor_parallel: int | None
    reason: str
    reader: str
    notes: tuple[str, ...] = ()
    unread_format: str | None = None
    devices: tuple[str, ...] = ()
    command: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON."""
        return {
            "engine": self.engine,
            "version": self.version,
            "loads": self.loads,
            "devices": list(self.devices),
            "tensor_parallel": self.tensor_parallel,
            "reason": self.reason,
            "reader": self.reader,
            "notes": list(self.notes),
            "command": self.command,
        }

    def line(self) -> str:
        """Return one line for people, without the command."""
        if not self.loads:
            where = f" [{self.reader}]" if self.reader else ""
            return f"{self.engine} {self.version}: no. {_sentence(self.reason)}{where}"
        where = "".join(f", {device}" for device in self.devices[:1])
        size = f", tensor parallel up to {self.tensor_parallel}" if (self.tensor_parallel or 1) > 1 else ""
        rest = "".join(f"; {device}" for device in self.devices[1:])
        notes = f" ({'; '.join(self.notes)})" if self.notes else ""
        return f"{self.engine} {self.version}: yes{where}{size}{rest}{notes}"


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line for each engine, the command below it; those that do not read the format at all share one."""
    lines = []
    for verdict in verdicts:
        if verdict.unread_format is None:
            lines += [f"  loads in  {verdict.line()}"]
            lines += [] if verdict.command is None else [f"    with    {verdict.command}"]
    lines += unread_format_lines(verdicts)
    if len(verdicts) > 1 and not any(verdict.loads for verdict in verdicts[1:]):
        widen = "another --format, --sym, fewer rules or another group size may widen that"
        lines.append(f"  loads in  nothing but quantkit: {widen}")
    return lines


def unread_format_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the line of the engines that do not read the format at all; none if all read it."""
    refusing = [verdict for verdict in verdicts if verdict.unread_format is not None]
    if len(refusing) < 2:
        return [f"  loads in  {verdict.line()}" for verdict in refusing]
    names = ", ".join(f"{verdict.engine} {verdict.version}" for verdict in refusing)
    return [f"  loads in  none of {names}: they do not read the format {refusing[0].unread_format}."]


def _sentence(reason: str) -> str:
    """Capitalise a reason, unless it begins with a module's name."""
    word = reason.partition(" ")[0]
    return reason if "." in word or "_" in word else reason[:1].upper() + reason[1:]
