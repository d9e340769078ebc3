"""Kill conversions with SIGKILL at chosen steps, resume them, and compare the bytes. Run as a script by test_resume.py.

    python killer.py '{"folder": ..., "options": {...}, "plans": [...]}'

One process imports everything once and forks a child per conversion. A plan is a list of kills for one job: ``{"event": n}``
at the n-th change of the file system (every open for writing, rename, remove, mkdir, rmdir and fsync below ``folder``), or
``{"share": x}`` at that share of the events, or ``{"time": x}`` at that share of the undisturbed time. Each kill but the
first hits the resumed job. Plans ``"renames"`` and ``"events"`` stand for one plan per rename, and per event.
Prints JSON: the events of the undisturbed job, and what went wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork

import quantkit

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "fsync")


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def watch(folder: Path, seen: Callable[[str], None]) -> None:
    """Call ``seen`` before every change of a file below ``folder``."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(str(folder)):
            if isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
                seen("open")
        elif event in CHANGES:
            seen(event)

    sys.addaudithook(hook)
    sync = os.fsync

    def fsync(handle: int) -> None:
        seen("fsync")
        sync(handle)

    os.fsync = fsync


class Killer:
    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.out = folder / "out"

    def fork(self, before: Callable[[], None], **more: Any) -> int:
        """Convert in a child. Returns its wait status."""
        child = os.fork()
        if child:
            return os.waitpid(child, 0)[1]
        code = 1
        try:
            before()
            quantkit.convert(out=self.out, **self.options, **more)
            code = 0
        except BaseException as error:
            (self.folder / "error").write_text(f"{type(error).__name__}: {error}")
            code = 2
        finally:
            os._exit(code)

    def undisturbed(self) -> None:
        log = self.folder / "events"
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        quantkit.convert(
            out=self.out, **self.options
        )  # in this process: what libraries import lazily is there for all forks
        shutil.rmtree(self.out)
        started = time.monotonic()
        status = self.fork(lambda: watch(self.folder, lambda event: os.write(handle, f"{event}\n".encode()) and None))
        self.seconds = time.monotonic() - started
        assert status == 0, (self.folder / "error").read_text()
        self.events = log.read_text().split()
        self.wanted = hashes(self.out)
        log.unlink()
        self.clear()

    def clear(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def attempt(self, kill: dict[str, float] | None) -> int:
        """One start of the job as a user would: resumed if there is something to resume."""
        more = {"resume": True} if (self.folder / ".out.work" / "job.json").exists() else {}
        return self.fork(lambda: self.arm(kill) if kill else None, **more)

    def arm(self, kill: dict[str, float]) -> None:
        if "time" in kill:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, kill["time"] * self.seconds))
            return
        left = [int(kill["event"]) if "event" in kill else int(kill["share"] * len(self.events))]

        def seen(event: str) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        watch(self.folder, seen)

    def check(self, plan: list[dict[str, float]]) -> str | None:
        """None, or what went wrong."""
        for kill in plan:
            status = self.attempt(kill)
            if self.out.exists() and hashes(self.out) != self.wanted:
                return "half-written under the final name"
            if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                return f"a start failed: {(self.folder / 'error').read_text()}"
            if status == 0 or (self.out.exists() and not (self.folder / ".out.work" / "job.json").exists()):
                break  # the kill would have come later than the end
        else:
            status = self.attempt(None)
            if status:
                return f"the last start failed: {(self.folder / 'error').read_text()}"
        if hashes(self.out) != self.wanted:
            return "other bytes"
        left = sorted(path.name for path in self.folder.iterdir() if path.name != "out")
        return None if left in ([], [".out.work"]) and not self.leftovers() else f"left behind: {left}"

    def leftovers(self) -> list[str]:
        """What a kill in the last moment may leave: the work folder with nothing but its lock."""
        work = self.folder / ".out.work"
        return [path.name for path in work.iterdir() if path.name != "lock"] if work.exists() else []


def main() -> None:
    task = json.loads(sys.argv[1])
    import quantkit.convert.states

    quantkit.convert.states.EVERY, quantkit.convert.states.SHARE = 0.0, 0
    killer = Killer(Path(task["folder"]), task["options"])
    killer.undisturbed()
    plans: list[list[dict[str, float]]] = []
    for plan in task["plans"]:
        if plan in ("renames", "events"):
            indices = [i for i, event in enumerate(killer.events) if plan == "events" or event == "os.rename"]
            plans += [[{"event": i}] for i in indices]
        else:
            plans.append(plan)
    failures = []
    for plan in plans:
        wrong = killer.check(plan)
        if wrong:
            events = [killer.events[k["event"]] for k in plan if "event" in k]
            failures.append(f"{plan} {events}: {wrong}")
        killer.clear()
    print(json.dumps({"events": killer.events, "plans": len(plans), "failures": failures, "seconds": killer.seconds}))


if __name__ == "__main__":
    main()
