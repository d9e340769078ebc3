"""What a work folder may hold, and the record of its job: checked before anything in it is believed.

A work folder lies where its user put it, and may come from somebody else. What its record names becomes part of paths
that are written and removed, so nothing of it is taken on trust.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from quantkit.checkpoint.regular import KINDS
from quantkit.checkpoint.storage.record import Either, read_record
from quantkit.checkpoint.storage.unfinished import TOKEN
from quantkit.errors import WorkFolderError

CHOICE = {"taken": [int], "sensitivity": [[float]], "measured_on": {"text": str, "windows": int, "tokens": int}}
# identity is compared with that of the job asked for; the facts are checked by the report that takes them up
JOB = {
    "identity": dict,
    "token": TOKEN,
    "finished": Either(None, dict),
    "read?": bool,
    "choice?": Either(None, CHOICE),
}  # fmt: skip


def read_job(folder: Path) -> dict[str, Any] | None:
    """Read the job's record in a work folder, None if there is none.

    Raises WorkFolderError if the record is damaged, or is not one that quantkit writes.
    """
    path = folder / "job.json"
    by_hand = f"This job cannot go on. Look at {folder}, and remove it by hand."
    job = read_record(path, JOB, by_hand)
    if job is None and path.exists():
        raise WorkFolderError(f"{path}: is damaged; this job cannot go on. Delete {folder} and start anew.")
    if job is not None and not isinstance(job["identity"].get("out"), str):
        raise WorkFolderError(f"{path}: 'identity.out' is no path. {by_hand}")
    return job


def refuse_planted(folder: Path) -> None:
    """Refuse a folder of quantkit's own in which something is no plain file or folder: it was planted there.

    folder: a work folder, or an output that is not finished; it may be missing.

    Raises WorkFolderError, naming the entry, for a symbolic link, a FIFO, a device, a socket, or a file with a second
    name elsewhere (a hard link), which writing would change.
    """
    by_hand = f"quantkit did not put it there. Look at it, and remove {folder} by hand."
    if folder.is_symlink():
        raise WorkFolderError(f"{folder}: is a symbolic link. Give the folder itself, or remove the link.")
    if not folder.is_dir():
        return
    for place, folders, files in os.walk(folder, onerror=_cannot_look):
        for name in sorted((*folders, *files)):
            path = Path(place, name)
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFLNK:
                raise WorkFolderError(f"{path}: is a symbolic link; {by_hand}")
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise WorkFolderError(f"{path}: is {KINDS.get(kind, 'no file')}; {by_hand}")
            if kind == stat.S_IFREG and status.st_nlink > 1:
                raise WorkFolderError(f"{path}: has another name elsewhere (a hard link); {by_hand}")


def _cannot_look(error: OSError) -> None:
    raise WorkFolderError(f"{error.filename}: cannot be read ({error.strerror}). Check who may read it.") from error


def printable(value: str) -> str:
    """Return text of a foreign record for a message: short, and without what would move a terminal's cursor."""
    text = value if value.isprintable() else repr(value)
    return f"{text[:200]}..." if len(text) > 200 else text
