"""Folders beside an output folder, while it is put together: their names, and what a killed process left of them.

::

    .NAME.partial-TOKEN     the output, one rename away from its name
    .NAME.replaced-TOKEN    the model that it replaces, between two renames

A conversion's TOKEN stands in its work folder, and the job that goes on from there deals with both. A repack does not
go on: its process holds a lock on the first folder, and the next one that writes to the same output removes what nobody
holds, and puts back a model that has lost its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path

from quantkit.checkpoint.storage.removal import remove
from quantkit.errors import WorkFolderError

# of a conversion
TOKEN = re.compile(r"[0-9a-f]{8}")
# of what is written in one go, and not gone on with
LOCKED = re.compile(r"repack-[0-9a-f]{8}")


def partial_folder(out: Path, token: str) -> Path:
    """Return where ``out`` is put together: beside it, so that one rename finishes it.

    Raises WorkFolderError for a token that quantkit does not make.
    """
    return _beside(out, "partial", token)


def replaced_folder(out: Path, token: str) -> Path:
    """Return where the model that ``out`` replaces lies for the moment between two renames.

    Raises WorkFolderError for a token that quantkit does not make.
    """
    return _beside(out, "replaced", token)


def _beside(out: Path, kind: str, token: str) -> Path:
    if not TOKEN.fullmatch(token) and not LOCKED.fullmatch(token):
        raise WorkFolderError(f"{out}: {token[:60]!r} is no token that quantkit makes. Remove the work folder by hand.")
    return out.parent / f".{out.name}.{kind}-{token}"


def lock_new(out: Path) -> tuple[str, int]:
    """Make the folder in which ``out`` is written in one go, and lock it.

    Returns its token, and a descriptor that holds the lock until it is closed.
    """
    while True:
        token = f"repack-{secrets.token_hex(4)}"
        folder = partial_folder(out, token)
        folder.mkdir()
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # a file system without locks: the folder is not told from one that is in use, and nobody removes it
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # another process may have taken it for a dead one's before it was locked
        if folder.is_dir() and os.path.samestat(os.fstat(handle), os.lstat(folder)):
            return token, handle
        os.close(handle)


def sweep(out: Path) -> None:
    """Remove what killed repacks to ``out`` left beside it; a model that lost its name to one is put back.

    out: an output folder. Raises OSError for what cannot be removed.
    """
    for folder in unfinished(out, "partial", LOCKED):
        handle = _take(folder)
        if handle is not None:
            put_back(out, replaced_folder(out, folder.name.rpartition("partial-")[2]))
            remove(folder, out.parent)
            os.close(handle)
    for old in unfinished(out, "replaced", LOCKED):
        token = old.name.rpartition("replaced-")[2]
        if not partial_folder(out, token).exists():
            put_back(out, old)
            remove(old, out.parent)


def unfinished(out: Path, kind: str, token: re.Pattern[str]) -> list[Path]:
    """Return the folders beside ``out`` that have such a name; no links.

    kind: "partial" or "replaced". token: a pattern for the end of the name.
    """
    name = re.compile(rf"\.{re.escape(out.name)}\.{kind}-{token.pattern}")
    beside = out.parent.iterdir() if out.parent.is_dir() else ()
    return sorted(path for path in beside if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink())


def put_back(out: Path, old: Path) -> None:
    """Give the model that was about to be replaced its name again, if nothing else has it.

    out: its name. old: where it lies, see ``replaced_folder``; nothing is done if it does not, or is a link.
    """
    if old.is_dir() and not old.is_symlink() and not os.path.lexists(out):
        old.rename(out)


def _take(folder: Path) -> int | None:
    """Lock a folder that no living process holds; None if one does, or if that cannot be known."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
