"""What a disk that cannot be written to is said to be, and what to do about it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from quantkit.checkpoint.writer import disk
from quantkit.errors import QuantkitError


def library_error(number: int) -> Exception:
    """As the tokenizers library raises it: a plain Exception with the number in its text."""
    return Exception(f"{os.strerror(number)} (os error {number})")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", [lambda n: OSError(n, os.strerror(n)), library_error])
def test_a_full_disk_is_named_with_what_is_free_on_it(number: int, kind: object, tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    what = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota of this disk is used up"}[number]
    with pytest.raises(QuantkitError) as caught, disk(folder):
        raise kind(number)  # type: ignore[operator]
    said = re.fullmatch(
        rf"{re.escape(str(folder))}: {what}: \S+ [kMG]B are free on (\S+)\. Free some space there\.", str(caught.value)
    )
    assert said is not None
    assert os.path.ismount(said[1])


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EFBIG, "grown larger than is allowed"),
        (errno.EROFS, "Read-only file system"),
        (errno.EACCES, "Permission"),
    ],
)
def test_other_troubles_have_other_remedies(number: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=words) as caught, disk(tmp_path):
        raise OSError(number, os.strerror(number))
    assert "Free some space" not in str(caught.value)


def test_what_is_not_the_systems_fault_passes_through(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a defect"), disk(tmp_path):
        raise ValueError("a defect")
