"""The hidden states between two blocks, on disk: two files in turn, each with a checksum."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.storage.record import AGAIN, POSITIVE, SHA256, read_record, sync, write_record
from quantkit.checkpoint.storage.removal import remove
from quantkit.checkpoint.writer import disk
from quantkit.errors import WorkFolderError

# seconds of work between two writings: what a kill costs at most; blocks of small models take less than that
EVERY = 45.0
STATES = {"block": POSITIVE, "shapes": [[POSITIVE]], "sha256": SHA256}
SHARE = 20  # writing takes at most one part in 20 of the time


class StateStore:
    """Two files of hidden states: float32 ``[batch, tokens, hidden]``, one tensor per batch, stored as in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last, self._cost = time.monotonic(), 0.0

    def keep(self, block: int, states: list[Tensor]) -> bool:
        """Store the states in front of a block, and tell so, if enough time has gone by since the last ones.

        block: the number of the block.
        states: float32 [batch, tokens, hidden] each.
        """
        started = time.monotonic()
        if started - self._last < max(EVERY, SHARE * self._cost):
            return False
        self._write(block, states)
        self._last = time.monotonic()
        self._cost = self._last - started
        return True

    def latest(
        self, limit: int, fits: Callable[[list[torch.Size]], bool], above: int = 0
    ) -> tuple[int, list[Tensor]] | None:
        """Return the latest intact states in front of a block up to ``limit``, with the block's index; or None.

        limit: the highest number of a block.
        fits: tells whether states of such shapes are this job's.
        above: states in front of blocks up to this number do not count.

        Raises WorkFolderError for states that are not this job's.
        """
        records = [(record["block"], slot, record) for slot, record in self._records().items()]
        for block, slot, record in sorted(records, key=lambda entry: -entry[0]):
            if not above < block <= limit:
                continue
            shapes = [torch.Size(shape) for shape in record["shapes"]]
            if not fits(shapes):
                raise WorkFolderError(f"{self._record(slot)}: 'shapes' are not those of this job's states. {AGAIN}")
            states = self._read(slot, shapes, record["sha256"])
            if states is not None:
                return int(block), states
        return None

    def clear(self) -> None:
        """Remove the files of both slots."""
        for slot in (0, 1):
            remove(self._record(slot), self.folder)
            remove(self._file(slot), self.folder)

    def _file(self, slot: int) -> Path:
        return self.folder / f"states-{slot}.bin"

    def _record(self, slot: int) -> Path:
        return self.folder / f"states-{slot}.json"

    def _records(self) -> dict[int, dict[str, Any]]:
        records = {slot: read_record(self._record(slot), STATES) for slot in (0, 1)}
        return {slot: record for slot, record in records.items() if record is not None}

    def _write(self, block: int, states: list[Tensor]) -> None:
        """Write into the slot whose states are older; the other slot stays intact whatever happens."""
        blocks = {slot: record["block"] for slot, record in self._records().items()}
        slot = min((0, 1), key=lambda s: blocks.get(s, -1))
        digest = hashlib.sha256()
        with disk(self.folder):
            self._record(slot).unlink(missing_ok=True)
            with self._file(slot).open("wb") as file:
                for state in states:
                    data = _buffer(state)
                    digest.update(data)
                    file.write(data)
            sync(self._file(slot))
            shapes = [list(state.shape) for state in states]
            write_record(self._record(slot), {"block": block, "shapes": shapes, "sha256": digest.hexdigest()})

    def _read(self, slot: int, shapes: list[torch.Size], sha256: str) -> list[Tensor] | None:
        """Read a slot's states, None if the file is missing, short, or does not match its checksum."""
        digest = hashlib.sha256()
        states = []
        try:
            with self._file(slot).open("rb") as file:
                # before memory is taken for what the record promises
                if os.fstat(file.fileno()).st_size != 4 * sum(math.prod(shape) for shape in shapes):
                    return None
                for shape in shapes:
                    state = torch.empty(shape)
                    data = _buffer(state)
                    if file.readinto(data) != data.nbytes:
                        return None
                    digest.update(data)
                    states.append(state)
        except OSError:
            return None
        return states if digest.hexdigest() == sha256 else None


def _buffer(state: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous float32 tensor."""
    return memoryview(state.view(-1).numpy()).cast("B")  # type: ignore[arg-type]
