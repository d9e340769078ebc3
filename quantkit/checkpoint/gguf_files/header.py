"""The header of a GGUF file: its metadata and where each tensor lies.

Dequantization and the table of block sizes come from the ``gguf`` library. Its ``GGUFReader`` is not used for the
header: it makes a numpy view of every string of the vocabulary, which for Gemma's 262,144 tokens took 15 s and 716 MB
where this module takes 1 s and 60 MB; a converter that promises its peak memory cannot start with that.

Layout (version 2 and 3, little-endian): ``GGUF``, version u32, tensor count u64, metadata count u64, then the metadata
(key string, type u32, value), then the tensors (name string, dims u32, extents u64 innermost first, type u32, offset
u64), then padding to ``general.alignment``, then the tensor data. A string is its length u64 and UTF-8 bytes.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.checkpoint.foreign_files.fields import Whole, check_field, shown
from quantkit.checkpoint.gguf_files.fields import check_fields
from quantkit.checkpoint.regular import open_regular
from quantkit.errors import MissingExtra, SourceError

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9
# Far above every file: a vocabulary of 262,144 tokens with merges has 1.3 million entries and a header of 20 MB.
MOST_HEADER, MOST_STRING, MOST_ENTRIES, MOST_TENSORS, MOST_NESTED = 1 << 28, 1 << 24, 1 << 22, 1 << 17, 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the file. ``shape`` is in torch's order (rows first); ``offset`` counts from the file's start."""

    # the name of the ggml type: "F32", "Q4_1", ...
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata values (numbers, strings, lists) and the stored tensors by their GGUF names."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def gguf_library() -> Any:
    """Import the ``gguf`` module. Raises MissingExtra if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise MissingExtra("gguf", "gguf", "Reading a GGUF file") from None
    return gguf


def read_header(path: Path) -> Header:
    """Read metadata and tensor table of a whole GGUF file.

    Raises SourceError for a file that is no GGUF file, is damaged, or is shorter than its table says.
    """
    size = path.stat().st_size
    try:
        with open_regular(path) as stream:
            return _parse(_Cursor(stream, size), path, size)
    except (struct.error, EOFError, UnicodeDecodeError, OverflowError) as error:
        raise SourceError(
            f"{path}: the GGUF header is damaged or cut off ({error}). Download the file again."
        ) from error


def _parse(cursor: _Cursor, path: Path, size: int) -> Header:
    if cursor.take(4) != b"GGUF":
        raise SourceError(f"{path}: not a GGUF file (it does not start with 'GGUF'). Download it again.")
    version, tensors, pairs = cursor.number("<u4"), cursor.number("<u8"), cursor.number("<u8")
    if version not in (2, 3):
        raise SourceError(
            f"{path}: GGUF version {version} is not read (2 and 3 are, little-endian). Convert it with a current"
            " llama.cpp."
        )
    check_field(str(path), "the number of tensors", tensors, Whole(0, MOST_TENSORS))
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.string()
        if key in metadata:
            raise SourceError(f"{path}: {shown(key)} is said twice. The file is damaged; download it again.")
        metadata[key] = cursor.value(cursor.number("<u4"))
    check_fields(metadata, str(path))
    table: dict[str, StoredTensor] = {}
    for _ in range(tensors):
        name, tensor = _entry(cursor, path)
        if name in table:
            raise SourceError(f"{path}: holds two tensors named {name!r}. The file is damaged; download it again.")
        table[name] = tensor
    return Header(metadata, _placed(table, _alignment(metadata, path), cursor.position, size, path))


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment: int = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise SourceError(
            f"{path}: general.alignment is {alignment}, not a power of two. The file is damaged; download it again."
        )
    return alignment


def _placed(
    table: dict[str, StoredTensor], alignment: int, header: int, size: int, path: Path
) -> dict[str, StoredTensor]:
    """Count offsets from the file's start, and refuse tensors that are misaligned, overlap or lie apart.

    llama.cpp asks for the same: each begins where the one before ends, padded to the alignment. Behind the last one is
    nothing but its padding: an alignment that is not the writer's moves all numbers, and leaves something there.
    """
    start = -(-header // alignment) * alignment
    position, before, end = 0, "the header", 0
    for name, tensor in sorted(table.items(), key=lambda item: item[1].offset):
        if start + tensor.offset + tensor.nbytes > size:
            raise SourceError(
                f"{path}: cut off: tensor {name!r} ends at byte {start + tensor.offset + tensor.nbytes}, the file has"
                f" {size}. Download the file again."
            )
        if tensor.offset != position:
            how = "misaligned" if tensor.offset % alignment else "overlapping" if tensor.offset < position else "apart"
            raise SourceError(
                f"{path}: tensor {name!r} has offset {tensor.offset}, {how}: expected {position}, after {before!r}. The"
                " file is damaged; download it again."
            )
        end = position + tensor.nbytes
        position, before = -(-end // alignment) * alignment, name
    if size not in (start + end, start + position):
        raise SourceError(
            f"{path}: {size - start - end} bytes follow the last tensor, {before!r}: the file has {size} bytes, its"
            f" tensors end at {start + end} (general.alignment {alignment}). The file is damaged; download it again."
        )
    return {
        name: StoredTensor(tensor.kind, tensor.shape, start + tensor.offset, tensor.nbytes)
        for name, tensor in table.items()
    }


def _entry(cursor: _Cursor, path: Path) -> tuple[str, StoredTensor]:
    """Read one row of the tensor table, its offset still counted from the data section."""
    gguf = gguf_library()
    name = cursor.string()
    dims = cursor.number("<u4")
    if not 1 <= dims <= 4:
        raise SourceError(f"{path}: tensor {name!r} has {dims} dimensions. The file is damaged; download it again.")
    shape = tuple(reversed([cursor.number("<u8") for _ in range(dims)]))
    code, offset = cursor.number("<u4"), cursor.number("<u8")
    try:
        kind = gguf.GGMLQuantizationType(code)
    except ValueError:
        raise SourceError(
            f"{path}: tensor {name!r} has ggml type {code}, which the installed gguf library does not know. "
            "Update it (pip install -U gguf), or download the file again."
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise SourceError(
            f"{path}: tensor {name!r} has rows of {shape[-1]}, no multiple of {kind.name}'s block {block}."
        )
    values = math.prod(shape)
    if values == 0:
        raise SourceError(f"{path}: tensor {name!r} has shape {list(shape)}, which holds nothing. Download it again.")
    return name, StoredTensor(kind.name, shape, offset, values // block * block_bytes)


class _Cursor:
    """Reads little-endian values in sequence, and never believes a length that the file cannot hold."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size, self.position, self.entries = stream, min(size, MOST_HEADER), 0, 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise EOFError(f"{count} bytes wanted at byte {self.position} of {self.size}")
        self.position += count
        return self.stream.read(count)

    def number(self, dtype: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        if length > MOST_STRING:
            raise EOFError(f"a text of {length} bytes at byte {self.position}")
        return self.take(length).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.number("<u4"), self.number("<u8")
            self.entries += count
            if self.entries > MOST_ENTRIES or depth == MOST_NESTED:
                raise EOFError(f"lists of {self.entries} entries, {depth + 1} deep, at byte {self.position}")
            if element in SCALARS:
                dtype = np.dtype(SCALARS[element])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return [self.value(element, depth + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise EOFError(f"unknown metadata type {kind} at byte {self.position}")
        return self.number(SCALARS[kind])
