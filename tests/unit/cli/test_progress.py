"""The progress bar speaks on a terminal and is silent elsewhere."""

from __future__ import annotations

import io

import pytest

from quantkit.cli.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_written_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with bar() as listen:
        listen("blocks", 1, 3, "error 0.1")
    assert stderr.getvalue() == ""


def test_every_activity_has_a_line_with_its_count_and_note(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with bar() as listen:
        listen("original", 24, 24)
        listen("evaluating", 5, 24, "hello")
    written = stderr.getvalue()
    for part in ("original", "24/24", "evaluating", "5/24", "hello"):
        assert part in written
