"""Tensors that are written some at a time."""

from __future__ import annotations

from torch import Tensor

from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.convert.repack.memory import PART_BYTES
from quantkit.core.host import release_free_memory


class Batch:
    """Collects tensors into parts of about PART_BYTES."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer, self.tensors, self.size, self.parts = writer, dict[str, Tensor](), 0, 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Take some more, and write all if they are many."""
        self.tensors.update(tensors)
        self.size += sum(tensor.nbytes for tensor in tensors.values())
        if self.size >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is there."""
        if self.tensors:
            self.writer.add_part(f"repack-{self.parts:05d}", self.tensors)
        self.tensors, self.size, self.parts = {}, 0, self.parts + 1
        release_free_memory()
