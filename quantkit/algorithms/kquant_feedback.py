"""GPTQ's column loop on ggml's block formats: scales searched by ``algorithms.kquant``, errors fed back."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.algorithms.gptq import ColumnLoop, GPTQOptions, factorise, round_columns
from quantkit.algorithms.kquant import joined, kquant, levels, nearest
from quantkit.core.blocks import BlockCodes, BlockKind, combined
from quantkit.core.interrupt import raise_if_interrupted


def kquant_feedback(
    weight: Tensor, hessian: Tensor, kind: BlockKind, damping: float = 0.01, columns: ColumnLoop | None = None
) -> tuple[BlockCodes, float | None]:
    """Round a weight as GPTQ does: each column's error is made up for by those not yet rounded.

    Scales of a block are searched when its first column is reached, from the weights as they stand then, with the loss
    that the loop itself will pay. Rows in which simple rounding loses less (it happens to outlying ones) take that.

    weight: float ``[out, in]``; ``in`` is a multiple of ``kind.width``.
    hessian: ``[in, in]``, the mean of x xᵀ.
    damping: share of the mean diagonal that is added to the Hessian's.
    columns: a kernel that does what ``gptq.round_columns`` does.

    Returns the weight, and the damping that was needed; None if the Hessian could not be factorised at all: the weight
    is then only searched.
    """
    diagonal = hessian.diagonal().double()
    dead = diagonal <= 0
    known = diagonal[~dead].mean() if bool((~dead).any()) else diagonal.new_ones(())
    importance = torch.where(dead, known, diagonal)
    simple = kquant(weight, kind, importance)
    order = _visits(importance, kind)
    upper, used = factorise(hessian, dead, importance, order, GPTQOptions(damping=damping))
    if upper is None:
        return simple, None
    found = _feedback(weight.float(), upper.float(), order, kind, columns or round_columns)
    return _better_rows(weight.float(), found, simple, hessian.float()), used


def _visits(importance: Tensor, kind: BlockKind) -> Tensor:
    """Return columns as they are visited: blocks by their largest importance, inside them by falling importance."""
    parts = importance.reshape(-1, kind.width)
    inside = torch.argsort(parts, dim=1, descending=True, stable=True)
    blocks = torch.argsort(parts.amax(-1), descending=True, stable=True)
    return (inside + torch.arange(len(parts), device=parts.device)[:, None] * kind.width)[blocks].flatten()


def _feedback(weight: Tensor, upper: Tensor, order: Tensor, kind: BlockKind, columns: ColumnLoop) -> BlockCodes:
    """Round block after block. upper: Uᵀ U the Hessian's inverse, columns in ``order``."""
    rest, width = weight.t()[order].contiguous(), kind.width
    cost = upper.diagonal().square().reciprocal()
    done: dict[int, BlockCodes] = {}
    for begin in range(0, len(order), width):
        raise_if_interrupted()
        stop = begin + width
        inside = order[begin:stop] % width
        back = torch.argsort(inside)
        block = kquant(rest[begin:stop][back].t(), kind, cost[begin:stop][back])
        part = upper[begin:stop, begin:stop]
        if kind.table is None:
            step, offset = (values[inside] for values in _line(block))
            codes, errors = columns(rest[begin:stop], part, step, offset, kind.top)
        else:
            steps = block.steps().repeat_interleave(kind.sub, dim=1).t()[inside]
            codes, errors = _table_columns(rest[begin:stop], part, steps, kind)
        if stop < len(order):
            rest[stop:].addmm_(upper[begin:stop, stop:].t(), errors, alpha=-1)
        codes = codes[back].t().contiguous()
        done[int(order[begin]) // width] = BlockCodes(kind, codes, block.d, block.scales, block.dmin, block.minima)
    return joined([done[index] for index in sorted(done)], dim=1)


NO_STEP = 1e-20  # stands for a step of 0: every code then means the same number, up to rounding


def _line(block: BlockCodes) -> tuple[Tensor, Tensor]:
    """Return step and offset of every column, ``[in, out]``: the value of a code is ``(code - offset) * step``."""
    steps, lows = block.steps(), block.lows()
    steps = torch.where(steps == 0, NO_STEP, steps)
    offsets = torch.full_like(steps, float(block.kind.offset)) if lows is None else lows / steps
    step, offset = (t.repeat_interleave(block.kind.sub, dim=1).t().contiguous() for t in (steps, offsets))
    return step, offset


def _table_columns(rest: Tensor, upper: Tensor, steps: Tensor, kind: BlockKind) -> tuple[Tensor, Tensor]:
    """Round columns as ``gptq.round_columns`` does, to the entries of a table."""
    codes, errors = torch.empty(rest.shape, dtype=torch.uint8, device=rest.device), torch.empty_like(rest)
    for j, column in enumerate(rest):
        codes[j] = nearest(column, steps[j], None, kind)
        errors[j] = (column - levels(codes[j], kind) * steps[j]) / upper[j, j]
        if j + 1 < len(rest):
            rest[j + 1 :] -= torch.outer(upper[j, j + 1 :], errors[j])
    return codes, errors


def _better_rows(weight: Tensor, found: BlockCodes, simple: BlockCodes, h: Tensor) -> BlockCodes:
    """Return ``found``, but ``simple`` in the rows where that loses less."""

    def losses(blocks: BlockCodes) -> Tensor:
        lost = weight - blocks.dequantize()
        return ((lost @ h) * lost).sum(-1)

    rows = (losses(simple) < losses(found))[:, None]
    return combined([simple, found], lambda other, mine: torch.where(rows, other, mine))
