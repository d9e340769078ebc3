"""Refine a rounding: coordinate descent over the codes, then the best scales for the codes.

Both lower the same loss ``tr(D H Dᵀ)`` of the error ``D = W - Q`` and neither can raise it. GPTQ visits every column
once and its first decisions know nothing of the later ones; here each code is chosen again given all others. The closed
form of a code is that of Gauss-Seidel (Behdin et al., QuantEase, arXiv 2309.01885, equation 7): the best weight in
column j given the rest of its row,

    w_j + sum over k != j of D_k H_kj / H_jj,

rounded to the grid. Of the scales, with the codes C fixed, a row's loss is quadratic: its groups' scales solve
``A s = b`` with ``A_gh = c_g H_gh c_hᵀ`` and ``b_g = c_g (H wᵀ)_g``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.rounding import scales as floats
from quantkit.core.scheme import Scheme

BLOCK = 128  # columns whose gradients are brought up to date together
_ELEMENTS, _ROWS = 1 << 21, 512  # weights in work at a time on a CPU, and rows at least: some nine times as many floats
_ELEMENTS_GPU = 1 << 25
# a scale may change by this factor at most: beyond it the equations are ill-conditioned, not the range wrong
REACH = 2.0


Descent = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


def refine(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, hessian: Tensor,
    *, sweeps: int = 2, refit: bool = True, descent: Descent | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Improve codes (uint8 ``[out, in]``) and scales (``[out, groups]``, storage dtype) for float ``weight`` [out, in].

    Each sweep visits every column once and then fits the scales, if ``refit``. No step raises a row's loss: a code is
    the best one given all others, and scales that lose more are not taken. Rows do not influence one another. Nothing
    is modified.

    hessian: ``[in, in]``, positive diagonal (damped).
    descent: instead of ``descend_columns``.
    """
    h = hessian.float()
    size = _ELEMENTS if weight.device.type == "cpu" else _ELEMENTS_GPU
    rows = max(_ROWS, size // weight.shape[1])  # every piece reads the whole Hessian
    parts = []
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        w, c, s, z = weight[part].float(), codes[part], scales[part], None if zeros is None else zeros[part]
        for _ in range(sweeps):
            c = descend(w, c, s, z, scheme, h, descent)
            if refit:
                s = fit_scales(w, c, s, z, scheme, h)
        parts.append((c, s))
    return torch.cat([c for c, _ in parts]), torch.cat([s for _, s in parts])


def descend(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, h: Tensor,
    descent: Descent | None = None,
) -> Tensor:  # fmt: skip
    """Choose every code again in one sweep over the columns, from left to right: uint8 ``[out, in]``.

    h: float32 ``[in, in]``. Works on the transpose, as GPTQ does.
    """
    width = weight.shape[1]
    target = weight.t().contiguous()
    step = affine.expand_groups(scales.float(), width, scheme).t().contiguous()
    pointed = scheme.number != "integer"
    offset = torch.full_like(step, 0.0 if pointed else float(scheme.midpoint))
    if zeros is not None:
        offset = affine.expand_groups(zeros.float(), width, scheme).t().contiguous()
    current = floats.decode(codes, scheme).t().contiguous() if pointed else codes.t().float().contiguous()
    if pointed:  # loops hold the numbers themselves
        descent = partial(descend_numbers, scheme=scheme)
    error = target - (current - offset) * step
    for start in range(0, width, BLOCK):
        raise_if_interrupted()
        part = slice(start, min(start + BLOCK, width))
        own, pull = h[part, part].contiguous(), h[part] @ error
        (descent or descend_columns)(
            target[part], error[part], current[part], step[part], offset[part], own, pull, scheme.levels - 1
        )
    found = current.t().contiguous()
    return floats.encode(found, scheme) if pointed else found.to(torch.uint8)


def descend_columns(
    target: Tensor, error: Tensor, codes: Tensor, step: Tensor, offset: Tensor, own: Tensor, pull: Tensor, top: int
) -> None:
    """Choose each code of one block of columns again, and tell the block's later columns.

    All are float32 ``[columns, out]`` but ``own``.

    target: the weights.
    error: what they lack, changed in place.
    found: their codes, changed in place.
    step, offset: scale and zero point of each.
    own: ``[columns, columns]``, H's block on its diagonal.
    pull: the gradient's half, ``(D H)_j``, of the columns as they stand, overwritten.
    top: the largest code.
    """
    for j in range(len(target)):
        best = target[j] - error[j] + pull[j] / own[j, j]
        code = (best / step[j]).add_(offset[j]).round_().clamp_(0, top)
        change = (codes[j] - code).mul_(step[j])  # of the error
        codes[j] = code
        error[j] += change
        pull[j + 1 :] += torch.outer(own[j, j + 1 :], change)  # not ``addr_``, see round_columns


def descend_numbers(
    target: Tensor, error: Tensor, numbers: Tensor, step: Tensor, offset: Tensor, own: Tensor, pull: Tensor, top: int,
    *, scheme: Scheme,
) -> None:  # fmt: skip
    """Do what ``descend_columns`` does for codes that are floating-point numbers; ``numbers`` stand in their place."""
    for j in range(len(target)):
        best = target[j] - error[j] + pull[j] / own[j, j]
        number = floats.nearest(best / step[j], scheme)
        change = (numbers[j] - number).mul_(step[j])
        numbers[j] = number
        error[j] += change
        pull[j + 1 :] += torch.outer(own[j, j + 1 :], change)


def fit_scales(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, h: Tensor
) -> Tensor:
    """Solve for the scales with the smallest loss for these codes, rounded to their storage dtype: ``[out, groups]``.

    All scales of a row are solved for together. A scale that would change sign, or by more than REACH, stays; so does
    the smallest there is, which groups of zeros have. A row whose loss would not fall, after the rounding, stays as it
    is.

    What is solved for is the change t from the scales that are there: ``A t = r`` with ``r_g = c_g (H d)_g`` of the
    error d. It changes the loss by ``t A t - 2 r t``: two small numbers, where losses would be differences of large
    ones.
    """
    groups = scheme.groups(weight.shape[1])
    steps = affine.steps(codes, zeros, scheme)
    curvature = _curvature(steps, scheme, h)
    error = weight - affine.dequantize(codes, scales, zeros, scheme)
    right = affine.split_groups((error @ h).mul_(steps), scheme).sum(-1).double()
    del error, steps
    held = scales.double()
    # towards the scales that are there: a group of zeros only, or two that act alike, would leave the equations
    # singular
    ridge = 1e-6 * curvature.diagonal(dim1=1, dim2=2).mean(1)[:, None] + 1e-30
    solved = held + torch.linalg.solve(curvature + torch.diag_embed(ridge.expand(-1, groups)), right)
    usable = (solved > held / REACH) & (solved < held * REACH) & (held > affine.smallest_scale(scheme))
    fitted = affine.store_scale(torch.where(usable, solved, held).float(), scheme)
    change = fitted.double() - held
    gain = torch.einsum("rg,rgh,rh->r", change, curvature, change) - 2 * (right * change).sum(1)
    return torch.where((gain < 0)[:, None], fitted, scales)


def _curvature(steps: Tensor, scheme: Scheme, h: Tensor) -> Tensor:
    """Compute ``A_gh = c_g H_gh c_hᵀ`` of every row c: float64 ``[out, groups, groups]``.

    A is symmetric: half of the products are enough.
    """
    rows, in_features = steps.shape
    width, groups = scheme.width(in_features), scheme.groups(in_features)
    found = torch.empty(rows, groups, groups, dtype=torch.float64, device=steps.device)
    for g in range(groups):
        columns, rest = slice(g * width, (g + 1) * width), slice(g * width, None)
        products = (steps[:, columns] @ h[columns, rest]).mul_(steps[:, rest])
        found[:, g, g:] = affine.split_groups(products, scheme).sum(-1)
        found[:, g:, g] = found[:, g, g:]
    return found


def row_losses(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme, h: Tensor
) -> Tensor:
    """Compute ``d H dᵀ`` of every row's error d: ``[out]``."""
    error = weight - affine.dequantize(codes, scales, zeros, scheme)
    return ((error @ h) * error).sum(1)
