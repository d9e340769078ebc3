"""The bit budget: which weights share a scheme, which schemes each may get, and what every choice costs in bytes.

It is planned before any weight is read.
``--target-bpw`` and ``--target-size`` count what ``model_bits_per_weight`` counts: the bytes of all tensors that are
written, and of the file of the KV cache's scales; parameters with tied ones counted once. What rules name is fixed; the
rest is chosen (``stages/decide.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantkit.algorithms.allocate import Choices, Option
from quantkit.convert.gguf.choices import by_tensor, possible_kinds
from quantkit.convert.gguf.types import alike
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.options.presets import AUTO
from quantkit.convert.options.rules import fused_groups
from quantkit.convert.plan.mtp_layers import matrices_without_module
from quantkit.convert.plan.targets import Target, Targets, second_copy
from quantkit.convert.results import TOKENS, WINDOWS, Unit, Way
from quantkit.core.blocks import BlockKind, block_kind
from quantkit.core.host import size_text
from quantkit.core.kvscheme import SCALE_NAMES, KVPlan, LayerScales
from quantkit.formats.interface import Format
from quantkit.formats.kv_scales import kv_plan_bytes
from quantkit.model.attention_shape import cached_kv_heads, head_dim
from quantkit.model.language import text_config
from quantkit.model.weights import Weights
from quantkit.runtime.kv_cache.transformers_cache import attention_modules

BITS = (2, 3, 4, 5, 6, 8)
# group sizes that are tried at some widths in bits; finer ones cost more than a bit more would
SIZES = {4: (32, 64, 128), 8: (128,)}
# group sizes that are tried at all other widths
USUAL_SIZES = (64, 128)

NATIVE_GOES_LOWER = (
    ", or for --format native, which takes embedding and head to fewer bits, too"
    " (loads in quantkit and transformers only)"
)


@dataclass(frozen=True)
class BitBudget:
    """A size for the whole checkpoint, and the options to choose from within it.

    asked: the option, as it is typed.
    budget: bytes in all.
    parameters: how many the model has, tied ones counted once.
    costs: bytes of each unit's options, as they are written.
    fixed: bytes of everything else.
    format: the name of the format that is written.
    """

    asked: str
    budget: int
    parameters: int
    units: tuple[Unit, ...]
    costs: tuple[tuple[int, ...], ...]
    fixed: int
    format: str

    @property
    def least(self) -> int:
        """Return the bytes of the smallest checkpoint that can be chosen."""
        return self.fixed + sum(min(costs) for costs in self.costs)

    @property
    def most(self) -> int:
        """Return the bytes of the largest checkpoint that can be chosen."""
        return self.fixed + sum(max(costs) for costs in self.costs)

    def choices(self, sensitivity: Sequence[Sequence[float]]) -> Choices:
        """Return what each option of each unit costs in bytes, and in nats of KL divergence per token.

        sensitivity: by unit and option, in nats per token.
        """
        return Choices(
            [
                [Option(cost, kl) for cost, kl in zip(costs, sensitivities, strict=True)]
                for costs, sensitivities in zip(self.costs, sensitivity, strict=True)
            ]
        )

    def bits(self, size: int) -> float:
        """Return the bits per weight of a checkpoint of ``size`` bytes."""
        return 8 * size / self.parameters

    def problems(self) -> list[str]:
        """Return why the target cannot be met, in words; empty if it can."""
        if not self.units:
            return [f"{self.asked}: the rules decide about every weight, nothing is left to choose. Drop one of them."]
        if self.budget < self.least:
            return [
                f"{self.asked}: the least that is possible here is"
                f" {self._asks_for(self.least, self._range()[0], up=True)}. "
                f"Ask for more{'' if self.format in ('native', 'gguf') else NATIVE_GOES_LOWER}."
            ]
        if self.budget > self.most:
            return [
                f"{self.asked}: the most that is possible here is"
                f" {self._asks_for(self.most, self._range()[1], up=False)}."
                f" Ask for less, or for {'--gguf-type q8_0 or f16' if self.format == 'gguf' else 'fixed --bits'}."
            ]
        return []

    def _range(self) -> tuple[float, float]:
        """Return the least and the most bits per weight that can be asked for, rounded inward to three digits."""
        return -(-self.bits(self.least) * 1000 // 1) / 1000, self.bits(self.most) * 1000 // 1 / 1000

    def _asks_for(self, size: int, bits: float, up: bool) -> str:
        """Return the options that ask for ``size`` bytes. up: never for less, else never for more."""
        shown = _askable(size, up)
        return (
            f"--target-bpw {bits:.3f} or --target-size {shown} ({size_text(self.fixed)} of it for tensors that are not"
            " quantized)"
        )

    def describe(self, text: str) -> list[str]:
        """Return the lines of a plan for people.

        text: name of the text on which sensitivity is measured.
        """
        low, high = self._range()
        options = sum(len(unit.options) for unit in self.units)
        return [
            (
                f"  target    {self.asked}: {size_text(self.budget)} for {self.parameters / 1e6:.1f} M parameters; from"
                f" {low:.3f} to {high:.3f} bits per weight are possible"
            ),
            (
                f"  measures  {len(self.units)} groups of weights, {options} choices in all: what each does to the"
                f" output, one pass forward and one back on up to {WINDOWS} windows of {TOKENS} tokens of {text},"
                " before anything is quantized"
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the bit budget as JSON for ``--dry-run --json``."""
        return {
            "target": self.asked,
            "budget_bytes": self.budget,
            "parameters": self.parameters,
            "fixed_bytes": self.fixed,
            "least_bits_per_weight": round(self.bits(self.least), 5),
            "most_bits_per_weight": round(self.bits(self.most), 5),
            "groups": len(self.units),
        }


def plan_bit_budget(
    options: ConvertOptions, form: Format, weights: Weights, targets: Targets, fixed: int
) -> BitBudget | None:
    """Return the bit budget, None without a target; what cannot be is added to ``targets.problems``.

    fixed: bytes that are written whatever is chosen, quantized weights excepted.
    """
    if not options.allocates:
        return None
    if form.uniform_groups:
        targets.problems.append(
            f"{options.target}: {form.name} holds one width for the whole model, nothing can be chosen. Use --format"
            " compressed-tensors, gptq or native."
        )
        return None
    parameters = sum(p.numel() for name, p in weights.parameters.items() if name not in weights.tied)
    parameters += sum(m.out_features * m.in_features for m in matrices_without_module(weights).values())
    budget = options.target_size if options.target_bpw is None else int(options.target_bpw * parameters / 8 + 1e-6)
    assert isinstance(budget, int)
    units, costs = [], []
    blocks = options.gguf_type is not None
    for members in _tensors(weights, targets) if blocks else _groups(form, targets):
        choices = _block_choices(members) if blocks else _choices(options, form, weights, members)
        if not choices:
            targets.problems.append(
                f"{members[0][1].name}: {form.name} can hold it in none of the schemes that {options.target} chooses"
                " from."
            )
            continue
        names, schemes = tuple(name for name, _ in members), tuple(scheme for scheme, _ in choices)
        units.append(Unit(names, members[0][1].kind, schemes))
        costs.append(tuple(cost for _, cost in choices))
    free = set(targets.free)
    fixed += sum(target_bytes(form, target) for name, target in targets.chosen.items() if name not in free)
    allocation = BitBudget(options.target, budget, parameters, tuple(units), tuple(costs), fixed, form.name)
    targets.problems += allocation.problems()
    return allocation


def target_bytes(form: Format, target: Target) -> int:
    """Return the bytes of a quantized weight as the format stores it."""
    if target.blocks is not None:
        return target.out_features * block_kind(target.blocks).row_bytes(target.in_features)
    return form.stored_bytes(target.scheme, target.out_features, target.in_features)


def _groups(form: Format, targets: Targets) -> list[list[tuple[str, Target]]]:
    """Group the free weights that must share a scheme, by module name.

    Fused linears of which a rule takes some but not all are a problem, except in the native format, where nothing is
    fused.
    """
    groups: dict[str, list[tuple[str, Target]]] = {}
    ruled = {key for name, target in targets.chosen.items() if name not in targets.free for key in _keys(target.name)}
    ruled |= {key for name in targets.kept for key in _keys(name)}
    split: dict[str, str] = {}
    for name in targets.free:
        target = targets.chosen[name]
        keys = _keys(target.name)
        groups.setdefault(keys[0] if keys else target.name, []).append((name, target))
        split |= {key: target.name for key in keys if key in ruled}
    if split and form.name != "native":
        first = next(iter(split.values()))
        more = f" and {len(split) - 1} more" if len(split) > 1 else ""
        targets.problems.append(
            f"{first}{more}: a rule takes some of the linears that engines run with it as one matrix, but not it. Give"
            " one rule for all of them."
        )
    return list(groups.values())


def _tensors(weights: Weights, targets: Targets) -> list[list[tuple[str, Target]]]:
    """Group the free weights by the tensor of a GGUF file that holds them."""
    found = by_tensor(weights, {name: targets.chosen[name].name for name in targets.free})
    return [[(name, targets.chosen[name]) for name in members] for members in found.values()]


def _block_choices(members: Sequence[tuple[str, Target]]) -> list[tuple[Way, int]]:
    """Return the block formats that a tensor of a GGUF file can have, and their bytes."""
    rows = sum(target.out_features for _, target in members)
    width = members[0][1].in_features
    return [(kind, rows * kind.row_bytes(width)) for kind in possible_kinds(width)]


def _keys(name: str) -> list[str]:
    """Return the keys of the fused groups to which a linear belongs."""
    return [f"{owner} {pattern}" for owner, pattern in fused_groups(name)]


def _askable(size: int, up: bool) -> str:
    """Write bytes as ``--target-size`` takes them, in a unit that people read, to four digits or more.

    up: never less than ``size``, else never more.
    """
    unit, name = next(((unit, name) for unit, name in ((10**9, "GB"), (10**6, "MB")) if size >= unit), (1000, "KB"))
    tick = unit // 1000 if size < 100 * unit else unit // 10
    ticks = -(-size // tick) if up else size // tick
    return f"{ticks * tick / unit:g}{name}"


def _choices(
    options: ConvertOptions, form: Format, weights: Weights, members: Sequence[tuple[str, Target]]
) -> list[tuple[Way, int]]:
    """Return the schemes that all members of a group can have, and their bytes; for head and embeddings also 16 bit."""
    costs: dict[Way, int] = {}
    for bits in BITS:
        sizes: Any = SIZES.get(bits, USUAL_SIZES) if options.group_size == AUTO else (options.group_size,)
        for size in sizes:
            asked = replace(options.base_scheme, bits=bits, group_size=size)
            fitted = {form.group_size_for(asked, target.in_features) for _, target in members}
            if len(fitted) > 1 or (options.strict_groups and fitted != {size}):
                continue
            scheme = replace(asked, group_size=fitted.pop())
            if all(form.supports(scheme, target.out_features, target.in_features) is None for _, target in members):
                costs[scheme] = sum(
                    form.stored_bytes(scheme, target.out_features, target.in_features) for _, target in members
                )
    if members[0][1].kind != "linear":
        costs[None] = sum(kept_bytes(weights, target) for _, target in members)
    return list(costs.items())


def cache_bytes(options: ConvertOptions, form: Format, model: Any) -> int:
    """Return the bytes of the file of a quantized KV cache's scales, and of its scales for other engines.

    The names and shapes of its tensors decide them, so a file of ones is measured.
    """
    asked = options.cache
    if not asked.wanted:
        return 0
    names = list(attention_modules(model).values())
    config = text_config(model)
    shape = (cached_kv_heads(config), head_dim(config))
    scales = {name: LayerScales(**{part: torch.ones(shape) for part in SCALE_NAMES}) for name in names}
    plan = KVPlan(asked.scheme, dict.fromkeys(names, asked.candidates()[0]), scales)
    return kv_plan_bytes(plan) + (8 * len(names) if asked.scheme.label == "fp8" and form.holds_cache_scales else 0)


def kept_bytes(weights: Weights, target: Target) -> int:
    """Return the bytes of a weight that stays as it is stored, with its second copy if there is one."""
    names = {weights.stored(target.parameter), second_copy(weights, target)} - {None}
    return sum(weights.source.info(name).nbytes for name in names if name is not None)


def chosen_targets(targets: Mapping[str, Target], units: Sequence[Unit], schemes: Sequence[Way]) -> dict[str, Target]:
    """Return the targets with the schemes that were chosen, without the weights that stay at 16 bit."""
    decided = {name: scheme for unit, scheme in zip(units, schemes, strict=True) for name in unit.members}
    chosen = {}
    for name, target in targets.items():
        scheme = decided.get(name, target.scheme)
        if isinstance(scheme, BlockKind):
            chosen[name] = replace(target, scheme=alike(scheme.name), blocks=scheme.name, fallback=None)
        elif scheme is not None:
            chosen[name] = replace(target, scheme=scheme)
    return chosen
