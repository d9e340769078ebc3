"""Quantize one decoder block: solve its linears from the statistics of their inputs, report and encode them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantkit.algorithms import CALIBRATED, Scales, Solution
from quantkit.algorithms.awq import awq
from quantkit.algorithms.gptq import GPTQOptions, Loops, gptq, proxy_loss
from quantkit.algorithms.hqq import hqq
from quantkit.algorithms.rtn import rtn
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import BlockResult, InputGroup, LayerReport, decision_sha256
from quantkit.convert.stages.tune import TuneInputs, tune_block
from quantkit.core import affine
from quantkit.core.activations import round_input
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError
from quantkit.formats.interface import Format


@dataclass(frozen=True, kw_only=True)
class Solver:
    """What every block of a conversion is quantized with.

    targets: weights to quantize, by module name of the skeleton.
    loops: the kernel of GPTQ's loop over columns.
    """

    options: ConvertOptions
    format: Format
    targets: Mapping[str, Target]
    loops: Loops


@dataclass
class _Solved:
    """One linear, by its name inside the block, and the solution that was found for it."""

    name: str
    target: Target
    linear: nn.Linear
    quantized: QuantTensor
    group: InputGroup
    solution: Solution


def quantize_block(
    solver: Solver,
    prefix: str,
    block: nn.Module,
    groups: Sequence[InputGroup],
    result: BlockResult,
    tune_inputs: TuneInputs | None = None,
) -> None:
    """Quantize the linears of ``block`` that the plan names, and fill ``result``.

    The block's weights are replaced by the dequantized ones, and inputs are rounded where the scheme rounds
    activations. Linears of one input and one scheme are solved together; each scheme of an input is solved on the same
    Hessian.

    solver: options, format and targets of the conversion.
    prefix: the block's module name in the model.
    block: float32 weights on the device; changed in place.
    groups: statistics of each input, with the names of the linears that read it.
    result: gets the packed tensors, digests, reports and notes.
    tune_inputs: states from which all linears then learn together; None for no tuning.

    Raises NumericsError if a weight cannot be quantized to finite numbers.
    """
    solved: Iterable[_Solved] = _solve_groups(solver, prefix, block, groups, result)
    if tune_inputs is not None:
        solved = _learn(solver, prefix, block, list(solved), tune_inputs, result)
    for linear in solved:
        raise_if_interrupted()
        _write_result(solver, linear, result)


def _solve_groups(
    solver: Solver, prefix: str, block: nn.Module, groups: Sequence[InputGroup], result: BlockResult
) -> Iterator[_Solved]:
    """Yield every solved linear; the results of one group are in memory at a time."""
    for group in groups:
        by_scheme: dict[Scheme, list[str]] = {}
        for name in group.names:
            target = solver.targets.get(f"{prefix}.{name}")
            if target is not None:
                by_scheme.setdefault(target.scheme, []).append(name)
        for scheme, names in by_scheme.items():
            yield from _solve_stack(solver, prefix, block, names, scheme, group, result)


def _solve_stack(
    solver: Solver,
    prefix: str,
    block: nn.Module,
    names: list[str],
    scheme: Scheme,
    group: InputGroup,
    result: BlockResult,
) -> list[_Solved]:
    """Solve linears of one input and one scheme, stacked along their rows."""
    targets = [solver.targets[f"{prefix}.{name}"] for name in names]
    raise_if_interrupted()
    linears: list[nn.Linear] = [block.get_submodule(name) for name in names]  # type: ignore[misc]
    try:
        solution = _solve(solver, torch.cat([linear.weight for linear in linears]), scheme, group)
    except NumericsError as error:
        raise NumericsError(f"{targets[0].name}: {error}") from error
    if solution.damping is not None and solution.damping > solver.options.damping:
        result.notes.append(
            f"{', '.join(t.name for t in targets)}: damping raised from {solver.options.damping:g} to"
            f" {solution.damping:g}, the Hessian could not be factorised with less"
        )
    rows = _rows(solution.quantized, targets)
    return [_Solved(*each, group, solution) for each in zip(names, targets, linears, rows, strict=True)]


def _learn(
    solver: Solver, prefix: str, block: nn.Module, solved: list[_Solved], tune_inputs: TuneInputs, result: BlockResult
) -> list[_Solved]:
    """Tune all linears of the block together, starting from their solutions."""
    if not solved:
        return solved
    tuned = tune_block(solver.options, block, {entry.name: entry.quantized for entry in solved}, tune_inputs)
    if tuned.trouble is not None:
        result.notes.append(f"{prefix}: not tuned, {tuned.trouble}" if not tuned.step else f"{prefix}: {tuned.trouble}")
    if math.isfinite(tuned.before):
        result.tuning[prefix] = {"before": tuned.before, "after": tuned.after, "step": tuned.step}
    return [replace(entry, quantized=tuned.quantized[entry.name]) for entry in solved]


def _write_result(solver: Solver, entry: _Solved, result: BlockResult) -> None:
    """Report and encode a solution, and let the linear compute with it from now on."""
    target, linear, q = entry.target, entry.linear, entry.quantized
    dequantized = q.dequantize()
    result.layers.append(_report(target, linear.weight, q, dequantized, entry.group, entry.solution))
    result.parts.update({f"{target.name}.{part}": value.cpu() for part, value in solver.format.encode(q).items()})
    result.digests[target.name] = decision_sha256(q.to("cpu"))
    linear.weight = nn.Parameter(dequantized, requires_grad=False)
    if q.scheme.activations is not None:
        linear.register_forward_pre_hook(round_input)


def _solve(solver: Solver, weight: Tensor, scheme: Scheme, group: InputGroup) -> Solution:
    o, hessian = solver.options, group.hessian
    scales: Scales = "minmax" if o.scales == "minmax" else "search"
    if o.method == "gptq" and hessian is not None:
        return gptq(
            weight,
            hessian,
            scheme,
            GPTQOptions(damping=o.damping, scales=scales),
            solver.loops,
            group.cross,
        )
    if o.method == "hqq":
        return hqq(weight, scheme, scales, None if hessian is None else hessian.diagonal())
    if o.method == "tune" and hessian is not None and scales == "search":
        return _nearest(weight, gptq(weight, hessian, scheme, GPTQOptions(damping=o.damping), solver.loops))
    if o.method in ("awq", "tune") and hessian is not None:
        return awq(weight, hessian, scheme, scales, o.damping)
    if o.method in CALIBRATED and o.method != "smooth":
        return replace(rtn(weight, scheme, scales), fallback="rounded: no calibration token reached this layer")
    # without the statistics, also when the KV cache brought some: rtn is data-free, and smooth has used them before
    return rtn(weight, scheme, scales)


def _nearest(weight: Tensor, solution: Solution) -> Solution:
    """Return the nearest codes on the ranges of a solution, from which learning starts.

    From GPTQ's own codes learning ends no better than they are.
    """
    q = solution.quantized
    codes = affine.quantize(weight, q.scales, q.zeros, q.scheme)
    return replace(solution, quantized=QuantTensor(codes, q.scales, q.zeros, q.scheme))


def _rows(q: QuantTensor, targets: Sequence[Target]) -> list[QuantTensor]:
    """Cut the stacked result into one tensor per linear."""
    parts, start = [], 0
    for target in targets:
        rows = slice(start, start + target.out_features)
        zeros = None if q.zeros is None else q.zeros[rows]
        parts.append(QuantTensor(q.codes[rows], q.scales[rows], zeros, q.scheme))
        start += target.out_features
    return parts


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
