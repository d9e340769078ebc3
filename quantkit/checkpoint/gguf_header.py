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

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantkit.errors import MissingExtra, SourceError

SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the file. ``shape`` is in torch's order (rows first); ``offset`` counts from the file's start."""

    kind: str  # the name of the ggml type: "F32", "Q4_1", ...
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
        with path.open("rb") as stream:
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
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<u4"))
    table = [_entry(cursor, path) for _ in range(tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.position // alignment) * alignment
    found: dict[str, StoredTensor] = {}
    for name, tensor in table:
        end = start + tensor.offset + tensor.nbytes
        if end > size:
            raise SourceError(
                f"{path}: cut off: tensor {name!r} ends at byte {end}, the file has {size}. Download the file again."
            )
        if name in found:
            raise SourceError(f"{path}: holds two tensors named {name!r}. The file is damaged; download it again.")
        found[name] = StoredTensor(tensor.kind, tensor.shape, start + tensor.offset, tensor.nbytes)
    return Header(metadata, found)


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
    values = 1
    for extent in shape:
        values *= extent
    return name, StoredTensor(kind.name, shape, offset, values // block * block_bytes)


class _Cursor:
    """Reads little-endian values in sequence, and never believes a length that the file cannot hold."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self.stream, self.size, self.position = stream, size, 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise EOFError(f"{count} bytes wanted at byte {self.position} of {self.size}")
        self.position += count
        return self.stream.read(count)

    def number(self, dtype: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0].item()

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            element, count = self.number("<u4"), self.number("<u8")
            if element in SCALARS:
                dtype = np.dtype(SCALARS[element])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
            return [self.value(element) for _ in range(count)]
        if kind not in SCALARS:
            raise EOFError(f"unknown metadata type {kind} at byte {self.position}")
        return self.number(SCALARS[kind])
