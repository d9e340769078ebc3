"""Search for scales, minima and codes of ggml's block formats (``core.blocks``), weighted by importance.

llama.cpp tries a row of ranges for every 16 or 32 weights, fits scale and minimum to each by least squares, then rounds
scales and minima to 4 or 6 bits and stays there (ggml-quants.c: make_qkx3_quants, make_qp_quants). Here the last step
is searched, too: with the integers chosen, d and dmin are fitted once more over the whole block of 256 and rounded to
float16, codes follow, and each integer then tries its neighbours with the codes that go with them. All of that keeps
whatever has the smaller weighted squared error, block by block, so that no step makes it worse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.core import compiled
from quantkit.core.affine import group_sum
from quantkit.core.blocks import BlockCodes, BlockKind, combined
from quantkit.core.interrupt import raise_if_interrupted

RANGES = 20  # tried for each stretch of weights that shares a scale
QUICK_RANGES = 4
SMALLEST_RANGE = 0.55  # of the whole range: below it too much is cut off, at 2 bits even less is never best
REFITS = 3  # of codes to a scale, and of the scale to codes, in turn
SWEEPS = 2  # over d, dmin and the neighbours of the integers
PIECE = 1 << 18  # weights at a time: temporaries of 1 MB stay in the processor's cache
LEAST_SHARE = 1e-4  # of the mean importance that every input keeps: a block of unused inputs still gets a scale
TINY = 1e-30  # below every weight: a divisor that is never zero


def kquant(weight: Tensor, kind: BlockKind, importance: Tensor | None = None, *, quick: bool = False) -> BlockCodes:
    """Round a weight to the nearest codes of searched scales.

    weight: float ``[out, in]``; ``in`` is a multiple of ``kind.width``.
    importance: not negative, ``[in]``: the mean square of each input, say; None: all count the same.
    quick: try few ranges, and no neighbours of integers: a first impression of what the kind costs.
    Returns codes, scales and minima on the weight's device.
    """
    gain = weighting(importance, weight)
    step = max(1, PIECE // weight.shape[1])
    parts = []
    for rows in weight.split(step):
        raise_if_interrupted()
        parts.append(_solve(rows.float().contiguous(), gain.expand(len(rows), -1), kind, quick))
    return joined(parts)


def weighting(importance: Tensor | None, weight: Tensor) -> Tensor:
    """Return importance as float32 ``[1, in]`` of mean 1, none of it below ``LEAST_SHARE``."""
    if importance is None:
        return weight.new_ones((1, weight.shape[1]), dtype=torch.float32)
    gain = importance.float().reshape(1, -1)
    mean = gain.mean()
    return torch.ones_like(gain) if not float(mean) > 0 else (gain / mean).clamp(min=LEAST_SHARE)


def joined(parts: list[BlockCodes], dim: int = 0) -> BlockCodes:
    """Put weights below each other (dim 0), or side by side (dim 1)."""
    return combined(parts, lambda *values: torch.cat(values, dim=dim))


def _solve(weight: Tensor, gain: Tensor, kind: BlockKind, quick: bool) -> BlockCodes:
    """Choose everything for some rows. weight, gain: float32 ``[rows, in]``."""
    x, w = (t.reshape(-1, kind.sub) for t in (weight, gain))
    if kind.exponent:
        return _powers(x, w, kind, len(weight))
    ranges = QUICK_RANGES if quick else RANGES
    found = _ranged(x, w, kind, ranges) if kind.minima else _centred(x, w, kind, ranges)
    if kind.scale_bits:
        return _integers(found, x, w, kind, len(weight), 0 if quick else SWEEPS)
    d, low = found.step.half(), None if found.low is None else (-found.low).half()
    codes = nearest(x, d.float()[:, None], None if low is None else -low.float()[:, None], kind)
    rows = len(weight)
    return BlockCodes(
        kind, codes.reshape(rows, -1), d.reshape(rows, -1), None, None if low is None else low.reshape(rows, -1)
    )


@dataclass
class _Found:
    """Scale, minimum and error of every stretch: float32 ``[stretches]``; low is None for kinds without minima."""

    step: Tensor
    low: Tensor | None
    error: Tensor

    def take(self, better: Tensor, other: _Found) -> None:
        """Take another's values where they are better."""
        self.step = torch.where(better, other.step, self.step)
        self.error = torch.where(better, other.error, self.error)
        if self.low is not None and other.low is not None:
            self.low = torch.where(better, other.low, self.low)


def nearest(x: Tensor, step: Tensor, low: Tensor | None, kind: BlockKind) -> Tensor:
    """Return the nearest codes, uint8.

    x: float32. step, low: as it broadcasts; a step of 0 leaves no choice.
    """
    scaled = (x if low is None else x + low) / torch.where(step == 0, 1.0, step)
    if kind.table is not None:
        return _nearest_in_table(scaled, kind.table)
    return torch.round(scaled + kind.offset).clamp_(0, kind.top).to(torch.uint8)


def _nearest_in_table(scaled: Tensor, table: tuple[int, ...]) -> Tensor:
    values = torch.tensor(table, dtype=torch.float32, device=scaled.device)
    ordered, order = torch.sort(values, stable=True)
    middles = (ordered[1:] + ordered[:-1]) / 2
    return order[torch.bucketize(scaled, middles)].to(torch.uint8)


def levels(codes: Tensor, kind: BlockKind) -> Tensor:
    """Return what codes are multiplied with, float32."""
    if kind.table is not None:
        return torch.tensor(kind.table, dtype=torch.float32, device=codes.device)[codes.long()]
    return codes.float() - kind.offset


def _error(x: Tensor, w: Tensor, step: Tensor, low: Tensor | None, kind: BlockKind) -> tuple[Tensor, Tensor]:
    """Return the weighted squared error of each stretch, and the levels of its nearest codes."""
    q = levels(nearest(x, step[:, None], None if low is None else low[:, None], kind), kind)
    lost = x - step[:, None] * q
    if low is not None:
        lost = lost + low[:, None]
    return group_sum(lost.square_() * w), q


def _errors(x: Tensor, w: Tensor, step: Tensor, low: Tensor | None, kind: BlockKind) -> Tensor:
    """Return the weighted squared error of each stretch."""
    twin = _twin(x)
    return _error(x, w, step, low, kind)[0] if twin is None else twin.errors(x, w, step, low, kind)


def _ranged(x: Tensor, w: Tensor, kind: BlockKind, ranges: int) -> _Found:
    """Search scale and minimum of kinds with minima: ranges shrunk at both ends or at one, each fitted to its codes."""
    candidates = [(1.0, 1.0)]
    for share in _shares(ranges)[1:]:
        candidates += [(share, share), (1.0, share), (share, 1.0)]
    twin = _twin(x)
    if twin is not None:
        return _Found(*twin.search(x, w, candidates, REFITS, kind))
    lowest, highest = x.amin(-1), x.amax(-1)
    if kind.scale_bits:
        lowest = lowest.clamp(max=0)  # what is subtracted is a product of numbers that are not negative
    starts = (
        (((highest * right - lowest * left) / kind.top).clamp(min=0), -lowest * left) for left, right in candidates
    )
    return _best_of(x, w, starts, kind)


def _centred(x: Tensor, w: Tensor, kind: BlockKind, ranges: int) -> _Found:
    """Search the scale of kinds without minima; it may be negative, for codes reach further on one side."""
    ends = (min(kind.table), max(kind.table)) if kind.table else (-kind.offset, kind.top - kind.offset)
    shares = _shares(ranges // 2 if kind.bits < 8 else 4)
    candidates = [(share, float(end)) for end in ends for share in shares]
    twin = _twin(x)
    if twin is not None:
        step, _, error = twin.search(x, w, candidates, REFITS, kind)
        return _Found(step, None, error)
    signed = torch.where(x.amax(-1) >= -x.amin(-1), 1.0, -1.0) * x.abs().amax(-1)
    return _best_of(x, w, ((signed * share / end, None) for share, end in candidates), kind)


def _best_of(x: Tensor, w: Tensor, starts: Iterable[tuple[Tensor, Tensor | None]], kind: BlockKind) -> _Found:
    """Fit each of the starts to its codes, and the best of them once more."""
    best: _Found | None = None
    for step, low in starts:
        found = _refit(x, w, step, low, kind, 1)
        if best is None:
            best = found
        else:
            best.take(found.error < best.error, found)
    assert best is not None
    again = _refit(x, w, best.step, best.low, kind, REFITS)
    best.take(again.error < best.error, again)
    return best


def _twin(x: Tensor) -> Any:
    """Return the compiled passes over weights (``runtime.kernels.numba.kquant``), None where there are none."""
    return compiled.twin("kquant") if x.device.type == "cpu" else None


def _shares(count: int) -> list[float]:
    """Return shares of a range, from all of it down to the smallest."""
    return [1 - (1 - SMALLEST_RANGE) * i / (count - 1) for i in range(count)]


def _refit(x: Tensor, w: Tensor, step: Tensor, low: Tensor | None, kind: BlockKind, times: int) -> _Found:
    """Fit scale and minimum to the nearest codes by weighted least squares, and the codes to them, in turn."""
    error, q = _error(x, w, step, low, kind)
    best = _Found(step, low, error)
    for _ in range(times):
        step, low = _least_squares(x, w, q, kind) if low is not None else (_one_scale(x, w, q), None)
        error, q = _error(x, w, step, low, kind)
        found = _Found(step, low, error)
        best.take(error < best.error, found)
    return best


def _one_scale(x: Tensor, w: Tensor, q: Tensor) -> Tensor:
    return group_sum(w * x * q) / group_sum(w * q * q).clamp(min=TINY)


def _least_squares(x: Tensor, w: Tensor, q: Tensor, kind: BlockKind) -> tuple[Tensor, Tensor]:
    """Return the step and the minimum that fit ``step * q - low`` to x best; not below 0 in blocks of 256."""
    weighted = w * q
    second, product = group_sum(weighted * q), group_sum(weighted * x)
    total, mean, first = group_sum(w.clone()), group_sum(w * x), group_sum(weighted)
    divisor = total * second - first * first
    step = torch.where(divisor > TINY, (total * product - first * mean) / divisor.clamp(min=TINY), 0.0)
    low = torch.where(divisor > TINY, (first * product - second * mean) / divisor.clamp(min=TINY), -mean / total)
    if not kind.scale_bits:
        return step, low
    alone = product / second.clamp(min=TINY)
    step = torch.where(low < 0, alone, step)
    return step.clamp(min=0), low.clamp(min=0)


def _powers(x: Tensor, w: Tensor, kind: BlockKind, rows: int) -> BlockCodes:
    """Choose the power of two of each block among the three that can be best."""
    assert kind.table is not None
    base = torch.floor(torch.log2(x.abs().amax(-1).clamp(min=TINY) / max(kind.table)))
    best: tuple[Tensor, Tensor] | None = None
    for shift in (0, 1, -1):
        power = (base + shift).clamp(-126, 125)
        error = _errors(x, w, torch.exp2(power), None, kind)
        if best is None:
            best = power, error
        else:
            better = error < best[1]
            best = torch.where(better, power, best[0]), torch.where(better, error, best[1])
    assert best is not None
    codes = nearest(x, torch.exp2(best[0])[:, None], None, kind)
    return BlockCodes(kind, codes.reshape(rows, -1), (best[0] + 128).to(torch.uint8).reshape(rows, -1))


@dataclass
class _Block:
    """Blocks of 256 whose scales are integers, in the middle of the search.

    d, dmin: float32 ``[blocks]``, already rounded to float16. scales, minima: float32 ``[blocks, stretches]``.
    """

    d: Tensor
    scales: Tensor
    dmin: Tensor | None
    minima: Tensor | None

    def step(self) -> Tensor:
        return (self.d[:, None] * self.scales).flatten()

    def low(self) -> Tensor | None:
        return None if self.dmin is None or self.minima is None else (self.dmin[:, None] * self.minima).flatten()


def _integers(found: _Found, x: Tensor, w: Tensor, kind: BlockKind, rows: int, sweeps: int) -> BlockCodes:
    """Round scales and minima of stretches to integers times d and dmin of their block."""
    per = kind.width // kind.sub
    wide = found.step.reshape(-1, per)
    _, q = _error(x, w, found.step, found.low, kind)
    heavy = group_sum(w * q * q).reshape(-1, per)
    d, scales = _rounded(wide, heavy, kind.scale_range)
    if found.low is None:
        block = _Block(d, scales, None, None)
    else:
        dmin, minima = _rounded(found.low.reshape(-1, per), group_sum(w.clone()).reshape(-1, per), kind.scale_range)
        block = _Block(d, scales, dmin, minima)
    for _ in range(sweeps):
        block = _better(block, _fit_factors(block, x, w, kind), x, w, kind)
        block = _neighbours(block, x, w, kind)
    block = _better(block, _fit_factors(block, x, w, kind), x, w, kind)
    low = block.low()
    codes = nearest(x, block.step()[:, None], None if low is None else low[:, None], kind)
    ints = [None if t is None else t.to(torch.int16).reshape(rows, -1) for t in (block.scales, block.minima)]
    dmin16 = None if block.dmin is None else block.dmin.half().reshape(rows, -1)
    return BlockCodes(kind, codes.reshape(rows, -1), block.d.half().reshape(rows, -1), ints[0], dmin16, ints[1])


def _rounded(values: Tensor, heavy: Tensor, bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the factor, float32 values of float16, and the integers whose product is nearest to ``values``.

    values, heavy: float32 ``[blocks, stretches]``; errors count as ``heavy`` says. bounds: of the integers.
    """
    lowest, highest = bounds
    at = values.abs().argmax(-1, keepdim=True)
    extreme = values.gather(-1, at)[:, 0]
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for end in (highest,) if lowest == 0 else (lowest, highest):
        for shrink in range(8):
            d = (extreme / (end * (1 - shrink / 32))).half().float()
            ints = torch.round(values / torch.where(d == 0, 1.0, d)[:, None]).clamp(lowest, highest)
            error = group_sum((values - d[:, None] * ints).square() * heavy)
            if best is None:
                best = d, ints, error
            else:
                better = error < best[2]
                best = (
                    torch.where(better, d, best[0]), torch.where(better[:, None], ints, best[1]),
                    torch.where(better, error, best[2]),
                )  # fmt: skip
    assert best is not None
    return best[0], best[1]


def _block_error(block: _Block, x: Tensor, w: Tensor, kind: BlockKind) -> Tensor:
    """Return the error of each stretch: float32 ``[blocks, stretches]``."""
    return _errors(x, w, block.step(), block.low(), kind).reshape(len(block.d), -1)


def _better(block: _Block, other: _Block, x: Tensor, w: Tensor, kind: BlockKind) -> _Block:
    """Return the better of two, block by block."""
    wins = group_sum(_block_error(other, x, w, kind)) < group_sum(_block_error(block, x, w, kind))

    def pick(new: Tensor | None, old: Tensor | None) -> Tensor | None:
        return None if new is None or old is None else torch.where(wins if new.dim() == 1 else wins[:, None], new, old)

    d, scales = pick(other.d, block.d), pick(other.scales, block.scales)
    assert d is not None
    assert scales is not None
    return _Block(d, scales, pick(other.dmin, block.dmin), pick(other.minima, block.minima))


def _fit_factors(block: _Block, x: Tensor, w: Tensor, kind: BlockKind) -> _Block:
    """Fit d and dmin to codes and integers by weighted least squares over the whole block."""
    twin = _twin(x)
    sums = _block_sums if twin is None else twin.block_sums
    found = sums(x, w, block.step(), block.low(), block.scales, block.minima, kind)
    aa, ax = found[0], found[1]
    if block.minima is None:
        d = torch.where(aa > TINY, ax / aa.clamp(min=TINY), block.d)
        return _Block(d.half().float(), block.scales, None, None)
    assert block.dmin is not None
    ab, bb, bx = found[2], found[3], found[4]
    divisor = aa * bb - ab * ab
    sound = divisor > 1e-6 * aa * bb  # else one of the two says nothing of its own
    safe = torch.where(sound, divisor, 1.0)
    d = torch.where(sound, (bb * ax - ab * bx) / safe, block.d)
    dmin = torch.where(sound, (ab * ax - aa * bx) / safe, block.dmin)
    return _Block(d.half().float(), block.scales, dmin.half().float(), block.minima)


def _block_sums(
    x: Tensor, w: Tensor, step: Tensor, low: Tensor | None, scales: Tensor, minima: Tensor | None, kind: BlockKind
) -> list[Tensor]:
    """Return the sums over each block that its factors are fitted with.

    They are those of aa, ax, ab, bb and bx (the first two without minima), a the integer scale times the level of the
    nearest code, b the integer minimum, weighted.
    """
    _, q = _error(x, w, step, low, kind)
    a = (scales.flatten()[:, None] * q).reshape(len(scales), -1)
    wide, heavy = x.reshape(len(scales), -1), w.reshape(len(scales), -1)
    sums = [group_sum(heavy * a * a), group_sum(heavy * a * wide)]
    if minima is None:
        return sums
    b = minima.repeat_interleave(kind.sub, dim=1)
    return [*sums, group_sum(heavy * a * b), group_sum(heavy * b * b), group_sum(heavy * b * wide)]


def _neighbours(block: _Block, x: Tensor, w: Tensor, kind: BlockKind) -> _Block:
    """Let every integer try its neighbours, each with the codes that go with it."""
    lowest, highest = kind.scale_range
    best = _Block(block.d, block.scales, block.dmin, block.minima)
    error = _block_error(best, x, w, kind)
    moves: list[tuple[int, int]] = [(1, 0), (-1, 0)]
    if block.minima is not None:
        moves += [(0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)]
    for up, down in moves:
        scales = (block.scales + up).clamp(lowest, highest)
        minima = None if block.minima is None else (block.minima + down).clamp(lowest, highest)
        tried = _block_error(_Block(block.d, scales, block.dmin, minima), x, w, kind)
        better = tried < error
        best.scales = torch.where(better, scales, best.scales)
        if minima is not None and best.minima is not None:
            best.minima = torch.where(better, minima, best.minima)
        error = torch.where(better, tried, error)
    return best
