"""Write one GGUF file, a tensor at a time, through the ``gguf`` library's writer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.gguf_files.header import gguf_library, read_header
from quantkit.checkpoint.gguf_files.out_config import Field
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import CheckpointError

PIECE = 1 << 22  # bytes that are read back at a time


@dataclass(frozen=True, slots=True)
class OutTensor:
    """One tensor of the file.

    name: in the file. kind: the ggml type. shape: in torch's order, in weights.
    read: gives the values, packed ones as uint8 rows; called once, when their turn has come.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write_file(path: Path, architecture: str, fields: Mapping[str, Field], tensors: Sequence[OutTensor]) -> list[str]:
    """Write a file; return the sha256 of every tensor's bytes, in order.

    path: must not exist.
    architecture: llama.cpp's name. fields: metadata beside it.

    Raises CheckpointError if a tensor is not of the shape that was announced.
    """
    gguf = gguf_library()
    writer = gguf.GGUFWriter(path, architecture)
    for key, (kind, value) in fields.items():
        writer.add_key_value(key, value, gguf.GGUFValueType[kind])
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        width, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(tensor.shape)) // width * size
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    sums = []
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            raise_if_interrupted()
            data = _bytes(tensor.read())
            if data.nbytes != _nbytes(tensor, gguf):
                raise CheckpointError(f"{tensor.name}: {data.nbytes} bytes are no {tensor.kind} {list(tensor.shape)}")
            sums.append(hashlib.sha256(data.data).hexdigest())
            writer.write_tensor_data(data)
    finally:
        writer.close()
    return sums


def _nbytes(tensor: OutTensor, gguf: Any) -> int:
    width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    return int(np.prod(tensor.shape)) // int(width) * int(size)


def _bytes(value: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor, not copied where it is contiguous."""
    flat: np.ndarray[Any, Any] = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def verify_file(path: Path, tensors: Sequence[OutTensor], sums: Sequence[str]) -> int:
    """Read a written file and compare every tensor; return how many there are.

    tensors, sums: as ``write_file`` had and returned them.

    Raises CheckpointError, naming the tensor, for any difference.
    """
    table = read_header(path).tensors
    if list(table) != [tensor.name for tensor in tensors]:
        raise CheckpointError(f"{path.name}: the tensors read and written differ.")
    with path.open("rb") as stream:
        for tensor, expected in zip(tensors, sums, strict=True):
            entry, digest = table[tensor.name], hashlib.sha256()
            stream.seek(entry.offset)
            left = entry.nbytes
            while left:
                raise_if_interrupted()
                part = stream.read(min(left, PIECE))
                if not part:
                    break
                digest.update(part)
                left -= len(part)
            if (entry.kind, entry.shape, digest.hexdigest()) != (tensor.kind, tensor.shape, expected):
                raise CheckpointError(
                    f"{path.name}: {tensor.name} reads back different from what was written: the disk is at fault."
                )
    return len(tensors)
