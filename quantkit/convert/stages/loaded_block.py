"""One block of the model in memory at a time: loaded, used, released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quantkit.convert.stages.device import release_memory
from quantkit.model.skeleton import Blocks
from quantkit.model.weights import Weights


@contextmanager
def loaded(weights: Weights, blocks: Blocks, index: int, device: torch.device) -> Iterator[nn.Module]:
    """Hold the weights of a block on a device inside the ``with`` statement; yield the block.

    Afterwards the weights are released and their memory is free. After an error the block stays as it is: the job ends.

    weights: the source's tensors.
    blocks: the blocks of the model.
    index: the number of the block.
    device: where the weights are loaded to.

    Raises NumericsError for NaN or inf among the weights.
    """
    name = blocks.name(index)
    weights.load(name, device)
    yield blocks.modules[index]
    weights.release(name)
    release_memory(device)
