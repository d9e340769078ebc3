"""Lines fit the terminal they are printed on, and stay as they are in a file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantkit.cli.output import print_lines, wrap

ENGINE = (
    "  loads in  vLLM: yes, up to tensor-parallel size 3 "
    "(compressed_tensors/schemes/wNa16.py:118), groups of 64 are read"
)
PATH = "  note      written to /a/very/long/path/that-must-not-be-broken/because-somebody/copies-it/out.safetensors"


@pytest.mark.parametrize("columns", [60, 80])
def test_long_lines_go_on_under_their_first_word(columns: int) -> None:
    lines = wrap(ENGINE, columns).splitlines()
    assert len(lines) > 1
    assert all(len(line) <= columns for line in lines)
    assert all(line.startswith(" " * 12 + line[12:13].strip()) for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(ENGINE.split())


def test_a_path_is_never_broken() -> None:
    assert PATH.split()[-1] in wrap(PATH, 60).split()


def test_short_lines_and_empty_ones_stay() -> None:
    text = "out: gptq\n\n  size      1 MB -> 2 MB"
    assert wrap(text, 60) == text


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    print_lines(ENGINE)
    assert out.getvalue() == ENGINE + "\n"


def test_a_reader_of_stdout_that_has_gone_leaves_the_message_and_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quantkit.cli.main", "convert", str(tmp_path / "none"), "--out", "out", "--json"]
    done = subprocess.run(command, check=False, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 2
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
