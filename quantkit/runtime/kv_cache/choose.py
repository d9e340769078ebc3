"""Choice of the KV cache of a model, from its checkpoint and the options."""

from __future__ import annotations

import warnings

from quantkit.core.kvscheme import KVPlan, KVScales, KVScheme, bits_words
from quantkit.errors import QuantkitWarning, RequestError
from quantkit.formats.reader import QuantizedReader


def kv_plan(stored: KVPlan | None, bits: int | str | None, scales: KVScales | None) -> KVPlan:
    """Choose how the cache is kept, from what is stored and what is asked for.

    That is what is stored where it has the bits that are asked for, else a scheme without calibrated scales.

    stored: the checkpoint's KV-cache plan, None without one.
    bits: the option, None for what is stored.
    scales: the option, None for what is stored.

    Raises RequestError for unknown bits, for scales without anything to scale, and for static ones that are not stored.
    """
    if bits is None:
        if stored is None and scales is not None:
            raise RequestError(f"--kv-scales {scales} without --kv-bits: this checkpoint says nothing about its cache.")
        plan = stored or KVPlan()
    else:
        plan = KVPlan(KVScheme.of(bits, scales or "online"))
        if stored is not None and str(stored.label) == str(plan.label):
            plan = stored
    if scales == "static" and plan.quantized and plan.scheme.scales != "fp8" and not plan.static:
        raise RequestError(_no_static(stored, plan))
    if scales is not None and not plan.quantized:
        raise RequestError(
            f"--kv-scales {scales} has no effect on a KV cache of 16 bits. Leave it out, or give --kv-bits."
        )
    if scales is None or scales == plan.scheme.scales:
        return plan
    if "fp8" in (scales, plan.scheme.scales):
        raise RequestError(
            f"--kv-scales {scales} on a cache of {plan.label} bits with {plan.scheme.scales} scales: what is calibrated"
            " for integers does not serve fp8, nor the other way round. Convert again with the --kv-bits you want."
        )
    return plan.with_scales(scales)


def _no_static(stored: KVPlan | None, plan: KVPlan) -> str:
    asked = f"--kv-scales static with --kv-bits {plan.label}: "
    again = f"Convert with --kv-bits {plan.label}, or use --kv-scales online."
    if stored is None or not stored.static:
        return f"{asked}this checkpoint holds no static KV scales. {again}"
    if stored.scheme.scales == "fp8":
        return f"{asked}the scales that this checkpoint holds are those of an fp8 cache (--kv-bits fp8). {again}"
    return (
        f"{asked}the static KV scales of this checkpoint are for {bits_words(stored.label)}. Leave --kv-bits out to use"
        f" them. {again}"
    )


def tell_of_foreign_scales(reader: QuantizedReader, plan: KVPlan, stored: KVPlan | None) -> None:
    """Warn if a checkpoint of another tool holds the scales of an fp8 cache.

    quantkit reads those of its own file only.

    plan: of the cache that is used.
    stored: the checkpoint's own plan, None in those of other tools.
    """
    names = reader.cache_names()
    if names and stored is None and plan.kind != "fp8" and not plan.static:
        warnings.warn(
            f"{reader.source.path}: {len(names)} scales of an fp8 KV cache (first {names[0]}) are stored for other"
            f" engines and not read. The cache has {bits_words(plan.label)}; `quantkit convert --kv-bits fp8`"
            " calibrates one that quantkit reads too.",
            QuantkitWarning,
            stacklevel=3,
        )
