"""Check that every weight is finite before hours are spent.

A NaN in the last block would otherwise be found only after the work on all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quantkit.checkpoint.source import Source, non_finite
from quantkit.model.rotate import RotatedSource
from quantkit.model.weights import Weights

AT_ONCE = 1 << 22  # weights: the temporaries of a whole embedding would be more than it


def refuse_non_finite(weights: Weights, listen: Callable[[int, int], None]) -> None:
    """Read every weight of the model once, and refuse NaN and infinite values.

    One tensor is in memory at a time; of fused experts, one expert.

    weights: the source's tensors, by parameter of the skeleton.
    listen: called with the number of tensors done and of all tensors.

    Raises NumericsError, naming every tensor that holds NaN or infinite values.
    """
    source = weights.source
    if isinstance(source, RotatedSource):
        source = source.original  # as stored: rotating takes longer than reading
    stored = set(source.names())
    names = sorted({name for ref in weights.sources.values() for name in (ref.joined or (ref.name,))} & stored)
    entries = {ref.name for ref in weights.sources.values() if ref.index is not None}
    bad = []
    for done, name in enumerate(names):
        listen(done, len(names))
        pieces = (part for value in _pieces(source, name, name in entries) for part in value.flatten().split(AT_ONCE))
        if not all(bool(torch.isfinite(part).all()) for part in pieces):
            bad.append(name)
    listen(len(names), len(names))
    if bad:
        raise non_finite(source.path, bad)


def _pieces(source: Source, name: str, entries: bool) -> Iterator[Tensor]:
    if not entries or len(source.info(name).shape) < 3:
        yield source.read(name)
        return
    for index in range(source.info(name).shape[0]):
        yield source.read_entry(name, index)
