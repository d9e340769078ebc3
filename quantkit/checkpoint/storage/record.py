"""Records: JSON with a checksum, on the disk whole or not at all; every field is checked when one is read.

A record may have been written by somebody else: its checksum shows damage, not where it comes from. So each reader says
what the fields must be, as a *shape*:

* ``str``, ``int``, ``bool``, ``None``, ``float`` (any finite number), ``dict`` (an object of any content);
* a compiled pattern: a string that matches it in full;
* ``[shape]``: a list, ``(shape, shape)``: a list of exactly these;
* ``{"name": shape, "other?": shape}``: an object with these fields, those with ``?`` may be missing;
* ``{str: shape}``: an object with any names;
* ``Either(shape, shape)``, and ``POSITIVE``: an integer from 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from quantkit.checkpoint.regular import read_regular
from quantkit.errors import SourceError, WorkFolderError

SHA256 = re.compile(r"[0-9a-f]{64}")
# of a record; the largest that quantkit writes holds the importance of every channel of a model: tens of megabytes
LARGEST = 1 << 27
# of an integer: what a tensor can hold
WIDEST = 1 << 63
POSITIVE = object()
# half of a surrogate pair, or the beginning of a whole one: quantkit writes neither as an escape
ESCAPED_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
AGAIN = "quantkit did not write this. Start anew with --overwrite, or remove the work folder by hand."


class Either:
    """A shape that is one of several."""

    def __init__(self, *shapes: object) -> None:
        self.shapes = shapes


class _Mismatch(Exception):
    """A field is not what it must be: its name, and what is there."""


def write_record(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON object that is on the disk, whole, or not there (write, fsync, rename).

    It carries its own checksum.
    """
    text = json.dumps(data, ensure_ascii=False)
    new = path.with_suffix(".new-record")
    new.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", encoding="utf-8")
    sync(new)
    os.replace(new, path)
    sync(path.parent)


def read_record(path: Path, shape: object, remedy: str = AGAIN) -> dict[str, Any] | None:
    """Read what ``write_record`` wrote; None if it is missing or damaged.

    path: of the record. shape: what its fields must be. remedy: the end of the message.

    Raises WorkFolderError, naming file and field, for a whole record of another shape.
    """
    try:
        digest, _, text = read_regular(path, LARGEST).decode().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    except SourceError as error:
        raise WorkFolderError(f"{error} {remedy}") from error
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return None
    try:
        data = json.loads(text)
        if ESCAPED_HALF.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise WorkFolderError(f"{path}: holds half of a surrogate pair, which is no text. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise WorkFolderError(f"{path}: cannot be read ({str(error)[:100]}). {remedy}") from error
    return as_record(data, shape, path, remedy)


def as_record(data: object, shape: object, path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Check that JSON is an object of a shape, and return it.

    path: where it was read, for the message. remedy: the end of the message.

    Raises WorkFolderError, naming file and field.
    """
    try:
        _check(data, shape, "")
    except _Mismatch as error:
        raise WorkFolderError(f"{path}: {error}. {remedy}") from None
    assert isinstance(data, dict)
    return data


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(value: object, shape: object, name: str) -> None:
    if isinstance(shape, Either):
        if not any(_fits(value, option, name) for option in shape.shapes):
            raise _mismatch(name, value)
    elif isinstance(shape, dict):
        _check_object(value, shape, name)
    elif isinstance(shape, list | tuple):
        if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
            raise _mismatch(name, value)
        for index, entry in enumerate(value):
            _check(entry, shape[0] if isinstance(shape, list) else shape[index], f"{name}[{index}]")
    elif not _is_plain(value, shape):
        raise _mismatch(name, value)


def _check_object(value: object, shape: dict[Any, object], name: str) -> None:
    if not isinstance(value, dict):
        raise _mismatch(name, value)
    if str in shape:
        for key, entry in value.items():
            _check(entry, shape[str], _joined(name, key))
        return
    fields = {key.removesuffix("?"): entry for key, entry in shape.items()}
    unknown = [key for key in value if key not in fields]
    if unknown:
        raise _mismatch(_joined(name, unknown[0]), value[unknown[0]])
    for key, entry in fields.items():
        if key in value:
            _check(value[key], entry, _joined(name, key))
        elif f"{key}?" not in shape:
            raise _Mismatch(f"{_joined(name, key)!r} is missing")


def _fits(value: object, shape: object, name: str) -> bool:
    try:
        _check(value, shape, name)
    except _Mismatch:
        return False
    return True


def _is_plain(value: object, shape: object) -> bool:
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    if shape is None:
        return value is None
    if shape is int:
        return type(value) is int and -WIDEST <= value < WIDEST
    if shape is POSITIVE:
        return _is_plain(value, int) and value > 0  # type: ignore[operator]
    if shape is float:
        return (type(value) is int and -WIDEST <= value < WIDEST) or (type(value) is float and math.isfinite(value))
    # not isinstance: True is an int
    return type(value) is shape


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _mismatch(name: str, value: object) -> _Mismatch:
    shown = repr(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return _Mismatch(f"{(name or 'its content')[:100]!r} is {shown[:60]}")
