"""GPTQ: column-wise rounding with error feedback (Frantar et al., arXiv 2210.17323, algorithm 1).

Columns are visited in the order of falling ``diag(H)`` (act-order) while scales and zeros of every group are chosen
beforehand, from the weight as it stands: groups stay contiguous along the inputs, so no ``g_idx`` is needed at run time
("static groups" in the authors' code).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import Scales, Solution
from quantkit.algorithms.rtn import rtn
from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme


@dataclass(frozen=True, slots=True)
class GPTQOptions:
    """damping: of the mean diagonal, added to H's diagonal; ``escalation`` is what follows when H cannot be factorised.

    act_order: visit columns in the order of falling diag(H). scales: how each group's scale is chosen. block: columns
    per lazy update of the rest of the matrix (speed only).
    """

    damping: float = 0.01
    escalation: tuple[float, ...] = (0.05, 0.2, 1.0)
    act_order: bool = True
    scales: Scales = "search"
    block: int = 128


ColumnLoop = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""``round_columns``, or what does the same on a device."""


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    options: GPTQOptions | None = None,
    columns: ColumnLoop | None = None,
) -> Solution:
    """Quantize ``weight`` [out, in] so that ``tr(D H Dᵀ)`` of the error D is small.

    hessian: [in, in], the mean of x xᵀ over tokens; symmetric, positive semi-definite. Weights that read the same input
    may be stacked along their rows: rows do not influence one another. Inputs are not modified. A Hessian that cannot be
    factorised raises the damping, and in the end falls back to rounding (said in the Solution). Everything happens on the
    device that both are on. columns: what rounds a block of columns, instead of ``round_columns``.
    """
    options = options or GPTQOptions()
    in_features, device = weight.shape[1], weight.device
    diagonal = hessian.diagonal().double()
    dead = diagonal <= 0  # inputs that were never non-zero: nothing is known, their columns are simply rounded
    known = diagonal[~dead].mean() if bool((~dead).any()) else diagonal.new_ones(())
    importance = torch.where(dead, known, diagonal)
    importance_f = importance.float()
    order = torch.arange(in_features, device=device)
    if options.act_order:
        order = torch.argsort(importance, descending=True, stable=True)
    upper, damping = _factorise(hessian, dead, importance, order, options)
    if upper is None:
        simple = rtn(weight, scheme, options.scales, importance_f)
        return Solution(simple.quantized, None, "rounded: the Hessian could not be factorised even with full damping")
    if options.scales == "search":
        scales, zeros = affine.searched_params(weight, scheme, importance_f)
    else:
        scales, zeros = affine.minmax_params(weight, scheme)
    codes = _solve(weight, upper.float(), order, scales, zeros, scheme, options.block, columns or round_columns)
    return Solution(QuantTensor(codes, scales, zeros, scheme), damping)


def _factorise(
    hessian: Tensor, dead: Tensor, importance: Tensor, order: Tensor, options: GPTQOptions
) -> tuple[Tensor | None, float]:
    """The factor with the first damping of the escalation that works, or None."""
    for damping in (options.damping, *(step for step in options.escalation if step > options.damping)):
        upper = _permuted_factor(hessian, dead, importance, damping, order)
        if upper is not None:
            return upper, damping
    return None, 0.0


def _permuted_factor(hessian: Tensor, dead: Tensor, importance: Tensor, damping: float, order: Tensor) -> Tensor | None:
    """Upper U with Uᵀ U = (H + damping)⁻¹, columns in ``order``; None if H is not positive definite in float64."""
    h = hessian.to(torch.float64, copy=True)
    h[dead] = 0
    h[:, dead] = 0
    h.diagonal().copy_(importance + damping * importance.mean())
    h = h[order]  # one copy at a time: of 14336 inputs each takes 1.6 GB
    h = h[:, order]
    lower, info = torch.linalg.cholesky_ex(h)
    del h
    if int(info) or not bool(torch.isfinite(lower).all()):
        return None
    inverse = torch.cholesky_inverse(lower)
    del lower
    upper, info = torch.linalg.cholesky_ex(inverse, upper=True)
    return None if int(info) or not bool(torch.isfinite(upper).all()) else upper


def _solve(
    weight: Tensor, upper: Tensor, order: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, block: int,
    columns: ColumnLoop,
) -> Tensor:  # fmt: skip
    """Round column by column in ``order``, moving each column's error into the columns not yet visited.

    Works on the transpose, so that a column is contiguous. With d = U[j, j] and the error e = (w - q) / d, column k > j
    receives -e * U[j, k] once: inside the block at once (``columns``), beyond it when the block is done.
    """
    in_features = weight.shape[1]
    groups = affine.group_index(in_features, scheme, weight.device)[order]
    step = scales.float().t().contiguous()  # [groups, out]
    offset = torch.full_like(step, float(scheme.midpoint)) if zeros is None else zeros.float().t().contiguous()
    rest = weight.float().t()[order].contiguous()
    codes = torch.empty(rest.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, in_features, block):
        end = min(start + block, in_features)
        of = groups[start:end]
        codes[start:end], errors = columns(
            rest[start:end], upper[start:end, start:end], step[of], offset[of], scheme.levels - 1
        )
        if end < in_features:
            rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(in_features, device=weight.device)
    return codes[inverse].t().contiguous()


def round_columns(rest: Tensor, upper: Tensor, step: Tensor, offset: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """One block of columns: round each, then move its error into the block's later ones.

    rest: float32 ``[columns, out]``, the weights as they stand, changed in place. upper: ``[columns, columns]``, the block
    of U on its diagonal. step, offset: float32 ``[columns, out]``, scale and zero of each weight. top: the largest code.
    Returns codes, uint8, and errors, float32, ``[columns, out]``.
    """
    codes, errors = torch.empty_like(rest), torch.empty_like(rest)
    for j, column in enumerate(rest):
        codes[j] = torch.round(column / step[j] + offset[j]).clamp_(0, top)
        errors[j] = (column - (codes[j] - offset[j]) * step[j]) / upper[j, j]
        if j + 1 < len(rest):
            rest[j + 1 :].addr_(upper[j, j + 1 :], errors[j], alpha=-1)
    return codes.to(torch.uint8), errors


_LOSS_ELEMENTS = 1 << 24  # weights in float64 at a time


def proxy_loss(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> tuple[float, float]:
    """``tr(D H Dᵀ)`` and ``tr(W H Wᵀ)``: mean squared output error and output energy, per token, over all outputs."""
    h, lost, energy = hessian.double(), 0.0, 0.0
    rows = max(1, _LOSS_ELEMENTS // weight.shape[1])
    for part, rounded in zip(weight.split(rows), dequantized.split(rows), strict=True):
        delta, full = (part - rounded).double(), part.double()
        lost += float(((delta @ h) * delta).sum())
        energy += float(((full @ h) * full).sum())
    return lost, energy
