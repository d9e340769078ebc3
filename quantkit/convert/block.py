"""Quantize one decoder block: what is known about its inputs, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import CALIBRATED, Scales, Solution
from quantkit.algorithms.awq import awq
from quantkit.algorithms.gptq import GPTQOptions, gptq, proxy_loss
from quantkit.algorithms.hqq import hqq
from quantkit.algorithms.kv import LayerRanges
from quantkit.algorithms.rtn import rtn
from quantkit.convert.device import column_loops
from quantkit.convert.plan import Plan, Target
from quantkit.convert.report import LayerReport
from quantkit.convert.tuning import Lesson, tune_block
from quantkit.convert.verify import decision_sha256
from quantkit.core import affine
from quantkit.core.activations import round_input
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError


@dataclass
class InputGroup:
    """Linears of a block that read one tensor (names inside the block), and what is known about that tensor.

    hessian: [in, in], the mean of x xᵀ over ``tokens``, where the block is; largest: float32 [in], the largest |x| per
    channel; None without data. ``dropped`` tokens were not finite. cross: [in, in], the mean of (y - x) xᵀ with y what the original model
    has in the place of x (``algorithms.PAIRED`` methods; never for experts), else None.
    """

    names: tuple[str, ...]
    hessian: Tensor | None = None
    tokens: int = 0
    dropped: int = 0
    largest: Tensor | None = None
    cross: Tensor | None = None


@dataclass
class BlockResult:
    """Everything that checkpoint, verification and report need of one block."""

    parts: dict[str, Tensor] = field(default_factory=dict)  # by stored name
    decisions: dict[str, str] = field(default_factory=dict)  # module name -> decision_sha256
    layers: list[LayerReport] = field(default_factory=list)
    kv: dict[str, LayerRanges] = field(default_factory=dict)  # by attention module
    notes: list[str] = field(default_factory=list)  # end in the report, the JSON and the manifest
    folds: dict[str, dict[str, bool]] = field(default_factory=dict)  # block -> kind of producer -> can be scaled
    # block -> before, after: ``tune.block_error`` of its output on text held back, weighted by channel; step: of learning that was the best
    tuning: dict[str, dict[str, float]] = field(default_factory=dict)
    # of the end-to-end pass: steps, windows and tokens learned from, windows kept back, divergence on those before and after, whether it stands
    distilled: dict[str, Any] | None = None


@dataclass
class _Solved:
    """One linear (its name inside the block) and what was decided for it."""

    name: str
    target: Target
    linear: nn.Linear
    quantized: QuantTensor
    group: InputGroup
    solution: Solution


def quantize_block(
    plan: Plan,
    prefix: str,
    block: nn.Module,
    groups: Sequence[InputGroup],
    result: BlockResult,
    lesson: Lesson | None = None,
) -> None:
    """Quantize the linears of ``block`` (called ``prefix`` in the model) that the plan names, and fill ``result``.

    The block's weights are replaced by what an engine will compute with, and inputs are rounded where it rounds them. Linears of one group and one scheme are solved
    together; each scheme of a group is solved on the same Hessian. lesson: all of them learn together then.
    """
    solved: Iterable[_Solved] = _solve_groups(plan, prefix, block, groups, result)
    if lesson is not None:
        solved = _learn(plan, prefix, block, list(solved), lesson, result)
    for one in solved:
        _settle(plan, one, result)


def _solve_groups(
    plan: Plan, prefix: str, block: nn.Module, groups: Sequence[InputGroup], result: BlockResult
) -> Iterator[_Solved]:
    """Every linear to quantize; one group's results are there at a time."""
    for group in groups:
        by_scheme: dict[Scheme, list[str]] = {}
        for name in group.names:
            target = plan.targets.get(f"{prefix}.{name}")
            if target is not None:
                by_scheme.setdefault(target.scheme, []).append(name)
        for scheme, names in by_scheme.items():
            yield from _solve_stack(plan, prefix, block, names, scheme, group, result)


def _solve_stack(
    plan: Plan, prefix: str, block: nn.Module, names: list[str], scheme: Scheme, group: InputGroup, result: BlockResult
) -> list[_Solved]:
    """Linears with one input and one scheme, stacked along their rows."""
    targets = [plan.targets[f"{prefix}.{name}"] for name in names]
    linears: list[nn.Linear] = [block.get_submodule(name) for name in names]  # type: ignore[misc]
    try:
        solution = _solve(plan, torch.cat([linear.weight for linear in linears]), scheme, group)
    except NumericsError as error:
        raise NumericsError(f"{targets[0].name}: {error}") from error
    if solution.damping is not None and solution.damping > plan.options.damping:
        result.notes.append(
            f"{', '.join(t.name for t in targets)}: damping raised from {plan.options.damping:g} to {solution.damping:g}, "
            "the Hessian could not be factorised with less"
        )
    rows = _rows(solution.quantized, targets)
    return [_Solved(*each, group, solution) for each in zip(names, targets, linears, rows, strict=True)]


def _learn(
    plan: Plan, prefix: str, block: nn.Module, solved: list[_Solved], lesson: Lesson, result: BlockResult
) -> list[_Solved]:
    """All linears of the block together: codes and scales from what was solved for each."""
    if not solved:
        return solved
    tuned = tune_block(plan.options, block, {one.name: one.quantized for one in solved}, lesson)
    if tuned.trouble is not None:
        result.notes.append(f"{prefix}: not tuned, {tuned.trouble}" if not tuned.step else f"{prefix}: {tuned.trouble}")
    if math.isfinite(tuned.before):
        result.tuning[prefix] = {"before": tuned.before, "after": tuned.after, "step": tuned.step}
    return [replace(one, quantized=tuned.quantized[one.name]) for one in solved]


def _settle(plan: Plan, one: _Solved, result: BlockResult) -> None:
    """Report and encode what was decided; the linear computes with it from now on."""
    target, linear, q = one.target, one.linear, one.quantized
    dequantized = q.dequantize()
    result.layers.append(_report(target, linear.weight, q, dequantized, one.group, one.solution))
    result.parts.update({f"{target.name}.{part}": value.cpu() for part, value in plan.format.encode(q).items()})
    result.decisions[target.name] = decision_sha256(q.to("cpu"))
    linear.weight = nn.Parameter(dequantized, requires_grad=False)
    if q.scheme.activations is not None:
        linear.register_forward_pre_hook(round_input)


def _solve(plan: Plan, weight: Tensor, scheme: Scheme, group: InputGroup) -> Solution:
    o, hessian = plan.options, group.hessian
    scales: Scales = "minmax" if o.scales == "minmax" else "search"
    if o.method == "gptq" and hessian is not None:
        return gptq(
            weight,
            hessian,
            scheme,
            GPTQOptions(damping=o.damping, scales=scales),
            column_loops(weight.device),
            group.cross,
        )
    if o.method == "hqq":
        return hqq(weight, scheme, scales, None if hessian is None else hessian.diagonal())
    if o.method == "tune" and hessian is not None and scales == "search":
        return _nearest(
            weight, gptq(weight, hessian, scheme, GPTQOptions(damping=o.damping), column_loops(weight.device))
        )
    if o.method in ("awq", "tune") and hessian is not None:
        return awq(weight, hessian, scheme, scales, o.damping)
    if o.method in CALIBRATED and o.method != "smooth":
        return replace(rtn(weight, scheme, scales), fallback="rounded: no calibration token reached this layer")
    # without the statistics, also when the KV cache brought some: rtn is data-free, and smooth has used them before
    return rtn(weight, scheme, scales)


def _nearest(weight: Tensor, solution: Solution) -> Solution:
    """The nearest codes on the ranges of a solution: where learning starts. From GPTQ's own codes it ends no better than they are."""
    q = solution.quantized
    codes = affine.quantize(weight, q.scales, q.zeros, q.scheme)
    return replace(solution, quantized=QuantTensor(codes, q.scales, q.zeros, q.scheme))


def _rows(q: QuantTensor, targets: Sequence[Target]) -> list[QuantTensor]:
    """The stacked result, one linear at a time."""
    found, start = [], 0
    for target in targets:
        rows = slice(start, start + target.out_features)
        zeros = None if q.zeros is None else q.zeros[rows]
        found.append(QuantTensor(q.codes[rows], q.scales[rows], zeros, q.scheme))
        start += target.out_features
    return found


def _report(
    target: Target, weight: Tensor, q: QuantTensor, dequantized: Tensor, group: InputGroup, solution: Solution
) -> LayerReport:
    output = None
    if group.hessian is not None:
        loss, energy = proxy_loss(weight, dequantized, group.hessian)
        output = (max(loss, 0.0) / max(energy, 1e-30)) ** 0.5
    return LayerReport(
        name=target.name,
        scheme=q.scheme.describe(),
        relative_weight_error=float((weight - dequantized).norm() / weight.norm().clamp(min=1e-30)),
        relative_output_error=output,
        weights=q.codes.numel(),
        bits=q.bits_stored,
        damping=solution.damping,
        fallback=solution.fallback,
        raised_scales=int((q.scales.float() <= SMALLEST_SCALE).sum()),
        tokens=group.tokens,
        dropped_tokens=group.dropped,
    )
