"""Removing what quantkit made itself: the only place where a whole folder is deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from quantkit.errors import QuantkitError


def remove(path: Path, inside: Path) -> None:
    """Remove a file, or a folder with everything in it; nothing if there is none. A link is removed, never followed.

    path: what to remove. inside: the folder in which it must lie, at any depth.

    Raises QuantkitError for a path that lies elsewhere, OSError for what cannot be removed.
    """
    # the folder that holds it is resolved, not the path itself: a link is removed where it lies
    place = Path(os.path.realpath(path.parent))
    if path.name in ("", ".", "..") or not place.is_relative_to(os.path.realpath(inside)):
        raise QuantkitError(
            f"{path}: lies outside {inside} and is not removed. Please report it: no input should do that."
        )
    while os.path.lexists(path):
        # something in it, or all of it, may be gone already: another process removes it, too
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                # follows no link, and cannot be led astray by one that is put there meanwhile
                shutil.rmtree(path)
            else:
                path.unlink()
