"""The column loops of GPTQ and of the refinement, compiled by numba for a CPU.

Twins of ``algorithms.gptq.round_columns`` and ``algorithms.refine.descend_columns``. torch makes a dozen calls a
column, each for a few thousand numbers: most of the time goes into the calls. Here a thread takes LANES rows of the
weight through all columns of a block, while they stay in its first cache. The operations and their order are torch's
(rounding to even, a product and then a sum, no fused multiply-add), so the codes are those of torch, whether numba is
installed or not.

Floor: per row and column of a block of 128, 128 x (multiply, add), half of them on columns that are done, and 17 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quantkit.runtime.kernels.numba.gemv import jit

LANES = 64  # rows of the weight at a time: of 128 columns 32 KB
SHARE = 1 << 24  # products: fewer, some 3 ms, are not worth a thread
ROUNDER = np.float32(8388608.0)  # 2**23: a number from 0 to 255 added to it and taken off again is rounded to even
LOWEST = np.float32(0.0)


@jit
def _subtract(total, factor, values):
    for r in range(len(values)):
        total[r] -= factor * values[r]


@jit
def _add(total, factor, values):
    for r in range(len(values)):
        total[r] += factor * values[r]


@jit
def _nearest(values, step, offset, top, codes):
    for r in range(len(values)):
        place = values[r] / step[r] + offset[r]
        place = LOWEST if place < LOWEST else place
        place = top if place > top else place
        codes[r] = (place + ROUNDER) - ROUNDER


@jit
def _round(rest, upper, step, offset, codes, errors, top, first, last):
    columns = rest.shape[0]
    code = np.empty(LANES, np.float32)
    for begin in range(first, last, LANES):
        end = min(begin + LANES, last)
        for j in range(columns):
            column, error, scale, zero = (
                rest[j, begin:end],
                errors[j, begin:end],
                step[j, begin:end],
                offset[j, begin:end],
            )
            _nearest(column, scale, zero, top, code)
            kept, pivot = codes[j, begin:end], upper[j, j]
            for r in range(len(column)):
                kept[r] = np.uint8(code[r])
            for r in range(len(column)):
                error[r] = (column[r] - (code[r] - zero[r]) * scale[r]) / pivot
            for k in range(j + 1, columns):
                _subtract(rest[k, begin:end], upper[j, k], error)


@jit
def _descend(target, error, codes, step, offset, own, pull, top, first, last):
    columns = target.shape[0]
    code, best = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    for begin in range(first, last, LANES):
        end = min(begin + LANES, last)
        change = best[: end - begin]
        for j in range(columns):
            aim, lost, pulled, curvature = target[j, begin:end], error[j, begin:end], pull[j, begin:end], own[j, j]
            kept, scale = codes[j, begin:end], step[j, begin:end]
            for r in range(len(aim)):
                best[r] = aim[r] - lost[r] + pulled[r] / curvature
            _nearest(best[: end - begin], scale, offset[j, begin:end], top, code)
            for r in range(len(aim)):
                change[r] = (kept[r] - code[r]) * scale[r]
                kept[r] = code[r]
                lost[r] += change[r]
            for k in range(j + 1, columns):
                _add(pull[k, begin:end], own[j, k], change)


@cache
def load() -> None:
    """Compile both loops, or fetch them from numba's cache.

    130 MB with numba itself, which should be there before memory is predicted.
    """
    ones = torch.ones(1, 1)
    round_columns(ones.clone(), ones, ones, ones, 1)
    descend_columns(ones, ones.clone(), ones.clone(), ones, ones, ones, ones.clone(), 1)


def round_columns(rest: Tensor, upper: Tensor, step: Tensor, offset: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Round the columns of a block one after another, like ``algorithms.gptq.round_columns``.

    rest, step, offset: float32 ``[columns, out]``, contiguous; no gradients.
    """
    codes, errors = torch.empty(rest.shape, dtype=torch.uint8), torch.empty_like(rest)
    # one memory layout: compiled once
    arrays = [each.numpy() for each in (rest, upper.contiguous(), step, offset, codes, errors)]
    _in_shares(rest.shape, lambda first, last: _round(*arrays, np.float32(top), first, last))
    return codes, errors


def descend_columns(
    target: Tensor, error: Tensor, codes: Tensor, step: Tensor, offset: Tensor, own: Tensor, pull: Tensor, top: int
) -> None:
    """Improve the codes of a block column by column, in place, like ``algorithms.refine.descend_columns``.

    All float32 and contiguous, ``[columns, out]``, own ``[columns, columns]``; no gradients.
    """
    arrays = [each.numpy() for each in (target, error, codes, step, offset, own, pull)]
    _in_shares(target.shape, lambda first, last: _descend(*arrays, np.float32(top), first, last))


def _in_shares(shape: torch.Size, work: Callable[[int, int], None]) -> None:
    """Run ``work`` over all rows of ``[columns, out]``, each part in whole LANES.

    On no more threads than torch has.
    """
    columns, rows = shape
    parts = max(1, min(torch.get_num_threads(), columns * columns * rows // SHARE))
    share = -(-rows // (parts * LANES)) * LANES
    starts = range(0, rows, share)
    if len(starts) == 1:
        work(0, rows)
        return
    with ThreadPoolExecutor(len(starts)) as pool:
        for done in [pool.submit(work, start, min(start + share, rows)) for start in starts]:
            done.result()
