"""Files that end: a FIFO, a device or a socket in the place of a file is refused by name.

Opening a FIFO waits for a writer, and ``/dev/zero`` never ends. What is open is asked again what it is, so nothing can
be put in its place between the question and the opening.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.errors import RequestError, SourceError

KINDS = {
    stat.S_IFIFO: "a FIFO (a pipe)",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)


def given_path(name: Any) -> Path:
    """Return the path that somebody named, with ``~`` unfolded; whether anything lies there is for the caller to ask.

    name: as it was given, text or ``Path``.

    Raises RequestError for anything else, a home that does not exist, or a name that no file can have.
    """
    if not isinstance(name, (str, Path)):
        raise RequestError(f"a model, text or folder is given by a path or a name, not by {type(name).__name__}.")
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{str(name)[:100]}: cannot be looked up ({reason}). Give the path of a file.") from error
    require_utf8(path)
    return path


def require_utf8(path: Path) -> None:
    """Refuse a path that is no UTF-8: tokenizers cannot open it, and no JSON file of ours could name it.

    path: as it was given; the folders above it count.

    Raises RequestError.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise RequestError(
            f"{shown}: this path is not UTF-8: neither tokenizers nor JSON files can name it. Rename it."
        ) from None


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading its bytes; links are followed.

    path: what to open.

    Raises SourceError for a FIFO, device, socket or folder, OSError for what is missing or may not be read.
    """
    _require(path, os.stat(path))
    handle = os.open(path, FLAGS | getattr(os, "O_BINARY", 0))
    try:
        _require(path, os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Read a whole regular file of at most ``most`` bytes.

    path: what to read. most: bytes that such a file may have.

    Raises SourceError for what is no regular file or larger, OSError for what is missing or may not be read.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        # Asked before reading, and again after it: a file under /proc says 0, and one may grow.
        data = b"" if size > most else stream.read(most + 1)
    if max(size, len(data)) > most:
        raise SourceError(f"{path}: more than {most:,} bytes, too large for such a file. Check what it is.")
    return data


def check_regular(path: Path) -> None:
    """Check what a library is about to open by its path.

    path: what will be opened.

    Raises SourceError for a FIFO, device, socket or folder, OSError for what is missing.
    """
    _require(path, os.stat(path))


def _require(path: Path, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        return
    remedy = "Give the file itself." if kind == stat.S_IFDIR else "Write its content to a file, and give that."
    raise SourceError(f"{path}: {KINDS.get(kind, 'no file')}, not a regular file. {remedy}")
