"""The search for steps and minima of ggml's block formats, compiled by numba for a CPU.

Twin of the passes over all weights in ``algorithms.kquant``. torch makes a dozen of them for each of up to 60
candidates; here LANES stretches (16 or 32 weights that share a step) stay in the first cache through all of them. The
operations and their order are torch's (IEEE division, rounding to even, sums by ``affine.group_sum``'s halves, no fused
multiply-add), so a file has the same bytes whether numba is installed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.core.blocks import KINDS, BlockKind
from quantkit.runtime.kernels.numba.gemv import jit
from quantkit.runtime.kernels.numba.ranges import LANES, ROUNDER, add_halves

F = np.float32
ZERO, ONE, TINY = F(0.0), F(1.0), F(1e-30)


@jit
def _levels(x, step, low, offset, top, ordered, middles, out):
    """What the nearest codes are multiplied with: ``kquant.levels`` of ``kquant.nearest``."""
    value = np.empty(LANES, F)
    for j in range(len(x)):
        if len(ordered):
            for r in range(LANES):
                value[r] = (x[j, r] + low[r]) / (ONE if step[r] == ZERO else step[r])
                out[j, r] = ordered[0]
            for k in range(len(middles)):
                middle, more = middles[k], ordered[k + 1] - ordered[k]
                for r in range(LANES):
                    out[j, r] += more if value[r] > middle else ZERO
        else:
            for r in range(LANES):
                code = (x[j, r] + low[r]) / (ONE if step[r] == ZERO else step[r]) + offset
                code = ZERO if code < ZERO else code
                code = top if code > top else code
                out[j, r] = ((code + ROUNDER) - ROUNDER) - offset


@jit
def _error(x, w, q, step, low, space, out):
    """Weighted squared error of each stretch; ``q``: levels of its codes."""
    for j in range(len(x)):
        for r in range(LANES):
            lost = (x[j, r] - step[r] * q[j, r]) + low[r]
            space[j, r] = (lost * lost) * w[j, r]
    add_halves(space, len(x), out)


@jit
def _one_scale(x, w, q, space, product, square, step):
    """Least squares without a minimum: ``kquant._one_scale``."""
    for j in range(len(x)):
        for r in range(LANES):
            space[j, r] = (w[j, r] * x[j, r]) * q[j, r]
    add_halves(space, len(x), product)
    for j in range(len(x)):
        for r in range(LANES):
            space[j, r] = (w[j, r] * q[j, r]) * q[j, r]
    add_halves(space, len(x), square)
    for r in range(LANES):
        step[r] = product[r] / (TINY if square[r] < TINY else square[r])


@jit
def _least_squares(x, w, q, space, sums, bounded, step, low):
    """Least squares with a minimum: ``kquant._least_squares``. sums: total, mean of all, and room for three more."""
    total, mean, first, second, product = sums[0], sums[1], sums[2], sums[3], sums[4]
    for j in range(len(x)):
        for r in range(LANES):
            space[j, r] = w[j, r] * q[j, r]
    add_halves(space, len(x), first)
    for j in range(len(x)):
        for r in range(LANES):
            space[j, r] = (w[j, r] * q[j, r]) * q[j, r]
    add_halves(space, len(x), second)
    for j in range(len(x)):
        for r in range(LANES):
            space[j, r] = (w[j, r] * q[j, r]) * x[j, r]
    add_halves(space, len(x), product)
    for r in range(LANES):
        divisor = total[r] * second[r] - first[r] * first[r]
        safe = TINY if divisor < TINY else divisor
        a = (total[r] * product[r] - first[r] * mean[r]) / safe
        b = (first[r] * product[r] - second[r] * mean[r]) / safe
        if not divisor > TINY:
            a, b = ZERO, -mean[r] / total[r]
        if bounded:
            alone = product[r] / (TINY if second[r] < TINY else second[r])
            a = alone if b < ZERO else a
            a = ZERO if a < ZERO else a
            b = ZERO if b < ZERO else b
        step[r], low[r] = a, b


@jit
def _keep(error, step, low, best):
    for r in range(LANES):
        if error[r] < best[0, r]:
            best[0, r], best[1, r], best[2, r] = error[r], step[r], low[r]


@jit
def _refit(x, w, step, low, times, minima, bounded, offset, top, ordered, middles, q, space, sums, error, best):
    """Fit step and minimum to codes and codes to them, in turn; ``best`` keeps the best of all.

    step, low: where it begins; overwritten.
    """
    _levels(x, step, low, offset, top, ordered, middles, q)
    _error(x, w, q, step, low, space, error)
    _keep(error, step, low, best)
    for _ in range(times):
        if minima:
            _least_squares(x, w, q, space, sums, bounded, step, low)
        else:
            _one_scale(x, w, q, space, sums[2], sums[3], step)
        _levels(x, step, low, offset, top, ordered, middles, q)
        _error(x, w, q, step, low, space, error)
        _keep(error, step, low, best)


@jit
def _load(weight, gain, first, x, w):
    """Bring LANES stretches, turned, beside their importance; lanes behind the last hold zeros."""
    count, own = len(weight), len(gain) > 1
    for r in range(LANES):
        row = first + r
        for j in range(len(x)):
            x[j, r] = weight[row, j] if row < count else ZERO
            w[j, r] = (gain[row if own else 0, j]) if row < count else ONE


@jit
def _extremes(x, w, space, sums, lowest, highest):
    """The range of each stretch, and what least squares need of it once."""
    for r in range(LANES):
        lowest[r], highest[r] = x[0, r], x[0, r]
    for j in range(len(x)):
        for r in range(LANES):
            lowest[r] = x[j, r] if x[j, r] < lowest[r] else lowest[r]
            highest[r] = x[j, r] if x[j, r] > highest[r] else highest[r]
            space[j, r] = w[j, r]
    add_halves(space, len(x), sums[0])
    for j in range(len(x)):
        for r in range(LANES):
            space[j, r] = w[j, r] * x[j, r]
    add_halves(space, len(x), sums[1])


@jit
def _begin(candidate, lowest, highest, minima, top, step, low):
    """Step and minimum of one candidate: factors of both ends, or a share of the largest weight and its level."""
    first, second = candidate[0], candidate[1]
    for r in range(LANES):
        if minima:
            width = (highest[r] * second - lowest[r] * first) / top
            step[r], low[r] = (ZERO if width < ZERO else width), -lowest[r] * first
        else:
            far = highest[r] if highest[r] >= -lowest[r] else -lowest[r]
            signed = far if highest[r] >= -lowest[r] else -far
            step[r], low[r] = signed * first / second, ZERO


@jit
def _search(weight, gain, candidates, refits, minima, bounded, offset, top, ordered, middles, out, begin, stop):
    width = weight.shape[1]
    x, w, q, space = (np.empty((width, LANES), F), np.empty((width, LANES), F), np.empty((width, LANES), F),
                      np.empty((width, LANES), F))  # fmt: skip
    sums, best = np.empty((5, LANES), F), np.empty((3, LANES), F)
    step, low, error = np.empty(LANES, F), np.empty(LANES, F), np.empty(LANES, F)
    lowest, highest = np.empty(LANES, F), np.empty(LANES, F)
    for first in range(begin, stop, LANES):
        _load(weight, gain, first, x, w)
        _extremes(x, w, space, sums, lowest, highest)
        if bounded:
            for r in range(LANES):
                lowest[r] = ZERO if lowest[r] > ZERO else lowest[r]
        best[0, :] = F(np.inf)
        for c in range(len(candidates)):
            _begin(candidates[c], lowest, highest, minima, top, step, low)
            if c == 0:
                best[1, :], best[2, :] = step, low
            _refit(x, w, step, low, 1, minima, bounded, offset, top, ordered, middles, q, space, sums, error, best)
        for r in range(LANES):
            step[r], low[r] = best[1, r], best[2, r]
        _refit(x, w, step, low, refits, minima, bounded, offset, top, ordered, middles, q, space, sums, error, best)
        for r in range(min(LANES, stop - first)):
            out[0, first + r], out[1, first + r], out[2, first + r] = best[0, r], best[1, r], best[2, r]


@jit
def _measure(weight, gain, steps, lows, offset, top, ordered, middles, out, begin, stop):
    width = weight.shape[1]
    x, w, q, space = (np.empty((width, LANES), F), np.empty((width, LANES), F), np.empty((width, LANES), F),
                      np.empty((width, LANES), F))  # fmt: skip
    step, low, error = np.zeros(LANES, F), np.zeros(LANES, F), np.empty(LANES, F)
    for first in range(begin, stop, LANES):
        _load(weight, gain, first, x, w)
        for r in range(min(LANES, stop - first)):
            step[r], low[r] = steps[first + r], lows[first + r]
        _levels(x, step, low, offset, top, ordered, middles, q)
        _error(x, w, q, step, low, space, error)
        for r in range(min(LANES, stop - first)):
            out[first + r] = error[r]


@jit
def _block_sums(weight, gain, steps, lows, scales, minima, has_minima, offset, top, ordered, middles, out, begin, stop):
    sub, per = weight.shape[1], scales.shape[1]
    x, w, q = np.empty((sub, LANES), F), np.empty((sub, LANES), F), np.empty((sub, LANES), F)
    parts = np.empty((5 if has_minima else 2, sub * per, LANES), F)
    step, low, total = np.zeros(LANES, F), np.zeros(LANES, F), np.empty(LANES, F)
    a, b = np.zeros(LANES, F), np.zeros(LANES, F)
    for first in range(begin, stop, LANES):
        count = min(LANES, stop - first)
        for s in range(per):
            for r in range(LANES):
                row = (first + (r if r < count else 0)) * per + s
                step[r], low[r] = steps[row], lows[row]
                a[r], b[r] = scales[first + (r if r < count else 0), s], minima[first + (r if r < count else 0), s]
                for j in range(sub):
                    x[j, r], w[j, r] = weight[row, j], gain[row, j]
            _levels(x, step, low, offset, top, ordered, middles, q)
            for j in range(sub):
                k = s * sub + j
                for r in range(LANES):
                    heavy = w[j, r] * (a[r] * q[j, r])
                    parts[0, k, r] = heavy * (a[r] * q[j, r])
                    parts[1, k, r] = heavy * x[j, r]
                if has_minima:
                    for r in range(LANES):
                        heavy = w[j, r] * b[r]
                        parts[2, k, r] = (w[j, r] * (a[r] * q[j, r])) * b[r]
                        parts[3, k, r] = heavy * b[r]
                        parts[4, k, r] = heavy * x[j, r]
        for part in range(len(parts)):
            add_halves(parts[part], sub * per, total)
            for r in range(count):
                out[part, first + r] = total[r]


@cache
def load() -> None:
    """Compile the search, or fetch it from numba's cache, before memory is predicted."""
    ones = torch.ones(1, 32)
    search(ones, ones, [(1.0, 1.0)], 1, KINDS["Q4_1"])
    errors(ones, ones, torch.ones(1), None, KINDS["Q4_1"])
    block_sums(ones, ones, torch.ones(1), None, torch.ones(1, 1), None, KINDS["Q4_1"])


def search(
    x: Tensor, w: Tensor, candidates: Sequence[tuple[float, float]], refits: int, kind: BlockKind
) -> tuple[Tensor, Tensor, Tensor]:
    """Find step and minimum of every stretch.

    x: float32 ``[stretches, sub]``, weights. w: as ``x`` or ``[1, sub]``, importance.
    candidates: factors of the lower and the upper end for kinds with minima; else a share of the largest weight, and
        the level that it gets.
    refits: how often the best is fitted again.

    Returns step, what is subtracted (zeros for kinds without minima), and the error: float32 ``[stretches]`` each.
    """
    out = torch.empty(3, len(x))
    given = (np.array(candidates, dtype=F), refits, kind.minima, bool(kind.scale_bits), *_kind(kind))
    _in_shares(_search, x, w, given, out, len(x))
    return out[1], out[2], out[0]


def errors(x: Tensor, w: Tensor, step: Tensor, low: Tensor | None, kind: BlockKind) -> Tensor:
    """Return the weighted squared error of each stretch with its nearest codes, float32 ``[stretches]``.

    x, w: as ``search`` has them. step, low: float32 ``[stretches]``.
    """
    out = torch.empty(len(x))
    lows = torch.zeros(len(x)) if low is None else low
    _in_shares(_measure, x, w, (step.contiguous().numpy(), lows.contiguous().numpy(), *_kind(kind)), out, len(x))
    return out


def block_sums(
    x: Tensor, w: Tensor, step: Tensor, low: Tensor | None, scales: Tensor, minima: Tensor | None, kind: BlockKind
) -> Tensor:
    """Return the sums that d and dmin of a block are fitted with, float32 ``[5 or 2, blocks]``.

    They are those of aa, ax, ab, bb and bx (the first two without minima), a the integer scale times the level of the
    nearest code, b the integer minimum, weighted.

    x, w, step, low: as ``errors`` has them. scales, minima: float32 ``[blocks, stretches of a block]``.
    """
    out = torch.empty(2 if minima is None else 5, len(scales))
    lows = torch.zeros(len(x)) if low is None else low
    arrays = [each.contiguous().numpy() for each in (step, lows, scales, scales if minima is None else minima)]
    _in_shares(_block_sums, x, w, (*arrays, minima is not None, *_kind(kind)), out, len(scales))
    return out


@cache
def _kind(kind: BlockKind) -> tuple[Any, ...]:
    """Return offset, top, the levels of a table in order, and the middles between them (empty without a table)."""
    ordered = np.array(sorted(kind.table or ()), dtype=F)
    return F(kind.offset), F(kind.top), ordered, (ordered[1:] + ordered[:-1]) / F(2)


def _in_shares(run: Callable[..., None], x: Tensor, w: Tensor, given: tuple[Any, ...], out: Tensor, count: int) -> None:
    """Run compiled code on all stretches, or blocks of them, in as many threads as torch has. count: of those."""
    arrays = [each.contiguous().numpy() for each in (x, w)]
    tiles = -(-count // LANES)
    parts = max(1, min(torch.get_num_threads(), tiles))
    share = max(1, -(-tiles // parts)) * LANES

    def part(first: int) -> None:
        run(*arrays, *given, out.numpy(), first, min(first + share, count))

    starts = range(0, count, share)
    if len(starts) < 2:
        for first in starts:
            part(first)
        return
    with ThreadPoolExecutor(len(starts)) as pool:
        list(pool.map(part, starts))
