"""The KV cache in a conversion: statistics layer by layer, then the plan that is stored.

A budget gives each layer bits for its keys and for its values: of the widths in ``BUDGET_BITS``, those with the least total damage whose
average is within the budget. Damage is what rounding one side of one layer's cache does to that layer's block (``calibrate.cache_damage``); sums of it
are compared, which takes the layers for independent.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.algorithms.allocate import allocate
from quantkit.algorithms.kv import KVObserver, LayerRanges, Range, as_cached
from quantkit.calibrate.cache_damage import NEWEST, cache_damage
from quantkit.core.kvscheme import PAGE_TOKENS, KVPlan, KVScheme, Scales, bits_words
from quantkit.errors import NumericsError, RequestError
from quantkit.model.stepper import Call

BUDGET_BITS = (8, 4, 3, 2)
BUDGET_TOKENS = (
    128 + NEWEST + PAGE_TOKENS
)  # shortest window in which 2-bit keys are packed for the queries that are compared


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What was asked for: one scheme for all layers, or a budget of bits on average. Raises RequestError for a budget out of range."""

    scheme: KVScheme
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not min(BUDGET_BITS) <= self.budget <= max(BUDGET_BITS):
            raise RequestError(
                f"--kv-budget {self.budget:g}: bits of a key or value on average, from {min(BUDGET_BITS)} to {max(BUDGET_BITS)}."
            )

    @property
    def wanted(self) -> bool:
        """True if a cache is calibrated at all."""
        return self.scheme.quantized or self.budget is not None

    def words(self) -> str:
        """For people: ``KV cache 4 bits``."""
        if self.budget is not None:
            return f"KV cache within {self.budget:g} bits on average"
        return label_words(self.scheme.label)

    def candidates(self) -> list[KVScheme]:
        """Schemes whose ranges are calibrated."""
        if self.budget is None:
            return [self.scheme]
        return [KVScheme.of(bits, self.scheme.scales) for bits in BUDGET_BITS]

    def check_windows(self, seq_len: int) -> None:
        """Raises RequestError for calibration windows too short to say anything."""
        shortest = BUDGET_TOKENS if self.budget is not None else self.scheme.first + 1
        if self.wanted and seq_len < shortest:
            what = f"--kv-budget {self.budget:g}" if self.budget is not None else f"--kv-bits {self.scheme.label}"
            raise RequestError(
                f"--seq-len {seq_len} with {what}: its windows hold no token that the cache would round. Use {shortest} or more."
            )

    def finish(
        self, name: str, observer: KVObserver, block: nn.Module, states: Sequence[Tensor], call: Call, notes: list[str]
    ) -> LayerRanges:
        """One layer's ranges, and with a budget what each width costs (the block runs again, once per width and side)."""
        try:
            ranges = observer.ranges(self.candidates())
        except NumericsError as error:
            raise NumericsError(f"{name}: {error}") from error
        if observer.dropped:
            notes.append(
                f"{name}: {observer.dropped} tokens with NaN or infinite keys or values are left out of the KV scales"
            )
        if self.budget is None:
            return ranges
        found: list[dict[int, float]] = []
        for words in ("k{}v16", "k16v{}"):
            schemes = [KVScheme.of(words.format(bits), self.scheme.scales) for bits in BUDGET_BITS]
            scales = [None if scheme.scales == "online" else ranges.scales(scheme) for scheme in schemes]
            trials = [
                partial(as_cached, scheme=scheme, static=static, behind=NEWEST - 1)
                for scheme, static in zip(schemes, scales, strict=True)
            ]
            found.append(dict(zip(BUDGET_BITS, cache_damage(block, states, call, trials), strict=True)))
        return LayerRanges(ranges.keys, ranges.values, *found)

    def decide(self, layers: Mapping[str, LayerRanges]) -> KVPlan:
        """The plan that is stored; with a budget, the best one within it."""
        if self.budget is None:
            schemes = dict.fromkeys(layers, self.scheme)
        else:
            bits = allocate(
                [side for one in layers.values() for side in (one.key_damage, one.value_damage)], self.budget
            )
            schemes = {
                name: KVScheme.of(f"k{bits[2 * i]}v{bits[2 * i + 1]}", self.scheme.scales)
                for i, name in enumerate(layers)
            }
        scheme = self.scheme if self.budget is None else most_common(list(schemes.values()))
        return KVPlan(scheme, schemes, {name: one.scales(schemes[name]) for name, one in layers.items()})


def request(bits: int | str, scales: Scales, budget: float | None) -> CacheRequest:
    """From the options. Raises RequestError for what cannot be."""
    if scales not in ("online", "static"):
        raise RequestError(f"--kv-scales {scales}: online (each page its own) or static (calibrated).")
    if budget is not None and str(bits) != "16":
        raise RequestError(
            f"--kv-bits {bits} with --kv-budget {budget:g}: the budget chooses the bits. Leave one of them out."
        )
    return CacheRequest(KVScheme.of(16 if budget is not None else bits, scales), budget)


def label_words(label: int | str) -> str:
    """What a report says of a cache: ``KV cache 4 bits``, ``KV cache k4v2``, ``KV cache fp8``."""
    return f"KV cache {bits_words(label)}"


def engine_scales(plan: KVPlan, stored: Mapping[str, str]) -> dict[str, Tensor]:
    """The scales of an fp8 cache under the names that other engines read: float32 ``[1]`` each, beside the module's projections.

    stored: parameter name -> its name in the checkpoint.
    """
    found = {}
    for name, scales in plan.static.items():
        parameter = next(one for one in stored if one.startswith(f"{name}."))
        place = stored[parameter].removesuffix(parameter.removeprefix(name))
        found[f"{place}.k_scale"] = scales.k_scale.flatten()[:1].clone()
        found[f"{place}.v_scale"] = scales.v_scale.flatten()[:1].clone()
    return found


def most_common(schemes: Sequence[KVScheme]) -> KVScheme:
    return max(schemes, key=lambda scheme: (schemes.count(scheme), scheme.keys + scheme.values))


def average_bits(plan: KVPlan) -> tuple[float, float]:
    """Bits of a number on average over keys and values of all layers: of codes, and with the scales of its page. A plan as convert
    stores it, with the scales of every layer (they tell heads and head_dim)."""
    codes = stored = 0.0
    for name, scheme in plan.layers.items():
        heads, head_dim = plan.static[name].k_scale.shape
        codes += (scheme.keys + scheme.values) / 2
        stored += 8 * scheme.bytes_per_token(heads, head_dim, torch.float16) / (2 * heads * head_dim)
    count = max(len(plan.layers), 1)
    return round(codes / count, 4), round(stored / count, 4)


def summary(plan: KVPlan, layers: Mapping[str, LayerRanges], budget: float | None) -> dict[str, Any]:
    """For report, JSON and manifest. code_bits: of a number; stored_bits: with the scales of its page. Averages over keys and values of all layers."""
    codes, stored = average_bits(plan)
    rows = []
    for name, scheme in plan.layers.items():
        row: dict[str, Any] = {"name": name, "keys": scheme.keys, "values": scheme.values}
        if layers[name].key_damage:
            row["damage"] = {
                side: {str(bits): float(f"{cost:.4g}") for bits, cost in found.items()}
                for side, found in (("keys", layers[name].key_damage), ("values", layers[name].value_damage))
            }
        rows.append(row)
    return {
        "bits": plan.label,
        "scales": plan.scheme.scales,
        "budget": budget,
        "code_bits": codes,
        "stored_bits": stored,
        "layers": rows,
    }


def summary_lines(found: Mapping[str, Any]) -> list[str]:
    """A line for people; with a budget also the table of layers, alike ones together."""
    lines = [
        f"  cache     {found['scales']} scales, {found['code_bits']:.2f} bits a number, {found['stored_bits']:.2f} with scales"
        + (f" (budget {found['budget']:g})" if found["budget"] is not None else "")
    ]
    if found["budget"] is None:
        return lines
    rows = found["layers"]
    lines.append("            layer      keys values   damage of keys, values")
    for i, row in enumerate(rows):
        cost = (row["damage"][side][str(row[side])] for side in ("keys", "values"))
        shown = "  ".join(f"{value:.1e}" for value in cost)
        lines.append(f"            {i:<10d} {row['keys']:4d} {row['values']:6d}   {shown}")
    return lines


def to_record(ranges: LayerRanges) -> dict[str, Any]:
    """JSON that ``from_record`` reads back, to the bit."""
    return {
        "keys": {str(bits): [_text(part) for part in one] for bits, one in ranges.keys.items()},
        "values": {str(bits): [_text(part) for part in one] for bits, one in ranges.values.items()},
        "damage": [{str(bits): cost for bits, cost in one.items()} for one in (ranges.key_damage, ranges.value_damage)],
    }


def from_record(stored: Mapping[str, Any]) -> LayerRanges:
    """Undo ``to_record``."""

    def side(found: Mapping[str, Any]) -> dict[int, Range]:
        return {int(bits): (_tensor(one[0]), _tensor(one[1])) for bits, one in found.items()}

    damage = [{int(bits): float(cost) for bits, cost in one.items()} for one in stored["damage"]]
    return LayerRanges(side(stored["keys"]), side(stored["values"]), *damage)


def _text(value: Tensor) -> list[Any]:
    return [list(value.shape), base64.b64encode(value.numpy().tobytes()).decode()]


def _tensor(stored: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(stored[1]), dtype=np.float32).copy()).reshape(stored[0])
