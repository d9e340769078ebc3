"""Every option that takes a file or a folder gets what is none: one message, within 10 seconds and 1 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hostile.limits import Limited

from quantkit.errors import QuantkitError, RequestError

RUN = "hostile.test_options:run"
COMMANDS = {
    "calibration": ("convert", "MODEL", "--out", "OUT", "--method", "gptq", "--calibration", "THIS"),
    "data": ("eval", "MODEL", "--data", "THIS", "--seq-len", "32"),
    "baseline": ("eval", "MODEL", "--baseline", "THIS", "--data", "TEXT", "--seq-len", "32"),
    "out": ("convert", "MODEL", "--out", "THIS", "--method", "rtn"),
    "overwritten out": ("convert", "MODEL", "--out", "THIS", "--method", "rtn", "--overwrite"),
    "work folder": ("convert", "MODEL", "--out", "OUT", "--method", "rtn", "--work-dir", "THIS", "--resume"),
    "source": ("convert", "THIS", "--out", "OUT", "--method", "rtn"),
    "generate": ("generate", "THIS", "--prompt", "a"),
    "inspect": ("inspect", "THIS"),
    "eval": ("eval", "THIS"),
    "bench": ("bench", "THIS"),
}
NAMES = {  # by the end of its name a file goes to another reader
    "this": tuple(COMMANDS),
    "this.gguf": ("source", "inspect", "generate"),
    "this.jsonl": ("calibration",),
    "this.txt.gz": ("data",),
    "this.parquet": ("calibration",),
    "this.safetensors": ("inspect",),
}


def run(arguments: list[str]) -> int:
    """What the child with limits calls: the command line, its usage errors as quantkit's own."""
    from quantkit.cli.main import cli

    try:
        status: int = cli(arguments, standalone_mode=False)
    except click.ClickException as error:
        raise RequestError(error.format_message()) from error
    except OSError as error:  # the command line prints the system's own words
        raise QuantkitError(f"{error.filename}: {error.strerror}") from error
    return status


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


def nothing(path: Path) -> None:
    path.touch()


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()
    (path / "notes").write_text("keep me")


def loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [noise, nothing, zero, folder, loop, os.mkfifo], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_names_no_such_file_is_one_message(
    make: Callable[[Path], None],
    name: str,
    tiny_original: Path,
    calibration_text: Path,
    limited: Limited,
    tmp_path: Path,
) -> None:
    for what in NAMES[name]:
        path = tmp_path / name
        make(path)
        paths = {"MODEL": tiny_original, "OUT": tmp_path / "out", "THIS": path, "TEXT": calibration_text}
        outcome = limited(RUN, [str(paths.get(word, word)) for word in COMMANDS[what]])
        assert outcome.kind == "refused", (what, outcome)
        assert name in outcome.message, (what, outcome)
        assert outcome.message.count("\n") < 5, (what, outcome)
        assert (path / "notes").read_text() == "keep me" if make is folder else path.is_symlink() or path.exists()
        (path / "notes").unlink() if make is folder else path.unlink()
        if make is folder:
            path.rmdir()
        assert not list(tmp_path.iterdir()), (what, list(tmp_path.iterdir()))


def test_kv_scales_that_are_a_fifo_are_not_waited_for(limited: Limited, tiny_model: Path) -> None:
    os.mkfifo(tiny_model / "quantkit_kv.safetensors")
    for command in (["inspect", str(tiny_model)], ["generate", str(tiny_model), "--prompt", "a"]):
        limited(RUN, command).refused("quantkit_kv.safetensors")


def test_a_name_does_not_write_on_the_terminal(quantkit: Callable[..., Any], tmp_path: Path) -> None:
    name = str(tmp_path / "a\x1b[2J\x9bm\rb")
    done = quantkit("inspect", name)
    assert done.returncode == 2
    assert r"a\x1b[2J\x9bm\x0db" in done.stderr
    assert "\x1b[2J" not in done.stderr


def test_a_name_that_is_no_utf8_is_told_in_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantkit.cli.main", "inspect", str(tmp_path).encode() + b"/caf\xe9", "--json"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=100)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"].startswith(str(tmp_path) + "/caf\\xe9: this path is not UTF-8")
    assert b"Traceback" not in done.stderr
