"""Conversions on disks that fill up, are made larger, and fill no more.

Started by test_full_disk.py in a mount namespace.

    python full_disk.py TASK.json

The task is ``{"folder", "source", "calibration", "cases"}``; a case ``[what, room]``: "both" puts the output and
the work folder on one small tmpfs, "work" and "out" one of them, "repack" writes ``source`` of the format native in
another. After the first block (the first module of a repack) a file takes all of that disk but ``room`` bytes. Prints
JSON: what each case saw.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import quantkit
import quantkit.convert.job.states
import quantkit.convert.output.smoke_test
from quantkit.errors import QuantkitError

SIZE = 4 << 20


def mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def fill(disk: Path, room: int) -> None:
    """Leave ``room`` bytes."""
    stat = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - room)))


def conversion(task: dict[str, Any]) -> dict[str, Any]:
    return {"source": task["source"], "group_size": 32, "calibration": task["calibration"], "samples": 4, "seq_len": 32}


def repack(task: dict[str, Any]) -> dict[str, Any]:
    return {"source": Path(task["folder"]) / "native", "format": "gptq"}


class Case:
    def __init__(self, task: dict[str, Any], what: str, room: int) -> None:
        self.room, self.folder = room, Path(task["folder"]) / f"{what}-{room}"
        self.disk, self.other = self.folder / "small", self.folder / "other"
        self.disk.mkdir(parents=True)
        self.other.mkdir()
        self.out = (self.other if what == "work" else self.disk) / "out"
        self.work = (self.other if what == "out" else self.disk) / "work"
        if what == "repack":
            self.options = repack(task)
        else:
            self.options = {**conversion(task), "work_dir": self.work}

    def convert(self, **more: Any) -> None:
        quantkit.convert(out=self.out, **self.options, **more)

    def run(self) -> dict[str, Any]:
        """``None`` for an attempt that succeeded, and for one that was not made."""
        mount(self.disk, f"size={SIZE}")
        found: dict[str, Any] = {"error": self.attempt(on_progress=self.fill_up), "left": self.everything()}
        found["too_early"] = self.attempt(resume=True) if self.work.exists() else None
        mount(self.disk, f"remount,size={2 * SIZE}")
        found["second"] = None if self.out.exists() else self.attempt(resume=self.work.exists())
        found["digest"] = digest(self.out) if self.out.exists() else {}
        found["at_the_end"] = self.everything()
        subprocess.run(["umount", str(self.disk)], check=True)
        return found

    def everything(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*"))

    def fill_up(self, progress: Any) -> None:
        if progress.stage != "read" and progress.done == 1 and not (self.disk / "ballast").exists():
            fill(self.disk, self.room)

    def attempt(self, **more: Any) -> dict[str, Any] | None:
        """The kind, the message and the notes of the error; None without one."""
        try:
            self.convert(**more)
        except QuantkitError as error:
            return {"kind": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", [])}
        return None


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    quantkit.convert.job.states.EVERY, quantkit.convert.job.states.SHARE = 0.0, 0
    quantkit.convert.output.smoke_test.NEW_TOKENS = 2
    folder = Path(task["folder"])
    quantkit.convert(task["source"], out=folder / "native", method="rtn", group_size=32, format="native")
    for name, options in (("wanted-repack", repack(task)), ("wanted", conversion(task))):
        quantkit.convert(out=folder / name, **options)
    print(json.dumps({f"{what}-{room}": Case(task, what, room).run() for what, room in task["cases"]}))


if __name__ == "__main__":
    main()
