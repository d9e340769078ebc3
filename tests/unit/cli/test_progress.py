"""Progress: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import io

import pytest

from quantkit.cli.output import print_lines, wrap
from quantkit.cli.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_short_job_writes_nothing_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with bar() as listen:
        listen("blocks", 1, 3, "error 0.1")
    assert stderr.getvalue() == ""


def test_a_log_gets_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    now = [100.0]
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with bar() as listen:
        for done in range(7):
            listen("blocks", done, 30, "error 0.1")
            now[0] += 10
    assert (
        stderr.getvalue()
        == "blocks 3/30, 30 s, about 270 s left  error 0.1\nblocks 6/30, 60 s, about 240 s left  error 0.1\n"
    )


def test_what_is_said_meanwhile_stands_above_the_bar_on_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    said = "  target    --target-bpw 6: " + "4 bits and a few more of them " * 3
    with bar() as listen:
        listen("measure", 59, 60)
        print_lines(said, err=True)
    lines = [line.rpartition("\x1b[2K")[2].rstrip() for line in stderr.getvalue().split("\n")]  # what was not erased
    wrapped = wrap(said, 60).splitlines()
    at = lines.index(wrapped[0])
    assert lines[at : at + len(wrapped)] == [line.rstrip() for line in wrapped]


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
