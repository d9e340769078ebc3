"""The observing stage of the loop.

What is known about each tensor that linears of a block read, and its KV cache's ranges.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quantkit.algorithms.guide import Guide
from quantkit.algorithms.kv import KVObserver
from quantkit.calibrate.capture import observe
from quantkit.calibrate.experts import share_statistics
from quantkit.convert.options.kv_request import CacheRequest
from quantkit.convert.results import BlockResult, InputGroup
from quantkit.convert.stages.kv_cache import calibrate_layer
from quantkit.model.stepper import BlockArguments


def observe_block(
    prefix: str,
    block: nn.Module,
    names: Sequence[tuple[str, ...]],
    states: list[Tensor],
    call: BlockArguments,
    result: BlockResult,
    *,
    original: list[Tensor],
    crossed: bool,
    guide: Guide | None,
    cache: tuple[CacheRequest, str] | None,
) -> list[InputGroup]:
    """Collect the statistics of every input of a linear to quantize, in one pass over the calibration text.

    prefix: the block's name in the model. names: linears that read one tensor, by names inside the block. states: in
    front of the block. original: the states that the original model has there; the pass replaces them by those behind
    the block. crossed: collect how the two go together. guide: importance weights of tokens. cache: what is asked
    for the KV cache, and the name of the attention module whose ranges are found in the same pass.
    """
    if not names and cache is None and not original:
        return []
    observer = None if cache is None else KVObserver()
    hessians = observe(block, states, call, list(names), observer, original, crossed, guide)
    if cache is not None and observer is not None:
        request, name = cache
        result.kv[name] = calibrate_layer(request, name, observer, block, states, call, result.notes)
    tokens = [hessian.tokens for hessian in hessians]
    result.notes += [f"{prefix}.{shared.describe()}" for shared in share_statistics(block, list(names), hessians)]
    groups = []
    for group, count in zip(names, tokens, strict=True):  # each sum is freed as soon as its mean is taken
        hessian = hessians.pop(0)
        mean = hessian.result(f"{prefix}.{group[0]}") if hessian.tokens + hessian.dropped else None
        groups.append(InputGroup(group, mean, count, hessian.dropped, hessian.largest, hessian.mean_cross()))
    return groups


def observe_cache(
    request: CacheRequest, name: str, block: nn.Module, states: list[Tensor], call: BlockArguments, result: BlockResult
) -> None:
    """Find the ranges of one layer's keys and values in a pass of their own. name: of the attention module."""
    observer = KVObserver()
    observe(block, states, call, [], observer)
    result.kv[name] = calibrate_layer(request, name, observer, block, states, call, result.notes)
