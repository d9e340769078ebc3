"""The search for scales and zero points of groups, compiled by numba for a CPU.

Twins of ``core.affine.searched_params`` and of ``algorithms.hqq``'s search. torch makes a dozen passes over the weights
for each of up to 70 candidates; here LANES rows of one group stay in the first cache through all of them. The
operations and their order are torch's (IEEE division, rounding to even, sums by ``affine.group_sum``'s halves, no fused
multiply-add), so the scales are those of torch, whether numba is installed or not, and those of any processor.

Floor: per weight and candidate one division, which takes about as long as the other nine operations together.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.runtime.kernels.numba.gemv import jit
from quantkit.runtime.kernels.numba.ir import as_bits, as_float

LANES = 64  # rows at a time: of a group of 128 inputs 32 KB
WIDEST = 512  # inputs of a group: the weights, their importance and the errors of wider ones leave the second cache
F = np.float32
ROUNDER = F(12582912.0)  # 1.5 * 2**23: a small number added to it and taken off again is rounded to even
ZERO, ONE, SMALLEST_SUM, SMALLEST_SIZE = F(0.0), F(1.0), F(1e-30), F(1e-8)
INFINITE = F(np.inf)


@jit
def _stored(scale, half, smallest, kept):
    """Round scales to fp16 (``half``) or bf16, not below ``smallest``, which is a normal number of both."""
    drop = np.int32(13) if half else np.int32(16)
    middle, mask = np.int32((1 << (drop - 1)) - 1), np.int32(-1) << drop
    for r in range(LANES):
        value = smallest if scale[r] < smallest else scale[r]
        bits = as_bits(value)
        kept[r] = as_float((bits + middle + ((bits >> drop) & np.int32(1))) & mask)


@jit
def add_halves(values, width, out):
    """Sum ``[width, LANES]`` over its rows, halves onto halves: ``affine.group_sum``."""
    left = width
    while left > 1:
        half = (left + 1) // 2
        for j in range(left - half):
            for r in range(LANES):
                values[j, r] += values[j + half, r]
        left = half
    for r in range(LANES):
        out[r] = values[0, r]


@jit
def _bounds(low, high, top, zero, asymmetric, middle):
    """The lowest and highest code less the zero of each lane."""
    for r in range(LANES):
        offset = zero[r] if asymmetric else middle
        low[r] = -offset
        high[r] = top - offset


@jit
def _error(weight, gain, scale, low, high, space, width, out):
    """Weighted squared rounding error of each lane's group."""
    for j in range(width):
        for r in range(LANES):
            code = weight[j, r] / scale[r]
            code = low[r] if code < low[r] else code
            code = high[r] if code > high[r] else code
            code = (code + ROUNDER) - ROUNDER
            delta = code * scale[r] - weight[j, r]
            space[j, r] = (delta * delta) * gain[j, r]
    add_halves(space, width, out)


@jit
def _from_range(low, high, left, right, top, middle, asymmetric, half, smallest, scale, zero):
    """Scale and zero of the shrunken ranges: ``affine.params_from_range``."""
    for r in range(LANES):
        least, most = low[r] * left, high[r] * right
        if asymmetric:
            scale[r] = (most - least) / top
        else:
            scale[r] = (most if most > -least else -least) / (middle - ONE)
    _stored(scale, half, smallest, scale)
    if asymmetric:
        for r in range(LANES):
            place = ((-(low[r] * left)) / scale[r] + ROUNDER) - ROUNDER
            place = ZERO if place < ZERO else place
            zero[r] = top if place > top else place


@jit
def _too_large(scale, largest, over):
    """What is added to the scale that is kept: infinity where that of the whole range overflows its dtype."""
    for r in range(LANES):
        over[r] = INFINITE if scale[r] > largest else ZERO


@jit
def _keep(error, scale, zero, best, best_scale, best_zero):
    for r in range(LANES):
        if error[r] < best[r]:
            best[r], best_scale[r], best_zero[r] = error[r], scale[r], zero[r]


@jit
def _fit(weight, gain, scale, low, high, space, width, square, product, half, smallest, fitted):
    """The scale with the least squares for the codes of ``scale``: ``algorithms.hqq``'s fit."""
    for j in range(width):
        for r in range(LANES):
            code = weight[j, r] / scale[r]
            code = low[r] if code < low[r] else code
            code = high[r] if code > high[r] else code
            code = (code + ROUNDER) - ROUNDER
            space[j, r] = (code * code) * gain[j, r]
    add_halves(space, width, square)
    for j in range(width):
        for r in range(LANES):
            code = weight[j, r] / scale[r]
            code = low[r] if code < low[r] else code
            code = high[r] if code > high[r] else code
            code = (code + ROUNDER) - ROUNDER
            space[j, r] = (code * weight[j, r]) * gain[j, r]
    add_halves(space, width, product)
    for r in range(LANES):
        divisor = SMALLEST_SUM if square[r] < SMALLEST_SUM else square[r]
        value = product[r] / divisor
        fitted[r] = value if square[r] > ZERO and value > ZERO else scale[r]
    _stored(fitted, half, smallest, fitted)


@jit
def _half_quadratic(weight, share, scale, top, beta, iterations, space, width, zero):
    """The zero point of ``scale`` by half-quadratic splitting, rounded; ``zero`` begins as -low / scale."""
    for _ in range(iterations):
        for j in range(width):
            for r in range(LANES):
                place = weight[j, r] / scale[r]
                code = place + zero[r]
                code = ZERO if code < ZERO else code
                code = top if code > top else code
                code = (code + ROUNDER) - ROUNDER
                left = place - (code - zero[r])
                size = abs(left)
                size = SMALLEST_SIZE if size < SMALLEST_SIZE else size
                size -= (ONE / np.sqrt(size)) / beta
                size = ZERO if size < ZERO else size
                outlier = -size if left < ZERO else size
                space[j, r] = ((code + outlier) - place) * share[j, r]
        add_halves(space, width, zero)
    for r in range(LANES):
        place = (zero[r] + ROUNDER) - ROUNDER
        place = ZERO if place < ZERO else place
        zero[r] = top if place > top else place


@jit
def _load(weight, gain, first, begin, tile, gains, low, high, width):
    """Bring LANES rows of a group, turned, beside their importance and extremes; lanes without a row hold zeros."""
    rows = weight.shape[0]
    for r in range(LANES):
        row = first + r
        least, most = ZERO, ZERO
        own = row if gain.shape[0] > 1 and row < rows else 0
        for j in range(width):
            value = weight[row, begin + j] if row < rows else ZERO
            tile[j, r] = value
            gains[j, r] = gain[own, begin + j]
            least = value if value < least else least
            most = value if value > most else most
        low[r], high[r] = least, most


@jit
def _search(
    weight, gain, sides, fits, beta, iterations, width, top, middle, asymmetric, half, smallest, largest, scales,
    zeros, first, last,
):  # fmt: skip
    tile, gains, space = np.empty((width, LANES), F), np.empty((width, LANES), F), np.empty((width, LANES), F)
    low, high, least, most = np.empty(LANES, F), np.empty(LANES, F), np.empty(LANES, F), np.empty(LANES, F)
    scale, zero, error, fitted = np.empty(LANES, F), np.zeros(LANES, F), np.empty(LANES, F), np.empty(LANES, F)
    best, best_scale, best_zero = np.empty(LANES, F), np.empty(LANES, F), np.zeros(LANES, F)
    square, product, total = np.empty(LANES, F), np.empty(LANES, F), np.empty(LANES, F)
    over, share = np.empty(LANES, F), np.empty((width, LANES), F)
    for row in range(first, last, LANES):
        for group in range(scales.shape[1]):
            _load(weight, gain, row, group * width, tile, gains, low, high, width)
            for side in range(len(sides)):
                left, right = sides[side, 0], sides[side, 1]
                _from_range(low, high, left, right, top, middle, asymmetric, half, smallest, scale, zero)
                _bounds(least, most, top, zero, asymmetric, middle)
                _error(tile, gains, scale, least, most, space, width, error)
                if side == 0:
                    best[:], best_scale[:], best_zero[:] = error, scale, zero
                    _too_large(scale, largest, over)
                else:
                    _keep(error, scale, zero, best, best_scale, best_zero)
            if asymmetric and iterations:
                for r in range(LANES):
                    scale[r] = (high[r] - low[r]) / top
                _stored(scale, half, smallest, scale)
                for r in range(LANES):
                    zero[r] = -low[r] / scale[r]
                for j in range(width):
                    for r in range(LANES):
                        space[j, r] = gains[j, r]
                add_halves(space, width, total)
                for j in range(width):
                    for r in range(LANES):
                        share[j, r] = gains[j, r] / (SMALLEST_SUM if total[r] < SMALLEST_SUM else total[r])
                _half_quadratic(tile, share, scale, top, beta, iterations, space, width, zero)
                _bounds(least, most, top, zero, asymmetric, middle)
                _fit(tile, gains, scale, least, most, space, width, square, product, half, smallest, fitted)
                _error(tile, gains, fitted, least, most, space, width, error)
                _keep(error, fitted, zero, best, best_scale, best_zero)
            for _ in range(fits):
                _bounds(least, most, top, best_zero, asymmetric, middle)
                _fit(tile, gains, best_scale, least, most, space, width, square, product, half, smallest, fitted)
                _error(tile, gains, fitted, least, most, space, width, error)
                _keep(error, fitted, best_zero, best, best_scale, best_zero)
            for r in range(min(LANES, last - row)):
                scales[row + r, group], zeros[row + r, group] = best_scale[r] + over[r], best_zero[r]


def takes(width: int, in_features: int) -> bool:
    """Whether groups of this width are searched here: they divide the row, and fit the cache."""
    return width <= WIDEST and in_features % width == 0


@cache
def load() -> None:
    """Compile the search, or fetch it from numba's cache, before memory is predicted."""
    ones = torch.ones(1, 32)
    search_hqq(ones, ones, 32, (1.0,), 1, 10.0, 1, bits=4, symmetric=False, half=True, smallest=2.0**-14)


def search(
    weight: Tensor, gain: Tensor, width: int, sides: Sequence[tuple[float, float]], **kind: Any
) -> tuple[Tensor, Tensor]:
    """Find the best scale and zero point of every group among shrunken ranges.

    weight: float32 ``[out, in]``. gain: float32 ``[1 or out, in]``, importance.
    width: of a group, which ``takes``.
    sides: factors of the lower and the upper end.
    kind: bits, symmetric, half (scales are fp16, else bf16), smallest scale.

    Returns float32 ``[out, groups]`` twice. Scales are numbers of their storage dtype, and infinite where it is too
    small for the whole range.
    """
    factors = np.array(sides, dtype=F)
    return _in_shares(weight, gain, width, (factors, 0, F(1.0), 0), kind)


def search_hqq(
    weight: Tensor, gain: Tensor, width: int, shrinks: Sequence[float], fits: int, beta: float, iterations: int,
    **kind: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Find the best scale and zero point of every group as ``algorithms.hqq`` does.

    shrinks: factors of the range. fits: how often the best scale is fitted to its codes.
    beta, iterations: of the half-quadratic solver.
    The rest as in ``search``.
    """
    both = np.array([(shrink, shrink) for shrink in shrinks], dtype=F)
    return _in_shares(weight, gain, width, (both, fits, F(beta), iterations), kind)


def _in_shares(
    weight: Tensor, gain: Tensor, width: int, own: tuple[Any, ...], kind: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Search all rows, in as many threads as torch has. own: sides, and what ``search_hqq`` does besides."""
    rows, levels = weight.shape[0], 1 << kind["bits"]
    scales, zeros = torch.empty(rows, weight.shape[1] // width), torch.empty(rows, weight.shape[1] // width)
    largest = F(65504.0 if kind["half"] else torch.finfo(torch.bfloat16).max)
    if not rows:
        return scales, zeros
    given = (width, F(levels - 1), F(levels // 2), not kind["symmetric"], kind["half"], F(kind["smallest"]), largest)
    arrays = [each.detach().contiguous().numpy() for each in (weight, gain)]
    out = (scales.numpy(), zeros.numpy())
    tiles = -(-rows // LANES)
    parts = max(1, min(torch.get_num_threads(), tiles))
    share = -(-tiles // parts) * LANES

    def part(first: int) -> None:
        _search(*arrays, *own, *given, *out, first, min(first + share, rows))

    starts = range(0, rows, share)
    if len(starts) == 1:
        part(0)
        return scales, zeros
    with ThreadPoolExecutor(len(starts)) as pool:
        list(pool.map(part, starts))
    return scales, zeros
