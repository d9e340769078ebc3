"""What tests want to know of a folder that was written."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quantkit.checkpoint.open import open_source
from quantkit.core.qtensor import QuantTensor
from quantkit.formats.reader import QuantizedReader


def digest(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder by its path inside: equal only if neither folder has a file more."""
    assert folder.is_dir()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def schemes(folder: Path) -> dict[str, str]:
    reader = QuantizedReader(open_source(folder))
    found = {name: reader.module(name) for name in reader.modules}
    return {name: q.scheme.describe() for name, q in found.items() if isinstance(q, QuantTensor)}
