"""The header of a safetensors file: which tensors it holds, of which dtype and shape, and where their bytes lie.

8 bytes of header length, the header (JSON), the data. Every tensor has ``dtype``, ``shape`` and ``data_offsets``, the
begin and end of its bytes counted from the end of the header; the tensors fill the data without holes or overlaps.
Source: https://github.com/huggingface/safetensors (README, Format; safetensors/src/tensor.rs, Metadata::validate).
The library checks the same; read here, an error names the tensor and the field, and the header is parsed once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.foreign_files.fields import Several, Whole, field, parse_object, shown
from quantkit.checkpoint.regular import open_regular
from quantkit.errors import SourceError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U32": torch.uint32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
MOST_HEADER = 100_000_000  # bytes, the library's own limit
MOST_DIMENSIONS = 8
_SHAPE = Several(Whole(0, 1 << 48))
_OFFSETS = Several(Whole(0, 1 << 56))


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor: its dtype, its shape, and where its bytes begin, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """Read the header of a whole safetensors file.

    file: path of the file.

    Raises SourceError, naming file, tensor and field, for a file that is shorter or longer than its header says, for a
    header that contradicts itself, and for a dtype that is not read.
    """
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(24)
            length = int.from_bytes(start[:8], "little")
            if start == b"version https://git-lfs.":
                raise SourceError(f"{file}: is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
            if size < 8 or length > size - 8 or length > MOST_HEADER:
                raise _not_whole(file, f"its header would have {length:,} bytes, the file has {size:,}")
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        raise SourceError(f"{file}: cannot be read ({error.strerror}). Check who may read it.") from error
    data = parse_object(text, f"{file}: header")
    entries = {name: _entry(file, name, entry) for name, entry in data.items() if name != "__metadata__"}
    _check_offsets(file, {name: data[name]["data_offsets"] for name in entries}, size - 8 - length)
    return {name: HeaderEntry(dtype, shape, 8 + length + begin) for name, (dtype, shape, begin) in entries.items()}


def _not_whole(file: Path, reason: str) -> SourceError:
    return SourceError(f"{file}: not a whole safetensors file ({reason}). Download it again.")


def _entry(file: Path, name: str, entry: Any) -> tuple[torch.dtype, tuple[int, ...], int]:
    where = f"{file}: {shown(name, 120)}"
    if not isinstance(entry, Mapping):
        raise SourceError(f"{where}: its header entry is {shown(entry)}, not an object. Download the file again.")
    shape = field(entry, "shape", _SHAPE, where)
    begin, end = _pair(where, field(entry, "data_offsets", _OFFSETS, where))
    kind = entry.get("dtype")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise SourceError(f"{where} has dtype {shown(kind)}, which quantkit does not read.")
    dtype = DTYPES[kind]
    if len(shape) > MOST_DIMENSIONS:
        raise SourceError(f"{where} has {len(shape)} dimensions, more than any weight. Download the file again.")
    wanted = math.prod(shape) * dtype.itemsize
    if end - begin != wanted:
        raise SourceError(
            f"{where}: data_offsets hold {end - begin} bytes, its shape {shape} in {kind} needs {wanted}."
            " Download the file again."
        )
    return dtype, tuple(shape), begin


def _pair(where: str, offsets: list[int]) -> tuple[int, int]:
    if len(offsets) != 2:
        raise SourceError(
            f"{where}: data_offsets are {shown(offsets)}, not a begin and an end. Download the file again."
        )
    return offsets[0], offsets[1]


def _check_offsets(file: Path, offsets: Mapping[str, list[int]], size: int) -> None:
    """Refuse tensors that overlap, lie apart, or do not fill the data."""
    position, before = 0, "the header"
    for name, (begin, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if begin != position:
            how = "overlaps" if begin < position else "does not follow"
            raise SourceError(
                f"{file}: {shown(name, 120)}: data_offsets begin at {begin}; it {how} {shown(before, 120)}, which ends"
                f" at {position}. Download the file again."
            )
        position, before = end, name
    if position != size:
        raise _not_whole(file, f"its tensors have {position:,} bytes, the file holds {size:,}")
