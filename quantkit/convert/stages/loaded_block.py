"""One block of the model in memory at a time: loaded, used, released."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from quantkit.convert.stages.device import release_memory
from quantkit.model.skeleton import Blocks, Weights


@contextmanager
def loaded(weights: Weights, blocks: Blocks, index: int, device: torch.device) -> Iterator[nn.Module]:
    """Hold the weights of block ``index`` on ``device`` inside the ``with`` statement; yields the block.

    Behind it the weights are gone and their memory is free. An error passes through and leaves the block as it is: the
    job ends with it. Raises NumericsError for NaN or inf among the weights.
    """
    name = blocks.name(index)
    weights.load(name, device)
    yield blocks.modules[index]
    weights.release(name)
    release_memory(device)
