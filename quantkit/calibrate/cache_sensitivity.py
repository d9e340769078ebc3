"""Measure what rounding one layer's KV cache does to that layer's block: the sensitivity behind bits by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibrate.capture import device_of, with_cache
from quantkit.calibrate.transfer import Shuttle
from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.model.arguments import BlockArguments
from quantkit.model.stepper import run_block

NEWEST = PAGE_TOKENS  # queries per window that are compared: the cache has the same packed pages for nearly all of them
MOST_TOKENS = 8192  # of calibration text that are looked at


CacheRounding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values, as a cache gives them back


class _RoundingCache:
    """Stands in for the KV cache: gives keys and values back rounded."""

    def __init__(self, rounding: CacheRounding) -> None:
        self.rounding = rounding

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.rounding(keys, values)


@torch.no_grad()
def cache_sensitivity(
    block: nn.Module, states: Sequence[Tensor], call: BlockArguments, roundings: Sequence[CacheRounding]
) -> list[float]:
    """Measure the relative squared change of the block's output, for each rounding, over the newest tokens of windows.

    Squared change over the output's square, token by token, averaged. The residual stream is part of that output: a
    layer whose attention adds little to it can have a poor cache. Tokens whose output is not finite are left out.

    states: float32 ``[batch, tokens, hidden]`` each, unpadded windows; the first MOST_TOKENS of them are used.
    """
    used = _first_states(states)
    sums, tokens = [0.0] * len(roundings), 0
    for index, hidden in enumerate(Shuttle(used, device_of(block)).arriving()):
        own = call.of(index)
        exact = run_block(block, hidden, own)[:, -NEWEST:].double()
        size = exact.square().sum(-1)
        valid = torch.isfinite(size) & (size > 0)
        tokens += int(valid.sum())
        for i, rounding in enumerate(roundings):
            rounded = run_block(block, hidden, with_cache(block, own, _RoundingCache(rounding)))
            change = (rounded[:, -NEWEST:].double() - exact).square().sum(-1)
            sums[i] += float((change / size)[valid].sum())
    return [total / max(tokens, 1) for total in sums]


def _first_states(states: Sequence[Tensor]) -> list[Tensor]:
    taken: list[Tensor] = []
    left = MOST_TOKENS
    for state in states:
        windows = min(len(state), max(left // state.shape[1], 0 if taken else 1))
        if not windows:
            break
        taken.append(state[:windows])
        left -= windows * state.shape[1]
    return taken
