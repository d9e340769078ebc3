"""One block of the model in memory at a time: loaded, used, released; the next one read beside the work on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantkit.convert.stages.device import release_memory
from quantkit.model.skeleton import Blocks
from quantkit.model.weights import Weights


class NextBlock:
    """Reads and unpacks the block after the one in work, in a thread: in its stored dtype, half of its float32 size.

    Used as a context manager: leaving it waits for what is still being read.

    beside: False reads nothing ahead, for a process that has one thread.
    """

    def __init__(self, weights: Weights, blocks: Blocks, beside: bool = True) -> None:
        self._weights, self._blocks, self._beside = weights, blocks, beside
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next-block")
        self._reading: tuple[int, Future[dict[str, Tensor]]] | None = None

    def __enter__(self) -> NextBlock:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process == os.getpid():
            self._pool.shutdown(cancel_futures=True)

    def take(self, index: int) -> Mapping[str, Tensor]:
        """Return the block's tensors if they were read ahead, else none; and begin to read the block after it.

        Raises what reading them raised.
        """
        if self._process != os.getpid():  # a fork has none of its parent's threads
            self._begin()
        found: Mapping[str, Tensor] = {}
        if self._reading is not None and self._reading[0] == index:
            found = self._reading[1].result()
        self._reading = None
        if self._beside and index + 1 < len(self._blocks):
            self._reading = index + 1, self._pool.submit(self._weights.read_module, self._blocks.name(index + 1))
        return found


@contextmanager
def loaded(
    weights: Weights, blocks: Blocks, index: int, device: torch.device, ahead: NextBlock | None = None
) -> Iterator[nn.Module]:
    """Hold the weights of a block on a device inside the ``with`` statement; yield the block.

    Afterwards the weights are released and their memory is free. After an error the block stays as it is: the job ends.

    weights: the source's tensors.
    blocks: the blocks of the model.
    index: the number of the block.
    device: where the weights are loaded to.
    ahead: what reads the next block meanwhile.

    Raises NumericsError for NaN or inf among the weights.
    """
    name = blocks.name(index)
    weights.load(name, device, {} if ahead is None else ahead.take(index))
    yield blocks.modules[index]
    weights.release(name)
    release_memory(device)
