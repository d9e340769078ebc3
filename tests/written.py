"""What tests want to know of a folder that was written."""

from __future__ import annotations

from pathlib import Path

from quantkit.checkpoint.source import open_source
from quantkit.core.qtensor import QuantTensor
from quantkit.formats.reader import QuantizedReader


def schemes(folder: Path) -> dict[str, str]:
    reader = QuantizedReader(open_source(folder))
    found = {name: reader.module(name) for name in reader.modules}
    return {name: q.scheme.describe() for name, q in found.items() if isinstance(q, QuantTensor)}
