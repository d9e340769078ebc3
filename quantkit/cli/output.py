"""What commands print: one JSON object, or lines that fit the terminal."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from typing import Any

import click

LABEL = re.compile(r" *\S+(?: \S+)* {2,}")  # "  loads in  vLLM ...": what stands before the first gap of two spaces
WIDEST_LABEL = 24


# Everything below a space but tab and line end, delete, and the second set of control characters.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Write control characters out: a name from a stranger's file must not move the cursor or clear the screen."""
    return text.translate(CONTROLS)


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on stdout, nothing else."""
    written = json.dumps(data, indent=2, ensure_ascii=False)
    # A file name that is no UTF-8 has halves of surrogate pairs, which only the escapes of ASCII can hold.
    halves = any("\ud800" <= letter <= "\udfff" for letter in written)
    click.echo(json.dumps(data, indent=2) if halves else written)


def print_lines(text: str, *, err: bool = False) -> None:
    """Print lines on stdout, or on stderr as it is now (above a bar, not into it).

    On a terminal, long ones are wrapped at words and go on below their first word.
    """
    text = printable(text)
    stream = sys.stderr if err else sys.stdout
    print(wrap(text, shutil.get_terminal_size().columns) if stream.isatty() else text, file=stream)


def wrap(text: str, columns: int) -> str:
    """Wrap each line to ``columns``. Paths and names stay whole, and a line's label stays alone in its column."""
    lines = []
    for line in text.splitlines():
        label = LABEL.match(line)
        indent = label.end() if label and label.end() <= WIDEST_LABEL else len(line) - len(line.lstrip()) + 4
        lines += textwrap.wrap(
            line, max(columns, indent + 20), subsequent_indent=" " * indent, drop_whitespace=True,
            break_long_words=False, break_on_hyphens=False, replace_whitespace=False,
        ) or [line]  # fmt: skip
    return "\n".join(lines)
