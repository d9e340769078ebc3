"""GPTQ: column-wise rounding with error feedback (Frantar et al., arXiv 2210.17323, algorithm 1).

Columns are visited in the order of falling ``diag(H)`` (act-order) while scales and zeros of every group are chosen
beforehand, from the weight as it stands: groups stay contiguous along the inputs, so no ``g_idx`` is needed at run time
("static groups" in the authors' code).
"""

from __future__ import annotations

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


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, options: GPTQOptions | None = None) -> Solution:
    """Quantize ``weight`` [out, in] so that ``tr(D H Dᵀ)`` of the error D is small.

    hessian: [in, in], the mean of x xᵀ over tokens; symmetric, positive semi-definite. Weights that read the same input
    may be stacked along their rows: rows do not influence one another. Inputs are not modified. A Hessian that cannot be
    factorised raises the damping, and in the end falls back to rounding (said in the Solution).
    """
    options = options or GPTQOptions()
    in_features = weight.shape[1]
    diagonal = hessian.diagonal().double()
    dead = diagonal <= 0  # inputs that were never non-zero: nothing is known, their columns are simply rounded
    importance = torch.where(dead, diagonal[~dead].mean() if bool((~dead).any()) else torch.ones(()).double(), diagonal)
    importance_f = importance.float()
    order = torch.argsort(importance, descending=True, stable=True) if options.act_order else torch.arange(in_features)
    upper, damping = _factorise(hessian, dead, importance, order, options)
    if upper is None:
        simple = rtn(weight, scheme, options.scales, importance_f)
        return Solution(simple.quantized, None, "rounded: the Hessian could not be factorised even with full damping")
    if options.scales == "search":
        scales, zeros = affine.searched_params(weight, scheme, importance_f)
    else:
        scales, zeros = affine.minmax_params(weight, scheme)
    codes = _solve(weight, upper.float(), order, scales, zeros, scheme, options.block)
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
    h = hessian.double().clone()
    h[dead] = 0
    h[:, dead] = 0
    h.diagonal().copy_(importance + damping * importance.mean())
    h = h[order][:, order]
    lower, info = torch.linalg.cholesky_ex(h)
    if int(info) or not bool(torch.isfinite(lower).all()):
        return None
    upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if int(info) or not bool(torch.isfinite(upper).all()) else upper


def _solve(
    weight: Tensor, upper: Tensor, order: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, block: int
) -> Tensor:
    """Round column by column in ``order``, moving each column's error into the columns not yet visited.

    Works on the transpose, so that a column is contiguous. With d = U[j, j] and the error e = (w - q) / d, column k > j
    receives -e * U[j, k] once: inside the block at once, beyond it when the block is done.
    """
    in_features, top = weight.shape[1], float(scheme.levels - 1)
    groups = affine.group_index(in_features, scheme)[order]
    step = scales.float().t()[groups].contiguous()  # [in, out]
    offset = torch.full_like(step, float(scheme.midpoint)) if zeros is None else zeros.float().t()[groups].contiguous()
    rest = weight.float().t()[order].contiguous()
    codes = torch.empty_like(rest)
    for start in range(0, in_features, block):
        end = min(start + block, in_features)
        local = upper[start:end, start:end]
        errors = torch.empty_like(rest[start:end])
        for j in range(end - start):
            column, i = rest[start + j], start + j
            codes[i] = torch.round(column / step[i] + offset[i]).clamp_(0, top)
            errors[j] = (column - (codes[i] - offset[i]) * step[i]) / local[j, j]
            if j + 1 < end - start:
                rest[i + 1 : end].addr_(local[j, j + 1 :], errors[j], alpha=-1)
        if end < in_features:
            rest[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(in_features)
    return codes[inverse].t().to(torch.uint8).contiguous()


def proxy_loss(weight: Tensor, dequantized: Tensor, hessian: Tensor) -> tuple[float, float]:
    """``tr(D H Dᵀ)`` and ``tr(W H Wᵀ)``: mean squared output error and output energy, per token, over all outputs."""
    delta, h = (weight - dequantized).double(), hessian.double()
    full = weight.double()
    return float(((delta @ h) * delta).sum()), float(((full @ h) * full).sum())
