"""GPTQ: column-wise rounding with error feedback (Frantar et al., arXiv 2210.17323, algorithm 1), and later additions.

* Order: groups in the order of their largest ``diag(H)``, columns of a group by falling ``diag(H)`` (act-order inside
  the group, "GAR"). Groups stay contiguous along the inputs, so no ``g_idx`` is needed at run time.
* A group's scale and zero are chosen when its first column is reached, from the weights as they stand then, errors of
  earlier groups fed back, with the loss that the loop itself will pay: ``e_j**2 / U_jj**2`` for an error e_j of column
  j.
* Targets: where the inputs of the original model are known (y beside x), what is approximated is ``W y`` and not
  ``W x`` (Li et al., arXiv 2504.02692). With ``C = mean of (y - x) xᵀ`` and exact weights the best answer is
  ``W + W C H^-1``; rounding that with H minimises the same loss, up to a constant. C is an estimate, whose noise the
  inverse enlarges: ``GPTQOptions.pull`` of that way is gone, a quarter.
* Then codes and scales are refined (``algorithms.refine``): the loop never looks back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quantkit.algorithms import Scales, Solution
from quantkit.algorithms.refine import Descent, refine, row_losses
from quantkit.algorithms.rtn import rtn_steps
from quantkit.algorithms.together import Ranges, Search, Solver, together
from quantkit.core import affine
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding import scales as floats
from quantkit.core.scheme import Scheme


@dataclass(frozen=True, slots=True)
class GPTQOptions:
    """How GPTQ rounds.

    damping: share of the mean diagonal added to H's diagonal.
    escalation: the dampings that follow when H cannot be factorised.
    act_order: visit groups, and columns inside them, in the order of falling diag(H).
    scales: how each group's scale is chosen; "minmax" keeps the ranges of the weights as they were.
    block: columns per update of the rest of the matrix (speed only).
    sweeps: of the refinement, 0 for none.
    pull: how much of the way towards the original model's inputs the target goes, 0 to 1. The least-squares move fits
        the text's noise, too, and every block adds its own: a quarter (GPTQModel's alpha) helps, the whole ruins a
        small model.
    """

    damping: float = 0.01
    escalation: tuple[float, ...] = (0.05, 0.2, 1.0)
    act_order: bool = True
    scales: Scales = "search"
    block: int = 128
    sweeps: int = 2
    pull: float = 0.25


ColumnLoop = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops over a block of columns, in rounding and in refining.

    ``round_columns`` and ``descend_columns`` where None, else kernels that do the same on a device.
    """

    columns: ColumnLoop | None = None
    descent: Descent | None = None


def gptq(
    weight: Tensor, hessian: Tensor, scheme: Scheme, options: GPTQOptions | None = None, loops: Loops | None = None,
    cross: Tensor | None = None,
) -> Solution:  # fmt: skip
    """Quantize ``weight`` [out, in] so that ``tr(D H Dᵀ)`` of the error D is small.

    Weights that read the same input may be stacked along their rows: rows do not influence one another. Inputs are not
    modified. A Hessian that cannot be factorised raises the damping, and in the end falls back to rounding (said in the
    Solution). Everything happens on the device that weight and Hessian are on.

    weight: any float dtype, worked on in float32.
    hessian: [in, in], float32 or float64, the mean of x xᵀ over tokens; symmetric, positive semi-definite.
    cross: [in, in], the mean of (y - x) xᵀ with y the original model's inputs, if known.

    Raises NumericsError if a scale overflows its dtype.
    """
    return together([gptq_steps(weight, hessian, scheme, options, loops, cross)])[0]


def gptq_steps(
    weight: Tensor, hessian: Tensor, scheme: Scheme, options: GPTQOptions | None = None, loops: Loops | None = None,
    cross: Tensor | None = None,
) -> Solver:  # fmt: skip
    """Quantize as ``gptq`` does, as a solver among others (``algorithms.together``)."""
    options, loops = options or GPTQOptions(), loops or Loops()
    scheme = affine.fixed(weight, scheme)
    diagonal = hessian.diagonal().double()
    dead = diagonal <= 0  # inputs that were never non-zero: nothing is known, their columns are simply rounded
    known = diagonal[~dead].mean() if bool((~dead).any()) else diagonal.new_ones(())
    importance = torch.where(dead, known, diagonal)
    order = _order(importance, scheme, options.act_order)
    upper, damping = factorise(hessian, dead, importance, order, options)
    if upper is None:
        simple = yield from rtn_steps(weight, scheme, options.scales, importance.float())
        return Solution(simple.quantized, None, "rounded: the Hessian could not be factorised even with full damping")
    target = weight.float()
    if cross is not None and options.pull:
        target = _towards(target, cross, upper, order, options.pull)
    codes, scales, zeros = yield from _solve(
        target, upper.float(), order, scheme, options, loops.columns or round_columns
    )
    del upper
    if options.sweeps:
        softened = damped(hessian, dead, importance, damping)
        codes, scales = refine(
            target,
            codes,
            scales,
            zeros,
            scheme,
            softened,
            sweeps=options.sweeps,
            refit=options.scales == "search" and scheme.rows == 1,
            descent=loops.descent,
        )
        del softened
    quantized = QuantTensor(codes, scales, zeros, scheme)
    losses = None
    if options.sweeps and scheme.rows == 1:
        quantized, losses = yield from _or_rounded(
            target, quantized, hessian.float(), importance.float(), options.scales
        )
    # losses of a target that was moved are not those of the weight
    return Solution(quantized, damping, losses=losses if cross is None or not options.pull else None)


def _or_rounded(
    target: Tensor, quantized: QuantTensor, h: Tensor, importance: Tensor, scales: Scales
) -> Generator[Search, Ranges, tuple[QuantTensor, Tensor]]:
    """Return ``quantized`` with simple rounding in the rows where that has a smaller loss, and each row's loss.

    Few channels that dominate H, or outlying weights, can mislead the column loop.
    """
    scheme = quantized.scheme
    simple = (yield from rtn_steps(target, scheme, scales, importance)).quantized

    def losses(q: QuantTensor) -> Tensor:
        return row_losses(target, q.codes, q.scales, q.zeros, scheme, h)

    of_simple, of_found = losses(simple), losses(quantized)
    rows, least = of_simple < of_found, torch.minimum(of_simple, of_found)
    if not bool(rows.any()):
        return quantized, least
    parts = (quantized.codes, quantized.scales, quantized.zeros), (simple.codes, simple.scales, simple.zeros)
    codes, steps, zeros = (
        None if mine is None or other is None else torch.where(rows[:, None], other, mine)
        for mine, other in zip(*parts, strict=True)
    )
    assert codes is not None
    assert steps is not None
    return QuantTensor(codes, steps, zeros, scheme), least


def _order(importance: Tensor, scheme: Scheme, act_order: bool) -> Tensor:
    """Columns as they are visited, each group's together: int64 ``[in]``. Equals keep their place."""
    columns = torch.arange(len(importance), device=importance.device)
    if not act_order:
        return columns
    parts = columns.split(scheme.width(len(importance)))
    largest = torch.stack([importance[part].max() for part in parts])
    ordered = [part[torch.argsort(importance[part], descending=True, stable=True)] for part in parts]
    return torch.cat([ordered[i] for i in torch.argsort(largest, descending=True, stable=True).cpu().tolist()])


def _towards(weight: Tensor, cross: Tensor, upper: Tensor, order: Tensor, pull: float) -> Tensor:
    """``W + pull * W C (H + damping)^-1``, float32. upper: float64, Uᵀ U the inverse, columns in ``order``."""
    moved = ((weight.to(upper.dtype) @ cross.to(upper.dtype)[:, order]) @ upper.t()) @ upper
    target = weight.clone()
    target[:, order] += pull * moved.float()
    return target


def factorise(
    hessian: Tensor, dead: Tensor, importance: Tensor, order: Tensor, options: GPTQOptions
) -> tuple[Tensor | None, float]:
    """The factor with the first damping of the escalation that works, or None."""
    for damping in (options.damping, *(step for step in options.escalation if step > options.damping)):
        upper = _permuted_factor(hessian, dead, importance, damping, order)
        if upper is not None:
            return upper, damping
    return None, 0.0


def damped(hessian: Tensor, dead: Tensor, importance: Tensor, damping: float) -> Tensor:
    """H in float64 with damping on its diagonal, and nothing but the diagonal of inputs that were never seen."""
    h = hessian.to(torch.float64, copy=True)
    h[dead] = 0
    h[:, dead] = 0
    h.diagonal().copy_(importance + damping * importance.mean())
    return h


def _permuted_factor(hessian: Tensor, dead: Tensor, importance: Tensor, damping: float, order: Tensor) -> Tensor | None:
    """Upper U with Uᵀ U = (H + damping)⁻¹, columns in ``order``; None if H is not positive definite in float64.

    With H's columns turned round, ``L Lᵀ`` of them is ``M Mᵀ`` of H with an upper M, and U is M's inverse: half the
    work of inverting H and factorising the inverse.
    """
    backwards = order.flip(0)
    h = damped(hessian, dead, importance, damping)
    h = h[backwards]  # one copy at a time: of 14336 inputs each takes 1.6 GB
    h = h[:, backwards]
    lower, info = torch.linalg.cholesky_ex(h)
    del h
    if int(info) or not bool(torch.isfinite(lower).all()):
        return None
    _invert(lower)
    return lower.flip(0, 1) if bool(torch.isfinite(lower).all()) else None


TRIANGLE = 512  # columns that are inverted as one


def _invert(lower: Tensor) -> None:
    """Invert a lower triangular matrix in place: halves first, then what lies below both."""
    size = len(lower)
    if size <= TRIANGLE:
        unit = torch.eye(size, dtype=lower.dtype, device=lower.device)
        lower.copy_(torch.linalg.solve_triangular(lower, unit, upper=False))
        return
    raise_if_interrupted()
    half = size // 2
    first, below, last = lower[:half, :half], lower[half:, :half], lower[half:, half:]
    found = torch.linalg.solve_triangular(last, below, upper=False)
    below.copy_(torch.linalg.solve_triangular(first, found, upper=False, left=False).neg_())
    del found
    _invert(first)
    _invert(last)


SEARCH_STEPS = 12  # shrunken ranges tried for a group; the refinement fits the scale afterwards


def _solve(
    weight: Tensor, upper: Tensor, order: Tensor, scheme: Scheme, options: GPTQOptions, columns: ColumnLoop
) -> Generator[Search, Ranges, tuple[Tensor, Tensor, Tensor | None]]:
    """Round column by column in ``order``, feeding each column's error back into the columns not yet visited.

    Returns codes, scales, zeros. Works on the transpose, so that a column is contiguous. With d = U[j, j] and the error
    e = (w - q) / d, column k > j receives -e * U[j, k] once: inside the block at once (``columns``), beyond it when the
    block is done. Blocks end where groups do.
    """
    rows, in_features = weight.shape
    width = scheme.width(in_features)
    scales, zeros = affine.minmax_params(weight, scheme)
    alone = scheme if scheme.number != "integer" else replace(scheme, group_size=None)  # one group
    cost = upper.diagonal().square().reciprocal()
    rest = weight.t()[order].contiguous()
    pointed = scheme.number != "integer"
    if pointed:  # loops hold the numbers themselves
        columns = partial(round_numbers, scheme=scheme)
    codes = torch.empty(rest.shape, dtype=torch.float32 if pointed else torch.uint8, device=weight.device)
    begin = 0
    while begin < in_features:
        group = int(order[begin]) // width
        stop = begin + min(width, in_features - group * width)
        if options.scales == "search":
            step, zero = yield Search(rest[begin:stop].t(), alone, cost[begin:stop], SEARCH_STEPS)
            # a group of zeros keeps its scale: it takes no errors of others
            own = scales[:, group] > affine.smallest_scale(scheme)
            scales[:, group] = torch.where(own, step[:, 0], scales[:, group])
            if zeros is not None and zero is not None:
                zeros[:, group] = torch.where(own, zero[:, 0], zeros[:, group])
        scale = scales[:, group].float()
        offset = torch.full_like(scale, float(scheme.midpoint)) if zeros is None else zeros[:, group].float()
        for start in range(begin, stop, options.block):
            raise_if_interrupted()
            end = min(start + options.block, stop)
            codes[start:end], errors = columns(
                rest[start:end], upper[start:end, start:end],
                scale.expand(end - start, rows).contiguous(), offset.expand(end - start, rows).contiguous(),
                scheme.levels - 1,
            )  # fmt: skip
            if end < in_features:
                rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
        begin = stop
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(in_features, device=weight.device)
    found = codes[inverse].t().contiguous()
    return floats.encode(found, scheme) if pointed else found, scales, zeros


def round_columns(rest: Tensor, upper: Tensor, step: Tensor, offset: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """One block of columns: round each, then move its error into the block's later ones.

    rest: float32 ``[columns, out]``, the weights as they stand, changed in place.
    upper: ``[columns, columns]``, the block of U on its diagonal.
    step, offset: float32 ``[columns, out]``, scale and zero of each weight.
    top: the largest code.
    Returns codes, uint8, and errors, float32, ``[columns, out]``.
    """
    codes, errors = torch.empty_like(rest), torch.empty_like(rest)
    for j, column in enumerate(rest):
        codes[j] = torch.round(column / step[j] + offset[j]).clamp_(0, top)
        errors[j] = (column - (codes[j] - offset[j]) * step[j]) / upper[j, j]
        if j + 1 < len(rest):
            # not ``addr_``, which may fuse: other codes on other processors
            rest[j + 1 :] -= torch.outer(upper[j, j + 1 :], errors[j])
    return codes.to(torch.uint8), errors


def round_numbers(
    rest: Tensor, upper: Tensor, step: Tensor, offset: Tensor, top: int, *, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Do what ``round_columns`` does for codes that are floating-point numbers.

    offset, top: not looked at.
    scheme: which numbers there are.
    Returns the numbers in place of their codes, float32, and errors.
    """
    numbers, errors = torch.empty_like(rest), torch.empty_like(rest)
    for j, column in enumerate(rest):
        numbers[j] = floats.nearest(column / step[j], scheme)
        errors[j] = (column - numbers[j] * step[j]) / upper[j, j]
        if j + 1 < len(rest):
            rest[j + 1 :] -= torch.outer(upper[j, j + 1 :], errors[j])
    return numbers, errors


_LOSS_ELEMENTS = {True: 1 << 24, False: 1 << 21}  # weights at a time, of which each part reads a Hessian, or a root


def output_energy(
    weight: Tensor, hessian: Tensor | None, root: Tensor | None = None, less: Tensor | None = None
) -> float:
    """Compute ``tr(W H Wᵀ)``: mean squared output per token, summed over all outputs.

    Products in float32, which take half as long, sums in float64.

    hessian: [in, in], or None for that of a root.
    root: [tokens, in], R with H = Rᵀ R.
    less: [out, in], what is taken off the weight.
    """
    h = None if hessian is None else hessian.float()
    across = None if root is None else root.float().t()
    total = 0.0
    step = max(1, _LOSS_ELEMENTS[root is None] // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step].float()
        if less is not None:
            rows = rows - less[start : start + step]
        if h is not None:
            total += float(((rows @ h) * rows).sum(dtype=torch.float64))
        else:
            assert across is not None
            total += float((rows @ across).square_().sum(dtype=torch.float64))
    return total


def proxy_loss(
    weight: Tensor, dequantized: Tensor, hessian: Tensor | None, root: Tensor | None = None
) -> tuple[float, float]:
    """Compute ``tr(D H Dᵀ)`` of the error D and ``tr(W H Wᵀ)``, as ``output_energy`` does."""
    return output_energy(weight, hessian, root, dequantized), output_energy(weight, hessian, root)
