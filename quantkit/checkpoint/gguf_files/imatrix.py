"""llama.cpp's importance matrix as a GGUF file: for each weight the sum of its inputs' squares, and how many they were.

::

    general.type = "imatrix", imatrix.datasets (strings), imatrix.chunk_count, imatrix.chunk_size (u32)
    <tensor>.in_sum2   F32 [matrices, in]     sums of squares, one row an expert (one row for other weights)
    <tensor>.counts    F32 [matrices, 1]      inputs that were summed

``<tensor>`` is the weight's name in a GGUF file, ``blk.0.attn_q.weight``. Source: llama.cpp, tools/imatrix/README.md
and common/imatrix-loader.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.foreign_files.fields import shown
from quantkit.checkpoint.gguf_files.header import StoredTensor, read_header
from quantkit.checkpoint.gguf_files.out_config import Field
from quantkit.checkpoint.gguf_files.out_file import OutTensor, write_file
from quantkit.checkpoint.writer import disk
from quantkit.errors import RequestError, SourceError

SUMS, COUNTS = ".in_sum2", ".counts"
MOST_INPUTS, MOST_MATRICES = 1 << 20, 1 << 12
AGAIN = "Make it again with `quantkit imatrix` or llama-imatrix."


@dataclass(frozen=True, slots=True)
class Importance:
    """What one weight's inputs were.

    sums: float32 ``[matrices, in]``, of squares. counts: float32 ``[matrices]``.
    """

    sums: Tensor
    counts: Tensor

    def mean(self, matrix: int = 0) -> Tensor | None:
        """Return the mean square of each input of one matrix, float32 ``[in]``; None if none was seen."""
        count = float(self.counts[matrix])
        return self.sums[matrix] / count if count > 0 else None


def read_imatrix(path: Path) -> dict[str, Importance]:
    """Read an importance matrix, by the names of weights in GGUF files.

    Raises SourceError, naming the file and the entry, for one that is damaged, or none at all.
    """
    try:
        header = read_header(path)
    except SourceError as error:
        if path.suffix != ".dat":
            raise
        raise SourceError(
            f"{path}: no GGUF file. llama.cpp's old importance matrices (.dat) are not read: `quantkit imatrix` makes"
            " one in GGUF, and so does today's llama-imatrix."
        ) from error
    kind = header.metadata.get("general.type")
    if kind != "imatrix":
        raise SourceError(f"{path}: general.type is {shown(kind)}: not an importance matrix. {AGAIN}")
    found: dict[str, Importance] = {}
    for name, entry in header.tensors.items():
        if name.endswith(COUNTS) and name.removesuffix(COUNTS) + SUMS in header.tensors:
            continue
        if not name.endswith(SUMS):
            if name.endswith(".in_sum"):
                continue  # plain sums, which newer versions add
            raise SourceError(f"{path}: tensor {shown(name)} belongs to no importance matrix. {AGAIN}")
        weight = name.removesuffix(SUMS)
        count = header.tensors.get(weight + COUNTS)
        if count is None:
            raise SourceError(f"{path}: {shown(weight)} has sums without counts. {AGAIN}")
        found[weight] = _entry(path, weight, entry, count)
    if not found:
        raise SourceError(f"{path}: holds no entry. {AGAIN}")
    return found


def _entry(path: Path, weight: str, sums: StoredTensor, counts: StoredTensor) -> Importance:
    """Read and check one entry."""
    matrices, inputs = (sums.shape if len(sums.shape) == 2 else (1, *sums.shape))[-2:]
    fits = len(sums.shape) <= 2 and int(np.prod(counts.shape)) == matrices
    if not fits or not 1 <= matrices <= MOST_MATRICES or not 1 <= inputs <= MOST_INPUTS:
        raise SourceError(
            f"{path}: {shown(weight)} has sums {list(sums.shape)} and counts {list(counts.shape)}, which do not go"
            f" together. {AGAIN}"
        )
    values = []
    for entry, what in ((sums, "sums"), (counts, "counts")):
        if entry.kind != "F32":
            raise SourceError(f"{path}: {what} of {shown(weight)} are {entry.kind}, expected F32. {AGAIN}")
        raw = np.fromfile(path, "<f4", entry.nbytes // 4, offset=entry.offset)
        if raw.size * 4 != entry.nbytes or not bool((np.isfinite(raw) & (raw >= 0)).all()):
            raise SourceError(f"{path}: {what} of {shown(weight)} hold numbers that are no sums of squares. {AGAIN}")
        values.append(torch.from_numpy(raw))
    return Importance(values[0].reshape(matrices, inputs), values[1])


def write_imatrix(path: Path, entries: Mapping[str, Importance], dataset: str, chunks: int, chunk_size: int) -> None:
    """Write an importance matrix; the file appears under its name when it is complete.

    entries: by the names of weights in GGUF files. dataset: the text's name. chunks, chunk_size: windows, and tokens of
    each.

    Raises RequestError if the file exists.
    """
    if path.exists():
        raise RequestError(f"{path}: exists already. Choose another name, or remove it.")
    fields: dict[str, Field] = {
        "general.type": ("STRING", "imatrix"),
        "imatrix.datasets": ("ARRAY", [dataset]),
        "imatrix.chunk_count": ("UINT32", chunks),
        "imatrix.chunk_size": ("UINT32", chunk_size),
    }
    tensors = []
    for name, entry in sorted(entries.items()):
        for ending, value in ((SUMS, entry.sums), (COUNTS, entry.counts[:, None])):
            held = value.float().contiguous()
            tensors.append(OutTensor(name + ending, "F32", tuple(held.shape), held.clone))
    partial = path.with_name(f".{path.name}.partial")
    with disk(path.parent):
        try:
            write_file(partial, "", fields, tensors)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
