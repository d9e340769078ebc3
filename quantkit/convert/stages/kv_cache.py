"""KV-cache calibration: the ranges of one layer after the other, then the bits of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from quantkit.algorithms.allocate import allocate
from quantkit.algorithms.kv import KVObserver, LayerRanges, as_cached
from quantkit.calibrate.cache_sensitivity import NEWEST, cache_sensitivity
from quantkit.convert.options.kv_request import BUDGET_BITS, CacheRequest
from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.errors import NumericsError
from quantkit.model.arguments import BlockArguments


def calibrate_layer(
    request: CacheRequest,
    name: str,
    observer: KVObserver,
    block: nn.Module,
    states: Sequence[Tensor],
    call: BlockArguments,
    notes: list[str],
) -> LayerRanges:
    """Return one layer's ranges, and with a budget the sensitivity to each bit width.

    With a budget the block runs again, once per bit width and side (keys or values).

    request: scheme and budget of the KV cache.
    name: the attention module's name in the model.
    observer: has seen the layer's keys and values.
    block: the block with the attention module.
    states: in front of the block, float32 [windows, tokens, hidden] each.
    call: the block's arguments for a batch.
    notes: gets a note on tokens that were dropped.

    Raises NumericsError if the observer has no finite keys and values.
    """
    try:
        ranges = observer.ranges(request.candidates())
    except NumericsError as error:
        raise NumericsError(f"{name}: {error}") from error
    if observer.dropped:
        notes.append(
            f"{name}: {observer.dropped} tokens with NaN or infinite keys or values are left out of the KV scales"
        )
    if request.budget is None:
        return ranges
    costs: list[dict[int, float]] = []
    for words in ("k{}v16", "k16v{}"):
        schemes = [KVScheme.of(words.format(bits), request.scheme.scales) for bits in BUDGET_BITS]
        scales = [None if scheme.scales == "online" else ranges.scales(scheme) for scheme in schemes]
        trials = [
            partial(as_cached, scheme=scheme, static=static, behind=NEWEST - 1)
            for scheme, static in zip(schemes, scales, strict=True)
        ]
        costs.append(dict(zip(BUDGET_BITS, cache_sensitivity(block, states, call, trials), strict=True)))
    return LayerRanges(ranges.keys, ranges.values, *costs)


def decide_cache(request: CacheRequest, layers: Mapping[str, LayerRanges]) -> KVPlan:
    """Return the KV-cache plan that is stored; with a budget, the best one within it.

    request: scheme and budget of the KV cache.
    layers: ranges by name of the attention module.
    """
    if request.budget is None:
        schemes = dict.fromkeys(layers, request.scheme)
    else:
        bits = allocate(
            [side for ranges in layers.values() for side in (ranges.key_sensitivity, ranges.value_sensitivity)],
            request.budget,
        )
        schemes = {
            name: KVScheme.of(f"k{bits[2 * i]}v{bits[2 * i + 1]}", request.scheme.scales)
            for i, name in enumerate(layers)
        }
    scheme = request.scheme if request.budget is None else most_common(list(schemes.values()))
    return KVPlan(scheme, schemes, {name: ranges.scales(schemes[name]) for name, ranges in layers.items()})


def most_common(schemes: Sequence[KVScheme]) -> KVScheme:
    """Return the scheme of most layers; of equally common ones that with most bits."""
    return max(schemes, key=lambda scheme: (schemes.count(scheme), scheme.keys + scheme.values))


def engine_scales(plan: KVPlan, stored: Mapping[str, str]) -> dict[str, Tensor]:
    """Name the scales of an fp8 cache as other engines read them: float32 ``[1]`` each, beside the projections.

    plan: the KV-cache plan with the scales of each layer.
    stored: parameter name -> its name in the checkpoint.
    """
    tensors = {}
    for name, scales in plan.static.items():
        parameter = next(entry for entry in stored if entry.startswith(f"{name}."))
        place = stored[parameter].removesuffix(parameter.removeprefix(name))
        tensors[f"{place}.k_scale"] = scales.k_scale.flatten()[:1].clone()
        tensors[f"{place}.v_scale"] = scales.v_scale.flatten()[:1].clone()
    return tensors
