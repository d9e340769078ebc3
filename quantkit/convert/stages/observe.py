"""The observing stage of the loop: statistics of every input of the block's linears, and its KV cache's ranges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quantkit.algorithms.guide import Guide
from quantkit.algorithms.kv import KVObserver
from quantkit.calibrate.capture import observe
from quantkit.calibrate.experts import share_statistics
from quantkit.calibrate.stats import Hessian
from quantkit.convert.options.kv_request import CacheRequest
from quantkit.convert.results import BlockResult, InputGroup
from quantkit.convert.stages.kv_cache import calibrate_layer
from quantkit.model.arguments import BlockArguments


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
    correlations: bool,
    guide: Guide | None,
    cache: tuple[CacheRequest, str] | None,
) -> list[InputGroup]:
    """Collect the statistics of every input of a linear to quantize, in one pass over the calibration text.

    prefix: the block's module name in the model.
    block: float32 weights on the device.
    names: groups of linears that read one tensor, by names inside the block.
    states: in front of the block, float32 [windows, tokens, hidden] each.
    call: the block's arguments for a batch.
    result: gets the KV cache's ranges and notes.
    original: the original model's states in front of the block; the pass replaces them by those behind it.
    crossed: collect the mean of (y - x) xᵀ too, x an input and y the original model's in its place
        (``InputGroup.cross``).
    correlations: the method reads correlations between inputs.
    guide: predicts token-importance weights from the hidden state; None to count all tokens alike.
    cache: scheme of the KV cache and the name of the attention module to calibrate in the same pass; None for neither.

    Raises NumericsError if the statistics of an input or of the KV cache are not finite.
    """
    if not names and cache is None and not original:
        return []
    observer = None if cache is None else KVObserver()
    hessians = observe(block, states, call, list(names), observer, original, crossed, guide, correlations=correlations)
    if cache is not None and observer is not None:
        request, name = cache
        result.kv[name] = calibrate_layer(request, name, observer, block, states, call, result.notes)
    tokens = [hessian.tokens for hessian in hessians]
    result.notes += [f"{prefix}.{shared.describe()}" for shared in share_statistics(block, list(names), hessians)]
    groups = []
    for group, count in zip(names, tokens, strict=True):  # each sum is freed as soon as its mean is taken
        seen = hessians.pop(0)
        found = seen.result(f"{prefix}.{group[0]}") if seen.tokens + seen.dropped else None
        if isinstance(seen, Hessian):
            groups.append(InputGroup(group, found, count, seen.dropped, seen.largest, seen.mean_cross()))
        else:
            groups.append(InputGroup(group, None, count, seen.dropped, seen.largest, root=found))
    return groups


def observe_cache(
    request: CacheRequest, name: str, block: nn.Module, states: list[Tensor], call: BlockArguments, result: BlockResult
) -> None:
    """Find the ranges of one layer's keys and values in a pass of their own.

    request: scheme and budget of the KV cache.
    name: the attention module's name in the model.
    block: float32 weights on the device.
    states: in front of the block, float32 [windows, tokens, hidden] each.
    call: the block's arguments for a batch.
    result: gets the ranges and notes.

    Raises NumericsError if there are no finite keys and values.
    """
    observer = KVObserver()
    observe(block, states, call, [], observer)
    result.kv[name] = calibrate_layer(request, name, observer, block, states, call, result.notes)
