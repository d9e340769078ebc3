"""Kill conversions with SIGKILL at chosen moments, resume them, and compare the bytes. Started by test_kills.py.

A server: one line of JSON in, one out, so that imports are paid once. A task is ``{"folder", "options", "at",
"moments", "again", "hard", "seed"}``; the answer ``{"events", "kills", "states", "failures"}``.

A *moment* is before a change of the file system below ``folder`` (open for writing, rename, remove, mkdir, rmdir,
fsync), or a random share of the processor time. At each moment of a job the working process forks and kills itself; the
fork, which holds the same memory, waits until it is dead, takes a copy of the folder as it lies there, and works on
until the next moment. So a job runs once for all its kills. Every copy is then resumed as a user would, copies with
equal bytes once: what a resumed job does depends on nothing else.

at: "renames", "events" or "" (none of them in order); moments: how many random ones besides, half of them at random
events, half at random times; again: the job resumed from one random copy is killed this often, too; hard: this many
jobs end by a signal from the kernel's clock, inside a system call or a library as it comes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import quantkit

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: a killed worker's fork becomes our child
Hook = Callable[[str], None]


class Watch:
    """Calls ``hook`` before every change of a file below ``folder``.

    Audit hooks cannot be taken out again: there is one.
    """

    def __init__(self) -> None:
        self.folder, self.hook, self.busy = "", None, False
        self._sync = os.fsync
        sys.addaudithook(self._audit)
        os.fsync = self._fsync

    def set(self, folder: Path, hook: Hook | None) -> None:
        self.folder, self.hook = str(folder), hook

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.hook is None or (event != "open" and event not in CHANGES):
            return
        if event == "open" and not (isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")):
            return
        path = arguments[0]
        relative = event != "open" and arguments[-1] != -1  # shutil.rmtree names files relative to an open folder
        if relative or (not isinstance(path, int) and os.fsdecode(path).startswith(self.folder)):
            self._seen(event)

    def _fsync(self, handle: int) -> None:
        self._seen("fsync")
        self._sync(handle)

    def _seen(self, event: str) -> None:
        if self.hook is not None and not self.busy:
            self.busy = True
            self.hook(event)
            self.busy = False


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Job:
    """One task. ``folder/here`` is where the job works, ``folder/copies`` what its kills left."""

    def __init__(self, watch: Watch, task: dict[str, Any]) -> None:
        self.watch, self.task, self.options = watch, task, task["options"]
        self.draw = random.Random(task["seed"])
        self.folder = Path(task["folder"])
        self.here, self.copies, self.error = self.folder / "here", self.folder / "copies", self.folder / "error"
        self.out, self.record = self.here / "out", self.here / ".out.work" / "job.json"
        self.known: set[str] = set()
        self.kills, self.failures = 0, list[str]()
        self.copies.mkdir(parents=True)
        self.here.mkdir()

    def run(self) -> dict[str, Any]:
        events: list[str] = []
        self.watch.set(self.here, events.append)
        started, clock = time.process_time(), time.monotonic()
        quantkit.convert(out=self.out, **self.options)
        self.watch.set(self.here, None)
        self.cpu, self.wall = time.process_time() - started, time.monotonic() - clock
        self.wanted = hashes(self.out)
        self.clear()
        count, times = self.task["moments"], self.task["moments"] // 2
        kinds = {"events": range(len(events)), "renames": [i for i, e in enumerate(events) if e == "os.rename"], "": []}
        chosen = {*kinds[self.task["at"]], *(self.draw.randrange(len(events)) for _ in range(count - times))}
        self.kill_on_the_way(chosen, times)
        found = self.collect()
        for state in found:
            self.resume(state)
        unfinished = [
            state for state in found if not (state / "out").exists() or (state / ".out.work" / "job.json").exists()
        ]
        if unfinished and self.task["again"]:
            self.place(self.draw.choice(unfinished))
            self.kill_on_the_way({self.draw.randrange(40) for _ in range(self.task["again"])}, self.task["again"])
            for state in self.collect():
                self.resume(state)
        for _ in range(self.task["hard"]):
            self.kill_hard()
        seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        return {
            "seconds": seconds,
            "events": events,
            "kills": self.kills,
            "states": len(self.known),
            "failures": self.failures,
        }

    def clear(self) -> None:
        shutil.rmtree(self.here)
        self.here.mkdir()

    def fork(self, before: Callable[[], None], **more: Any) -> list[int]:
        """Convert in a child. Returns the wait status of every process that took part."""
        self.error.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            try:
                before()
                quantkit.convert(out=self.out, **self.options, **more)
                os._exit(0)
            except BaseException as error:
                self.error.write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(2)
        statuses = []
        while True:
            try:
                statuses.append(os.wait()[1])
            except ChildProcessError:
                return statuses

    def attempt(self, before: Callable[[], None] = lambda: None) -> list[int]:
        """One start of the job as a user would: resumed if there is something to resume."""
        return self.fork(before, **({"resume": True} if self.record.exists() else {}))

    def kill_on_the_way(self, events: set[int], times: int) -> None:
        """Run the job from what lies in ``here``; its process is killed at each of these events and random times."""
        left = sorted(self.draw.random() * self.cpu for _ in range(times))
        steps = [max(1e-4, b - a) for a, b in zip([0.0, *left], left, strict=False)]
        count = 0

        def die(label: str) -> None:
            self.watch.busy = True
            worker, rest = os.getpid(), signal.getitimer(signal.ITIMER_PROF)[0]
            if os.fork():
                os.kill(worker, signal.SIGKILL)
            while os.getppid() == worker:
                time.sleep(1e-3)
            shutil.copytree(self.here, self.copies / f"{len(list(self.copies.iterdir())):04d} {label}", symlinks=True)
            self.watch.busy = False
            signal.setitimer(signal.ITIMER_PROF, rest)  # a fork has no timers

        def seen(event: str) -> None:
            nonlocal count
            if count in events:
                die(f"before event {count}, {event}")
            count += 1

        def tick(*_: Any) -> None:
            if self.watch.busy:
                signal.setitimer(signal.ITIMER_PROF, 1e-3)
                return
            steps.pop(0)
            die("at a random time")
            if steps:
                signal.setitimer(signal.ITIMER_PROF, steps[0])

        def before() -> None:
            self.watch.set(self.here, seen)
            signal.signal(signal.SIGPROF, tick)
            if steps:
                signal.setitimer(signal.ITIMER_PROF, steps[0])

        statuses = self.attempt(before)
        if sorted(statuses)[0] != 0 or any(s not in (0, signal.SIGKILL) for s in statuses):
            self.failures.append(f"the job that is killed on its way ended with {statuses} {self.said()}")
        self.clear()

    def said(self) -> str:
        """The error that ended the last job, if one did."""
        return self.error.read_text() if self.error.exists() else ""

    def collect(self) -> list[Path]:
        """The copies that no other one equals, out of the way. Checks that nothing half-written has the final name."""
        new = []
        for copy in sorted(self.copies.iterdir()):
            self.kills += 1
            if (copy / "out").exists() and hashes(copy / "out") != self.wanted:
                self.failures.append(f"{copy.name}: half-written under the final name")
            key = repr((hashes(copy), sorted(str(path.relative_to(copy)) for path in copy.rglob("*"))))
            if key in self.known:
                shutil.rmtree(copy)
            else:
                self.known.add(key)
                new.append(Path(shutil.move(copy, self.folder / f"state {len(self.known):04d}, {copy.name}")))
        return new

    def place(self, state: Path) -> None:
        shutil.rmtree(self.here)
        shutil.copytree(state, self.here, symlinks=True)

    def resume(self, state: Path) -> None:
        self.place(state)
        self.go_on(state.name)

    def go_on(self, label: str) -> None:
        """Resume what lies in ``here`` and compare."""
        if not self.out.exists() or self.record.exists():
            status = self.attempt()
            if status != [0]:
                self.failures.append(f"{label}: the resumed job ended with {status} {self.said()}")
        if hashes(self.out) != self.wanted:
            self.failures.append(f"{label}: other bytes")
        left = [
            str(path.relative_to(self.here)) for path in self.here.rglob("*") if self.out not in (path, *path.parents)
        ]
        if not set(left) <= {
            ".out.work",
            ".out.work/lock",
        }:  # a kill in the last moment leaves a lock that nobody holds
            self.failures.append(f"{label}: left behind: {left}")
        self.clear()

    def kill_hard(self) -> None:
        """The kernel ends the process, whatever it is doing."""

        def arm() -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.draw.random() * self.wall))

        self.attempt(arm)
        self.kills += 1
        self.go_on("ended by the clock")


def main() -> None:
    import quantkit.convert.job.states
    import quantkit.convert.output.smoke_test

    quantkit.convert.job.states.EVERY, quantkit.convert.job.states.SHARE = 0.0, 0
    # loading the result is part of the job; its text is not looked at here
    quantkit.convert.output.smoke_test.NEW_TOKENS = 2
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    watch = Watch()
    for line in sys.stdin:
        print(json.dumps(Job(watch, json.loads(line)).run()), flush=True)


if __name__ == "__main__":
    main()
