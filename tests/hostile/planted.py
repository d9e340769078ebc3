"""Run every entry point of quantkit on a folder in one process that watches itself: what it executed, whom it called.

``python planted.py FOLDER OUT MARKS TEXT``: FOLDER is the hostile model, OUT an empty folder to convert into, MARKS the
file to which planted code would append, TEXT a calibration text. Standard input answers yes for ever. Prints one JSON
object: how each entry point ended, and what was seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# --doctest-modules imports every file of the tests: this one is a script
GIVEN = sys.argv[1:5] if __name__ == "__main__" else ["."] * 4
FOLDER, OUT, MARKS, TEXT = (Path(argument).resolve() for argument in GIVEN)
seen: list[str] = []


class Yes(io.TextIOBase):
    """Agrees to everything."""

    def readline(self, size: int | None = -1, /) -> str:
        seen.append("a question was asked")
        return "y\n"

    def read(self, size: int | None = -1, /) -> str:
        return self.readline()


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note code that comes from the folder, programs that are started, and connections; pickles leave marks."""
    if event == "exec":
        file = str(getattr(arguments[0], "co_filename", ""))
        if file.startswith(str(FOLDER)) or "transformers_modules" in file:
            seen.append(f"executed {file}")
    elif event == "socket.connect":
        seen.append(f"connected to {arguments[1]}")
    elif event in ("os.system", "subprocess.Popen", "os.exec") and not is_limited_child(event, arguments):
        seen.append(f"{event} {arguments!r}")


def is_limited_child(event: str, arguments: tuple[Any, ...]) -> bool:
    """Tell whether this is quantkit's own child with limits, which reads nothing of the folder as a program."""
    from quantkit.core.limited import child as limited_child

    worker = Path(limited_child.__file__).with_name("worker.py")
    return event == "subprocess.Popen" and list(arguments[1])[:4] == [sys.executable, "-I", "-S", str(worker)]


def command(*arguments: object) -> Callable[[], str]:
    """Make a function that runs the command line and returns how it ended."""

    def run() -> str:
        from quantkit.cli.main import main

        sys.argv = ["quantkit", *map(str, arguments)]
        errors = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                main()
        except SystemExit as stop:
            return f"exit {stop.code}: {errors.getvalue().strip()[-400:]}"
        return "exit 0"

    return run


def entry_points() -> Iterator[tuple[str, Callable[[], str]]]:
    """Name every way into quantkit that takes a model folder."""
    import quantkit
    from quantkit.checkpoint.tokenizer import load_tokenizer

    yield "inspect", command("inspect", FOLDER)
    yield "inspect --check", command("inspect", FOLDER, "--check")
    yield "convert", command(
        "convert", FOLDER, "--out", OUT / "a", "--group-size", 32, "--calibration", TEXT, "--samples", 2,
        "--seq-len", 32,
    )  # fmt: skip
    yield "repack", command("convert", OUT / "a", "--out", OUT / "b", "--format", "native")
    yield "eval", command("eval", FOLDER, "--data", TEXT, "--seq-len", 32, "--tokens", 64)
    yield "generate", command("generate", FOLDER, "--prompt", "The old", "--max-tokens", 4)
    yield "generate --chat", command("generate", FOLDER, "--prompt", "The old", "--chat", "--max-tokens", 4)
    yield (
        "generate --image",
        command("generate", FOLDER, "--prompt", "The old", "--image", _image(OUT / "image.png"), "--max-tokens", 4),
    )
    yield "bench", command("bench", FOLDER, "--prompt", 8, "--new-tokens", 4, "--repeat", 1)
    yield "load", lambda: str(quantkit.load(FOLDER).generate("The old", max_tokens=4))
    yield "tokenizer", lambda: str(len(load_tokenizer(FOLDER)))


def _image(path: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(path)
    return path


def watch_kernels() -> None:
    """Note kernels that transformers is asked to fetch; they are code from a hub."""
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    def asked(name: Any, *arguments: Any, **options: Any) -> None:
        if "/" in str(name):
            seen.append(f"kernel {name}")

    modeling_utils.lazy_import_flash_attention = asked
    hub_kernels.get_kernel = asked
    hub_kernels.lazy_load_kernel = asked


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "0"
    sys.stdin = Yes()  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    os.chdir(FOLDER)  # a relative path in a file of the folder then leads into it
    sys.addaudithook(watch)
    watch_kernels()
    ends = {}
    for name, run in entry_points():
        try:
            ends[name] = run()
        except Exception as error:
            ends[name] = f"{type(error).__name__}: {str(error)[:300]}"
    marks = MARKS.read_text().split() if MARKS.exists() else []
    sys.__stdout__.write(json.dumps({"ends": ends, "seen": seen, "marks": marks}) + "\n")  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
