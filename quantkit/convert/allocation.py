"""Bits chosen within a size, before anything is read: which weights go together, what each may get, and what every choice costs in bytes.

``--target-bpw`` and ``--target-size`` count what ``model_bits_per_weight`` counts: the bytes of all tensors that are written, and of the file of
the KV cache's scales; parameters with tied ones counted once. What rules name is fixed; the rest is chosen (``settle.py``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.convert.options import AUTO, ConvertOptions
from quantkit.convert.probe import TOKENS, WINDOWS, Unit
from quantkit.convert.rules import fused_groups
from quantkit.convert.targets import Target, Targets, second_copy
from quantkit.core.host import size_text
from quantkit.core.kvscheme import SCALE_NAMES, KVPlan, LayerScales
from quantkit.core.scheme import Scheme
from quantkit.formats import Format
from quantkit.formats.kv_scales import write_kv_plan
from quantkit.model.skeleton import Weights
from quantkit.runtime.attention import attention_modules, cached_heads

BITS = (2, 3, 4, 5, 6, 8)
SIZES = {
    4: (32, 64, 128),
    8: (128,),
}  # group sizes that are tried at some widths; finer ones cost more than a bit more would
USUAL_SIZES = (64, 128)


@dataclass(frozen=True)
class Allocation:
    """What is to be chosen. costs: bytes of each unit's options, as they are written. fixed: bytes of everything else. budget: bytes in
    all. asked: the option, as it is typed. format: the name of what is written."""

    asked: str
    budget: int
    parameters: int
    units: tuple[Unit, ...]
    costs: tuple[tuple[int, ...], ...]
    fixed: int
    format: str

    @property
    def least(self) -> int:
        return self.fixed + sum(min(costs) for costs in self.costs)

    @property
    def most(self) -> int:
        return self.fixed + sum(max(costs) for costs in self.costs)

    def bits(self, size: int) -> float:
        """Bits per weight of a checkpoint of that many bytes."""
        return 8 * size / self.parameters

    def problems(self) -> list[str]:
        """Why the target cannot be met."""
        if not self.units:
            return [f"{self.asked}: the rules decide about every weight, nothing is left to choose. Drop one of them."]
        if self.budget < self.least:
            return [
                f"{self.asked}: the least that is possible here is {self._said(self.least, self._range()[0], up=True)}. "
                f"Ask for more{'' if self.format == 'native' else ', or for --format native, which takes embedding and head to fewer bits, too (loads in quantkit and transformers only)'}."
            ]
        if self.budget > self.most:
            return [
                f"{self.asked}: the most that is possible here is {self._said(self.most, self._range()[1], up=False)}. Ask for less, or for fixed --bits."
            ]
        return []

    def _range(self) -> tuple[float, float]:
        """Bits per weight that can be asked for, to three digits, rounded inward."""
        return -(-self.bits(self.least) * 1000 // 1) / 1000, self.bits(self.most) * 1000 // 1 / 1000

    def _said(self, size: int, bits: float, up: bool) -> str:
        shown = _askable(size, up)
        return f"--target-bpw {bits:.3f} or --target-size {shown} ({size_text(self.fixed)} of it for tensors that are not quantized)"

    def describe(self, text: str) -> list[str]:
        """Lines of a plan for people. text: what is read for the measurement."""
        low, high = self._range()
        options = sum(len(unit.options) for unit in self.units)
        return [
            f"  target    {self.asked}: {size_text(self.budget)} for {self.parameters / 1e6:.1f} M parameters; from {low:.3f} to {high:.3f} bits "
            f"per weight are possible",
            f"  measures  {len(self.units)} groups of weights, {options} choices in all: what each does to the output, one pass forward and "
            f"one back on up to {WINDOWS} windows of {TOKENS} tokens of {text}, before anything is quantized",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.asked,
            "budget_bytes": self.budget,
            "parameters": self.parameters,
            "fixed_bytes": self.fixed,
            "least_bits_per_weight": round(self.bits(self.least), 5),
            "most_bits_per_weight": round(self.bits(self.most), 5),
            "groups": len(self.units),
        }


def plan_allocation(
    options: ConvertOptions, form: Format, weights: Weights, targets: Targets, fixed: int
) -> Allocation | None:
    """What is to be chosen, None without a target; what cannot be is added to ``targets.problems``. fixed: bytes that are written whatever
    is chosen, quantized weights excepted."""
    if not options.allocates:
        return None
    if form.uniform_groups:
        targets.problems.append(
            f"{options.target}: {form.name} holds one width for the whole model, nothing can be chosen. Use --format compressed-tensors, gptq or native."
        )
        return None
    parameters = sum(p.numel() for name, p in weights.parameters.items() if name not in weights.tied)
    budget = options.target_size if options.target_bpw is None else int(options.target_bpw * parameters / 8 + 1e-6)
    assert isinstance(budget, int)
    units, costs = [], []
    for members in _groups(form, targets):
        found = _choices(options, form, weights, members)
        if not found:
            targets.problems.append(
                f"{members[0][1].name}: {form.name} can hold it in none of the schemes that {options.target} chooses from."
            )
            continue
        units.append(Unit(tuple(name for name, _ in members), members[0][1].kind, tuple(scheme for scheme, _ in found)))
        costs.append(tuple(cost for _, cost in found))
    free = set(targets.free)
    fixed += sum(stored_bytes(form, target) for name, target in targets.chosen.items() if name not in free)
    allocation = Allocation(options.target, budget, parameters, tuple(units), tuple(costs), fixed, form.name)
    targets.problems += allocation.problems()
    return allocation


def stored_bytes(form: Format, target: Target) -> int:
    return form.stored_bytes(target.scheme, target.out_features, target.in_features)


def _groups(form: Format, targets: Targets) -> list[list[tuple[str, Target]]]:
    """Free weights that must share a scheme. Siblings of which a rule takes some but not all are a problem, but in the native format, where
    nothing is fused."""
    found: dict[str, list[tuple[str, Target]]] = {}
    ruled = {key for name, target in targets.chosen.items() if name not in targets.free for key in _keys(target.name)}
    ruled |= {key for name in targets.kept for key in _keys(name)}
    split: dict[str, str] = {}
    for name in targets.free:
        target = targets.chosen[name]
        keys = _keys(target.name)
        found.setdefault(keys[0] if keys else target.name, []).append((name, target))
        split |= {key: target.name for key in keys if key in ruled}
    if split and form.name != "native":
        first = next(iter(split.values()))
        more = f" and {len(split) - 1} more" if len(split) > 1 else ""
        targets.problems.append(
            f"{first}{more}: a rule takes some of the linears that engines run with it as one matrix, but not it. Give one rule for all of them."
        )
    return list(found.values())


def _keys(name: str) -> list[str]:
    return [f"{owner} {pattern}" for owner, pattern in fused_groups(name)]


def _askable(size: int, up: bool) -> str:
    """Bytes as ``--target-size`` takes them, in a unit that people read, to four digits or more, never less (up) or more (not up) than ``size``."""
    unit, name = next(((unit, name) for unit, name in ((10**9, "GB"), (10**6, "MB")) if size >= unit), (1000, "KB"))
    tick = unit // 1000 if size < 100 * unit else unit // 10
    ticks = -(-size // tick) if up else size // tick
    return f"{ticks * tick / unit:g}{name}"


def _choices(
    options: ConvertOptions, form: Format, weights: Weights, members: Sequence[tuple[str, Target]]
) -> list[tuple[Scheme | None, int]]:
    """Schemes that all members of a group can have, with what they cost; 16 bit for what lies outside the blocks."""
    found: dict[Scheme | None, int] = {}
    for bits in BITS:
        sizes: Any = SIZES.get(bits, USUAL_SIZES) if options.group_size == AUTO else (options.group_size,)
        for size in sizes:
            asked = replace(options.scheme, bits=bits, group_size=size)
            fitted = {form.group_size_for(asked, target.in_features) for _, target in members}
            if len(fitted) > 1 or (options.strict_groups and fitted != {size}):
                continue
            scheme = replace(asked, group_size=fitted.pop())
            if all(form.supports(scheme, target.out_features, target.in_features) is None for _, target in members):
                found[scheme] = sum(
                    form.stored_bytes(scheme, target.out_features, target.in_features) for _, target in members
                )
    if members[0][1].kind != "linear":
        found[None] = sum(kept_bytes(weights, target) for _, target in members)
    return list(found.items())


def cache_bytes(options: ConvertOptions, form: Format, model: Any) -> int:
    """Of the file with the scales of a quantized KV cache (its names and shapes decide them), and of scales for other engines."""
    asked = options.cache
    if not asked.wanted:
        return 0
    names = list(attention_modules(model).values())
    shape = (cached_heads(model.config), head_width(model.config))
    scales = {name: LayerScales(**{part: torch.ones(shape) for part in SCALE_NAMES}) for name in names}
    plan = KVPlan(asked.scheme, dict.fromkeys(names, asked.candidates()[0]), scales)
    with tempfile.TemporaryDirectory() as folder:
        size = write_kv_plan(Path(folder), plan).stat().st_size
    return size + (8 * len(names) if asked.scheme.label == "fp8" and form.holds_cache_scales else 0)


def head_width(config: Any) -> int:
    """Numbers of one head of keys or values."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kept_bytes(weights: Weights, target: Target) -> int:
    """Of a weight that stays as it is stored, and its second copy."""
    names = {weights.stored(target.parameter), second_copy(weights, target)} - {None}
    return sum(weights.source.info(name).nbytes for name in names if name is not None)


def chosen_targets(
    targets: Mapping[str, Target], units: Sequence[Unit], schemes: Sequence[Scheme | None]
) -> dict[str, Target]:
    """The targets with the schemes that were chosen; what stays at 16 bit is none."""
    decided = {name: scheme for unit, scheme in zip(units, schemes, strict=True) for name in unit.members}
    found = {}
    for name, target in targets.items():
        scheme = decided.get(name, target.scheme)
        if scheme is not None:
            found[name] = replace(target, scheme=scheme)
    return found
