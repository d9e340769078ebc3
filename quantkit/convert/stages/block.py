"""Quantize one decoder block: solve its linears from the statistics of their inputs, report and encode them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantkit.algorithms import CALIBRATED, Scales, Solution
from quantkit.algorithms.awq import awq
from quantkit.algorithms.gptq import GPTQOptions, Loops, gptq_steps, output_energy
from quantkit.algorithms.hqq import hqq
from quantkit.algorithms.rtn import rtn_steps
from quantkit.algorithms.together import Solver as Steps
from quantkit.algorithms.together import together
from quantkit.checkpoint.source import all_finite
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.options.rules import fused_groups
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import BlockResult, InputGroup, LayerReport, decision_sha256
from quantkit.convert.stages.gguf_blocks import Weighing, round_block
from quantkit.convert.stages.tune import TuneInputs, tune_block
from quantkit.core import affine
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.activations import input_hook
from quantkit.core.rounding.numbers import LARGEST_E2M1, LARGEST_E4M3
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError
from quantkit.formats.bitsandbytes import BitsAndBytes
from quantkit.formats.bitsandbytes_library import encode_weight
from quantkit.formats.interface import Format
from quantkit.model.skeleton import block_linears

# Numbers of linears and Hessians that are solved in step: more are solved one after another.
TOGETHER = 1 << 20
_PIECE = 1 << 20  # weights whose error is measured at a time
# Inputs on which a report's output error is measured, at most, where inputs are kept themselves: evenly spread.
REPORTED = 128


@dataclass(frozen=True, kw_only=True)
class Solver:
    """What every block of a conversion is quantized with.

    targets: weights to quantize, by module name of the skeleton.
    loops: the kernel of GPTQ's loop over columns.
    weighing: importance from a file, for the block formats of GGUF.
    """

    options: ConvertOptions
    format: Format
    targets: Mapping[str, Target]
    loops: Loops
    weighing: Weighing | None = None


@dataclass
class _Solved:
    """One linear, by its name inside the block, and the solution that was found for it."""

    name: str
    target: Target
    linear: nn.Linear
    solution: Solution
    group: InputGroup


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
    if solver.options.gguf_type is not None:
        named = [(name, solver.targets.get(f"{prefix}.{name}")) for name in block_linears(block)]
        mine = [(name, target) for name, target in named if target is not None]
        round_block(solver.options, solver.loops, mine, block, groups, result, solver.weighing)
        return
    if solver.options.format == "bitsandbytes":
        _round_by_library(solver, prefix, block, result)
        return
    solved: Iterable[_Solved] = _solve_groups(solver, prefix, block, groups, result)
    if tune_inputs is not None:
        solved = _learn(solver, prefix, block, list(solved), tune_inputs, result)
    for linear in solved:
        raise_if_interrupted()
        _write_result(solver, linear, result)


def _round_by_library(solver: Solver, prefix: str, block: nn.Module, result: BlockResult) -> None:
    """Let bitsandbytes round the linears of a block, and fill ``result``; the block computes with them from now on."""
    for name in block_linears(block):
        target = solver.targets.get(f"{prefix}.{name}")
        if target is None:
            continue
        raise_if_interrupted()
        linear: nn.Linear = block.get_submodule(name)  # type: ignore[assignment]
        weight = _finite_weight(target, linear)
        try:
            parts = encode_weight(weight, target.scheme.number)
        except NumericsError as error:
            raise NumericsError(f"{target.name}: {error}") from error
        found = BitsAndBytes.read_module(target.name, parts, {})
        dequantized = found.dequantize().to(weight.device)
        result.parts.update({f"{target.name}.{local}": value for local, value in parts.items()})
        result.digests[target.name] = decision_sha256(found)
        result.layers.append(
            LayerReport(
                name=target.name,
                scheme=target.scheme.describe(),
                relative_weight_error=_relative_error(weight, dequantized),
                relative_output_error=None,
                weights=weight.numel(),
                bits=found.bits_stored,
            )
        )
        linear.weight = nn.Parameter(dequantized, requires_grad=False)


def _finite_weight(target: Target, linear: nn.Linear) -> Tensor:
    """Return a linear's weight. Raises NumericsError if it is not finite."""
    weight = linear.weight.detach()
    if not all_finite(weight):
        raise NumericsError(f"{target.name}: the weight holds NaN or infinite values. Use a sound model.")
    return weight


@dataclass(frozen=True)
class _Stack:
    """Linears of one input and one scheme, stacked along their rows: names inside the block, and their targets."""

    names: list[str]
    targets: list[Target]
    linears: list[nn.Linear]
    group: InputGroup

    def weights(self) -> int:
        """Count the numbers that solving it holds: those of its weights and of its Hessian."""
        width = self.linears[0].in_features
        return width * (sum(linear.out_features for linear in self.linears) + width)


def unread_groups(prefix: str, block: nn.Module, targets: Mapping[str, Target]) -> list[InputGroup]:
    """Return the linears of a block without statistics, for methods that read no text.

    Linears that engines fuse into one stand together where a scale is shared by a whole weight: the fused one has one.

    prefix: the block's module name in the model.
    targets: weights to quantize, by module name of the skeleton.
    """
    together: dict[str, list[str]] = {}
    for linear in block_linears(block):
        target = targets.get(f"{prefix}.{linear}")
        floats = target is not None and target.scheme.number != "integer"
        fused = [f"{owner} {pattern}" for owner, pattern in fused_groups(linear)] if floats else []
        together.setdefault(fused[0] if fused else linear, []).append(linear)
    return [InputGroup(tuple(names)) for names in together.values()]


def _solve_groups(
    solver: Solver, prefix: str, block: nn.Module, groups: Sequence[InputGroup], result: BlockResult
) -> Iterator[_Solved]:
    """Yield every solved linear; the results of one group, or of a batch of small ones, are in memory at a time."""
    batch: list[_Stack] = []
    size = 0
    for stack in _stacks(solver, prefix, block, groups):
        if batch and size + stack.weights() > TOGETHER:
            yield from _solve_stacks(solver, batch, result)
            batch, size = [], 0
        batch.append(stack)
        size += stack.weights()
    yield from _solve_stacks(solver, batch, result)


def _stacks(solver: Solver, prefix: str, block: nn.Module, groups: Sequence[InputGroup]) -> Iterator[_Stack]:
    """Iterate over what is solved as one: each scheme of an input is solved on the same Hessian."""
    for group in groups:
        by_scheme: dict[Scheme, list[str]] = {}
        for name in group.names:
            target = solver.targets.get(f"{prefix}.{name}")
            if target is not None:
                by_scheme.setdefault(target.scheme, []).append(name)
        for names in by_scheme.values():
            targets = [solver.targets[f"{prefix}.{name}"] for name in names]
            linears: list[nn.Linear] = [block.get_submodule(name) for name in names]  # type: ignore[misc]
            for target, linear in zip(targets, linears, strict=True):
                _finite_weight(target, linear)
            yield _Stack(names, targets, linears, group)


def _solve_stacks(solver: Solver, stacks: Sequence[_Stack], result: BlockResult) -> Iterator[_Solved]:
    """Solve stacks in step."""
    raise_if_interrupted()
    solutions = together([_named(_solve(solver, stack), stack) for stack in stacks])
    for stack, solution in zip(stacks, solutions, strict=True):
        targets, damping = stack.targets, solver.options.damping
        if solution.damping is not None and solution.damping > damping:
            result.notes.append(
                f"{', '.join(t.name for t in targets)}: damping raised from {damping:g} to"
                f" {solution.damping:g}, the Hessian could not be factorised with less"
            )
        for each in zip(stack.names, targets, stack.linears, _rows(solution, targets), strict=True):
            yield _Solved(*each, stack.group)


def _named(steps: Steps, stack: _Stack) -> Steps:
    """Name the first linear in what a solver raises."""
    try:
        return (yield from steps)
    except NumericsError as error:
        raise NumericsError(f"{stack.targets[0].name}: {error}") from error


def _learn(
    solver: Solver, prefix: str, block: nn.Module, solved: list[_Solved], tune_inputs: TuneInputs, result: BlockResult
) -> list[_Solved]:
    """Tune all linears of the block together, starting from their solutions."""
    if not solved:
        return solved
    tuned = tune_block(solver.options, block, {entry.name: entry.solution.quantized for entry in solved}, tune_inputs)
    if tuned.trouble is not None:
        result.notes.append(f"{prefix}: not tuned, {tuned.trouble}" if not tuned.step else f"{prefix}: {tuned.trouble}")
    if math.isfinite(tuned.before):
        result.tuning[prefix] = {"before": tuned.before, "after": tuned.after, "step": tuned.step}
    learned = [replace(entry.solution, quantized=tuned.quantized[entry.name], losses=None) for entry in solved]
    return [replace(entry, solution=solution) for entry, solution in zip(solved, learned, strict=True)]


def _write_result(solver: Solver, entry: _Solved, result: BlockResult) -> None:
    """Report and encode a solution, and let the linear compute with it from now on."""
    target, linear, q = entry.target, entry.linear, entry.solution.quantized
    dequantized = q.dequantize()
    result.layers.append(_report(target, linear.weight, entry.solution, dequantized, entry.group))
    result.parts.update({f"{target.name}.{part}": value.cpu() for part, value in solver.format.encode(q).items()})
    result.digests[target.name] = decision_sha256(q.to("cpu"))
    linear.weight = nn.Parameter(dequantized, requires_grad=False)
    if q.scheme.activations is not None:
        linear.register_forward_pre_hook(input_hook(q.scheme))


def _solve(solver: Solver, stack: _Stack) -> Steps:
    o, hessian = solver.options, stack.group.hessian
    scheme = _with_input_scale(stack.targets[0].scheme, stack.group)
    weight = torch.cat([linear.weight for linear in stack.linears])
    scales: Scales = "minmax" if o.scales == "minmax" else "search"
    if o.method == "gptq" and hessian is not None:
        options = GPTQOptions(damping=o.damping, scales=scales)
        return (yield from gptq_steps(weight, hessian, scheme, options, solver.loops, stack.group.cross))
    if o.method == "hqq":
        return hqq(weight, scheme, scales, stack.group.squares())
    if o.method == "tune" and hessian is not None and scales == "search":
        found = yield from gptq_steps(weight, hessian, scheme, GPTQOptions(damping=o.damping), solver.loops)
        return _nearest(weight, found)
    if o.method in ("awq", "tune") and hessian is not None:
        return awq(weight, hessian, scheme, scales, o.damping)
    # without the statistics, also when the KV cache brought some: rtn is data-free, and smooth has used them before
    found = yield from rtn_steps(weight, scheme, scales)
    if o.method in CALIBRATED and o.method != "smooth":
        return replace(found, fallback="rounded: no calibration token reached this layer")
    return found


def _with_input_scale(scheme: Scheme, group: InputGroup) -> Scheme:
    """Fix the global scale of nvfp4 activations: the largest one seen becomes the largest number.

    An input that no token reached has the scale of a largest activation of 1.
    """
    if scheme.activations != "nvfp4":
        return scheme
    largest = 0.0 if group.largest is None else float(group.largest.max())
    stored = torch.tensor(LARGEST_E4M3 * LARGEST_E2M1 / (largest if largest > 0 else 1.0))  # float32
    return replace(scheme, input_global_scale=float(stored))


def _nearest(weight: Tensor, solution: Solution) -> Solution:
    """Return the nearest codes on the ranges of a solution, from which learning starts.

    From GPTQ's own codes learning ends no better than they are.
    """
    q = solution.quantized
    codes = affine.quantize(weight, q.scales, q.zeros, q.scheme)
    return replace(solution, quantized=QuantTensor(codes, q.scales, q.zeros, q.scheme), losses=None)


def _rows(solution: Solution, targets: Sequence[Target]) -> list[Solution]:
    """Cut the stacked result into one solution per linear."""
    parts, start, q = [], 0, solution.quantized
    for target in targets:
        rows = slice(start, start + target.out_features)
        zeros = None if q.zeros is None else q.zeros[rows]
        quantized = QuantTensor(q.codes[rows], q.scales[rows], zeros, q.scheme)
        losses = None if solution.losses is None else solution.losses[rows]
        parts.append(replace(solution, quantized=quantized, losses=losses))
        start += target.out_features
    return parts


def _relative_error(weight: Tensor, dequantized: Tensor) -> float:
    """Return ``|W - Q| / |W|``, in pieces that a cache holds."""
    lost = energy = 0.0
    step = max(1, _PIECE // weight.shape[1])
    for part, rounded in zip(weight.split(step), dequantized.split(step), strict=True):
        lost += float(torch.linalg.vector_norm(part - rounded)) ** 2
        energy += float(torch.linalg.vector_norm(part)) ** 2
    return float((lost / max(energy, 1e-60)) ** 0.5)


def _report(target: Target, weight: Tensor, solution: Solution, dequantized: Tensor, group: InputGroup) -> LayerReport:
    q, output = solution.quantized, None
    if group.hessian is not None or group.root is not None:
        root = None if group.root is None else group.root[:: -(-len(group.root) // REPORTED)]
        if solution.losses is None:
            loss = output_energy(weight, group.hessian, root, dequantized)
        else:
            loss = float(solution.losses.sum(dtype=torch.float64))
        output = (max(loss, 0.0) / max(output_energy(weight, group.hessian, root), 1e-30)) ** 0.5
    return LayerReport(
        name=target.name,
        scheme=q.scheme.describe(),
        relative_weight_error=_relative_error(weight, dequantized),
        relative_output_error=output,
        weights=q.codes.numel(),
        bits=q.bits_stored,
        damping=solution.damping,
        fallback=solution.fallback,
        raised_scales=int((q.scales.float() <= affine.smallest_scale(q.scheme)).sum()),
        tokens=group.tokens,
        dropped_tokens=group.dropped,
    )
