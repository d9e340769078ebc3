"""Runs commands in forks of a process that has loaded everything, and sends each a signal at some moment of its work.

Reads one task a line from stdin, answers one line: ``command``, ``signal``, ``log`` (a file for what it prints), and

* ``seconds``: the signal comes from outside, so long after the command began to listen (null: none comes), or
* ``destructor``: it comes from inside, in the destructor of this number (what is raised there is swallowed).

``terminal``: stderr is a terminal, so that bars are drawn.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork

import rich.progress
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import quantkit.cli.convert
import quantkit.cli.eval
import quantkit.cli.generate
import quantkit.cli.main as program
import quantkit.convert.api
import quantkit.convert.job.states
import quantkit.convert.output.smoke_test
import quantkit.evaluate.api
import quantkit.runtime.decode.cpu_step
import quantkit.runtime.load

LOADED = (rich.progress, LlamaForCausalLM, PreTrainedTokenizerFast)  # what the commands would load, which takes seconds
LIMIT = 60.0  # seconds for one command


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Run one command in a fork: its exit code, its seconds, seconds and processor time from the signal to its end."""
    ready, tell = os.pipe()
    master, slave = pty.openpty() if task.get("terminal") else (-1, -1)
    child = os.fork()
    if not child:
        _command(task, tell, slave)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)
    began = sent = time.monotonic()
    worked = 0.0
    shown = b""
    wait = LIMIT if task.get("seconds") is None else task["seconds"]
    if not _ended(child, wait):
        sent, worked = time.monotonic(), _worked(child)
        os.kill(child, task["signal"])
        if not _ended(child, LIMIT):
            os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    ended = time.monotonic()
    if master >= 0:
        os.close(slave)
        # what was written last may reach this end after the writer has ended: the end of it is an error
        while select.select([master], [], [], 1.0)[0]:
            try:
                shown += os.read(master, 1 << 16)
            except OSError:
                break
        os.close(master)
    late = ended - sent if sent > began else None
    work = usage.ru_utime + usage.ru_stime - worked if sent > began else None
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "seconds": ended - began, "late": late, "work": work, "shown": shown.decode(errors="replace")}


def _worked(child: int) -> float:
    """Seconds of processor time that the child has had (proc(5), fields 14 and 15)."""
    with open(f"/proc/{child}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ended(child: int, seconds: float) -> bool:
    """Whether the child ends within so many seconds; it is not reaped."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(0.002)
    return False


def _command(task: dict[str, Any], tell: int, terminal: int) -> None:
    """What the fork does; never returns."""
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log if terminal < 0 else terminal, 2)
    if terminal >= 0:
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  (it knows whether it is a terminal)
    listen = program.handle_signals

    def listening() -> None:
        listen()
        if "destructor" in task:
            sys.setprofile(_InDestructor(task["destructor"], task["signal"]))
        os.write(tell, b".")

    program.handle_signals = listening
    sys.argv = ["quantkit", *task["command"]]
    program.main()
    sys.exit(0)


class _InDestructor:
    """A profile function that raises the signal in the destructor of this number."""

    def __init__(self, number: int, signal_number: int) -> None:
        self.left, self.signal = number, signal_number

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name != "__del__":
            return
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
            signal.raise_signal(self.signal)


def main() -> None:
    torch.set_num_threads(1)
    quantkit.convert.job.states.EVERY, quantkit.convert.job.states.SHARE = 0.0, 0
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
