"""SIGINT and SIGTERM at seeded moments of convert, eval and generate: every command ends soon, with 130, in order."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LATEST = 30.0  # seconds from a signal to the end of its command, on a machine that does ten things at once
SIGNALS = (signal.SIGINT, signal.SIGTERM)
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run(command, signal=, seconds= or destructor=)`` in a fork of a process that has loaded everything."""
    log = tmp_path_factory.mktemp("interrupts") / "log"
    script = Path(__file__).parent / "interrupter.py"
    with subprocess.Popen(
        [sys.executable, script], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin, process.stdout

        def tell(command: list[object], *, number: signal.Signals = signal.SIGINT, **moment: Any) -> dict[str, Any]:
            task = {"command": [str(word) for word in command], "signal": int(number), "log": str(log), **moment}
            print(json.dumps(task), file=to, flush=True)
            done: dict[str, Any] = json.loads(back.readline())
            return {**done, "said": log.read_text() + done["shown"]}

        yield tell
        to.close()


class Commands:
    """The three long commands on a tiny model, and what must be true after an interrupt."""

    def __init__(self, run: Run, model: Path, text: Path, folder: Path) -> None:
        self.run, self.folder, self.out = run, folder, folder / "out"
        self.lines: dict[str, list[object]] = {
            "convert": [
                "convert", model, "--out", self.out, "--calibration", text, "--group-size", 32, "--samples", 4,
                "--seq-len", 64, "--method", "gptq",
            ],
            "eval": ["eval", model, "--data", text, "--seq-len", 64, "--tokens", 2048],
            "generate": ["generate", model, "--prompt", "The old fox", "--max-tokens", 60],
        }  # fmt: skip
        self.seconds: dict[str, float] = {}
        for name, line in self.lines.items():
            done = run(line, seconds=None)
            assert done["code"] == 0, done["said"]
            self.seconds[name] = done["seconds"]
        self.wanted = self._bytes()
        self.clear()

    def clear(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path)

    def _bytes(self) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(self.out.iterdir())}

    def check(self, name: str, done: dict[str, Any]) -> str:
        """Fails unless the command ended as it should. Returns how: "130", or "done" if the signal came too late."""
        assert "Traceback" not in done["said"]
        assert "ignored" not in done["said"]
        if done["code"] == 0:
            assert name != "convert" or self._bytes() == self.wanted
            self.clear()
            return "done"
        assert done["code"] == 130, done
        assert done["late"] is None or done["late"] < LATEST, done
        assert "Interrupted." in done["said"]
        if name == "convert":
            self._go_on(done["said"])
        return "130"

    def _go_on(self, said: str) -> None:
        """What was said about going on is true, and leads to the same bytes."""
        if "was complete by then" in said:
            assert self._bytes() == self.wanted
        elif "--resume" in said:
            assert [path.name for path in self.folder.iterdir()] != []
            assert not self.out.exists()
            again = self.run([*self.lines["convert"], "--resume"], seconds=None)
            assert again["code"] == 0, again["said"]
            assert self._bytes() == self.wanted
        else:
            assert list(self.folder.iterdir()) == []
        assert [path.name for path in self.folder.iterdir()] in ([], ["out"])
        self.clear()


@pytest.fixture(scope="module")
def commands(
    run: Run, tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Commands:
    return Commands(run, tiny_original, calibration_text, tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize("name", ["convert", "eval", "generate"])
def test_an_interrupt_ends_a_command_at_whatever_moment_it_comes(name: str, commands: Commands) -> None:
    draw = random.Random(name)
    for number in SIGNALS:
        moment, how = draw.uniform(0.2, 0.7) * commands.seconds[name], "done"
        while how == "done" and moment > 0.01:  # the machine was busier when the command was timed
            how = commands.check(name, commands.run(commands.lines[name], number=number, seconds=moment))
            moment /= 2
        assert how == "130"


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupt_in_a_destructor_ends_the_command(number: signal.Signals, commands: Commands) -> None:
    """What is raised in a ``__del__`` is swallowed; before there was a flag, the job ran on to the end."""
    done = commands.run(commands.lines["convert"], number=number, destructor=0)
    assert commands.check("convert", done) == "130"
    assert done["late"] is None


def test_an_interrupt_takes_the_bar_from_the_terminal(commands: Commands) -> None:
    for share in (0.4, 0.5, 0.6, 0.7):
        moment = share * commands.seconds["convert"]
        done = commands.run(commands.lines["convert"], seconds=moment, terminal=True)
        commands.check("convert", done)
        if "\x1b[?25l" in done["shown"]:
            break
    assert done["shown"].count("\x1b[?25l") == done["shown"].count("\x1b[?25h") > 0  # the cursor: hidden, shown again
    assert done["shown"].rstrip().splitlines()[-1].startswith(("Error: Interrupted.", "Finished", "What", "No block"))


@pytest.mark.slow
def test_two_hundred_interrupts_end_two_hundred_commands(commands: Commands) -> None:
    """Prints how they ended, and the longest time it took: 3 s are wanted on a machine that does nothing else."""
    draw = random.Random(0)
    ended, worst, work = Counter[str](), 0.0, 0.0
    for index in range(200):
        name, number = ("convert", "convert", "eval", "generate")[index % 4], SIGNALS[index // 4 % 2]
        inside = name == "convert" and index % 5 == 4
        moment = {"destructor": draw.randrange(4)} if inside else {"seconds": draw.random() * commands.seconds[name]}
        how = "done"
        while how == "done":  # the signal came too late: half that time
            done = commands.run(commands.lines[name], number=number, **moment)
            how = commands.check(name, done)
            worst, work = max(worst, done["late"] or 0.0), max(work, done["work"] or 0.0)
            ended[f"{name} {how}{' in a destructor' * inside}"] += 1
            moment = {kind: value // 2 if inside else value / 2 for kind, value in moment.items()}
    print(dict(ended), f"worst delay {worst:.2f} s, {work:.2f} s of them at work")
