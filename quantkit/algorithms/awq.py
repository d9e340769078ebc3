"""AWQ: scale the input channels that matter before rounding, then clip (Lin et al., arXiv 2306.00978).

For a fold (``quantkit.model.folds``) with factors s, what a consumer computes with is ``Q(W s) / s``. The paper
searches ``s = mean|x|**alpha`` (equation 5) by running the block for every alpha. Here the error of a candidate is
exact and needs no forward: ``tr(D H Dᵀ)`` with ``D = Q(W s) / s - W`` and H the mean of x xᵀ, summed over all
consumers.

Clipping differs from the paper's, too: the range of each group is chosen in turn for the smallest error of the whole
row, given the errors of the row's other groups, so that errors of correlated inputs cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import LARGEST_FACTOR, Scales, Solution
from quantkit.core import affine
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding import scales as floats
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError

SEARCH_ROWS = 512  # rows of a consumer that the search for factors looks at; every row counts when its range is chosen
WIDEST_GROUP = 512  # wider groups keep the range found with H's diagonal: one trial costs out * in * width


@dataclass(frozen=True)
class Consumer:
    """Linears with one input and one scheme, stacked along their rows.

    weight: float32 [out, in].
    hessian: [in, in], the mean of x xᵀ; None where the method reads ``squares`` alone.
    channels: the fold's channel in each column, int64 [in].
    share: how much this consumer's loss counts (experts: their share of the tokens).
    squares: mean of each input's square, float [in]; None for the Hessian's diagonal.
    """

    weight: Tensor
    hessian: Tensor | None
    channels: Tensor
    scheme: Scheme
    share: float = 1.0
    squares: Tensor | None = None

    def sizes(self) -> Tensor:
        """Return the mean of each input's square, float32 [in]."""
        if self.squares is not None:
            return self.squares.float()
        assert self.hessian is not None
        return self.hessian.diagonal().float()

    def correlations(self) -> Tensor:
        """Return the Hessian in float32."""
        assert self.hessian is not None
        return self.hessian.float()


@dataclass(frozen=True)
class Factors:
    """Channel factors that the search chose.

    values: float32 [channels].
    loss, plain_loss: with these factors and with none.
    fallback: why there are none (all ones), if something went wrong.
    """

    values: Tensor
    loss: float
    plain_loss: float
    fallback: str | None = None


Realise = Callable[[Tensor], Tensor]  # wanted factors -> the nearest that the producer can hold in its stored dtype


def search_factors(consumers: Sequence[Consumer], channels: int, realise: Realise = lambda s: s) -> Factors:
    """Search the factors s = rms(x)**a / spread**b with the smallest error.

    a runs over a grid, then both ever closer around the best. rms(x) comes from H's diagonal; spread is the mean of |w|
    over its group's largest, which the paper's code also tries. The best few are compared again with clipped ranges,
    together with s = 1, so the result is not worse than rounding alone. A candidate whose loss is not finite is passed
    over; if s = 1 itself has none, all factors are 1 and ``fallback`` says why.
    """
    some = _thin(consumers)
    size, spread = _statistics(some, channels)
    ones = torch.ones(channels, device=some[0].weight.device)
    plain = _loss(some, ones, clip=True)
    if not _finite(plain) or not bool(torch.isfinite(size).all()):
        return Factors(ones, plain, plain, "the loss of this fold is not finite; its channels are not scaled")
    tried: dict[tuple[float, float], tuple[float, Tensor]] = {}  # (a, b) -> loss, factors

    def attempt(a: float, b: float) -> None:
        if (a, b) not in tried:
            s = realise(_normalise((size + 1e-6 * size.mean()) ** a / spread**b))
            tried[a, b] = _loss(some, s, clip=False), s

    for step in range(6):
        attempt(step / 5, 0.0)
    for reach, tilt in ((0.1, 0.5), (0.05, 0.25), (0.025, 0.0)):  # around the best so far, ever closer
        a, b = min(tried, key=lambda key: tried[key][0])
        for da, db in ((-reach, 0.0), (reach, 0.0), (0.0, tilt), (0.0, -tilt)):
            attempt(a + da, max(b + db, 0.0))
    best, factors = plain, ones
    for loss, s in sorted(tried.values(), key=lambda item: item[0])[:3]:
        clipped = _loss(some, s, clip=True) if _finite(loss) else loss
        if clipped < best:
            best, factors = clipped, s
    return Factors(factors, best, plain)


def rough_factors(weights: Sequence[Tensor], size: Tensor, scheme: Scheme) -> Tensor:
    """Estimate what ``search_factors`` finds from the size of the inputs alone: ``size ** a``, equation 5 with the rms.

    a runs from 0 to 3/4 in quarters; the one that leaves the least ``sum_j size_j**2 e_j**2`` is taken, with the
    weights rounded between their extremes. Weights are not modified.

    weights: [out, in] each.
    size: [in], root mean square of each input.
    Returns float32 [in], geometric mean 1; ones if the size is not finite.
    """
    size = size.float()
    ones = torch.ones_like(size)
    if not bool(torch.isfinite(size).all()):
        return ones
    rows, _ = thin_stack(weights)

    def loss(s: Tensor) -> float:
        error = _rounding_error(rows, s, scheme, None)
        return float("inf") if error is None else float((error * size).square().sum())

    tried = [ones, *(_normalise((size + 1e-6 * size.mean()) ** a) for a in (0.25, 0.5, 0.75))]
    losses = [loss(s) for s in tried]
    return tried[min(range(len(tried)), key=lambda i: losses[i])]


def awq(
    weight: Tensor, hessian: Tensor, scheme: Scheme, scales: Scales = "search", damping: float = 0.01, sweeps: int = 1
) -> Solution:
    """Choose ranges and round ``weight`` [out, in], already scaled, for a small ``tr(D H Dᵀ)``.

    The ranges start from ``affine.searched_params`` with H's diagonal; ``sweeps`` times, group by group, each row tries
    the same shrunken ranges again and keeps the one with the smallest error of the whole row. Never worse than rounding
    with searched scales, measured with the damped H. Falls back to that (and says so) if H is not finite.

    hessian: [in, in] of the scaled inputs.
    scales: "minmax" does not clip.
    damping: share of the mean diagonal added to H's, against trusting the correlations of few tokens too much.
    """
    scheme = affine.fixed(weight, scheme)
    if scales == "minmax":
        step, zeros = affine.minmax_params(weight, scheme)
        return _rounded(weight, step, zeros, scheme)
    h = hessian.to(torch.float32, copy=True)  # it is damped here, and the caller's is not
    if not bool(torch.isfinite(h).all()):
        step, zeros = affine.searched_params(weight, scheme)
        return _rounded(weight, step, zeros, scheme, "rounded: the statistics of its input are not finite")
    h.diagonal().add_(damping * h.diagonal().mean())
    weight = weight.float()
    step, zeros = affine.searched_params(weight, scheme, h.diagonal())
    if scheme.width(weight.shape[1]) <= WIDEST_GROUP and scheme.rows == 1:
        rows = max(
            1, (_CACHE_ELEMENTS if weight.device.type == "cpu" else affine.SEARCH_ELEMENTS_GPU) // weight.shape[1]
        )
        some_zeros = zeros.split(rows) if zeros is not None else [None] * len(step)
        parts = [
            _clip(w, h, s, z, scheme, sweeps)
            for w, s, z in zip(weight.split(rows), step.split(rows), some_zeros, strict=False)
        ]
        step = torch.cat([s for s, _ in parts])
        zeros = None if zeros is None else torch.cat([z for _, z in parts if z is not None])
    return _rounded(weight, step, zeros, scheme)


_CACHE_ELEMENTS = 1 << 20  # weights in work at a time


def _clip(
    weight: Tensor, h: Tensor, step: Tensor, zeros: Tensor | None, scheme: Scheme, sweeps: int
) -> tuple[Tensor, Tensor | None]:
    """Coordinate descent over the ranges of some rows' groups.

    With d the error of group g and D that of the whole row, a candidate's error is ``d H_gg dᵀ + 2 d (D H)_g'`` where
    ``'`` leaves the group itself out.
    """
    width = scheme.width(weight.shape[1])
    step, zeros = step.clone(), None if zeros is None else zeros.clone()
    error = affine.dequantize(affine.quantize(weight, step, zeros, scheme), step, zeros, scheme) - weight
    for _ in range(sweeps):
        for g, start in enumerate(range(0, weight.shape[1], width)):
            raise_if_interrupted()
            columns = slice(start, start + width)
            w, own, d = weight[:, columns], h[columns, columns], error[:, columns]
            others = 2 * (error @ h[:, columns] - d @ own)
            best = ((d @ own + others) * d).sum(1)
            for scale, zero in _ranges(w, scheme):
                trial = _error(w, scale, zero, scheme)
                loss = ((trial @ own).add_(others).mul_(trial)).sum(1)
                better = loss < best
                best = torch.where(better, loss, best)
                step[:, g] = torch.where(better, scale[:, 0], step[:, g])
                if zeros is not None and zero is not None:
                    zeros[:, g] = torch.where(better, zero[:, 0], zeros[:, g])
                error[:, columns] = torch.where(better[:, None], trial, error[:, columns])
    return step, zeros


def _ranges(w: Tensor, scheme: Scheme) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scale and zero of one group's candidates: both ends shrunk, or one of them."""
    if scheme.number != "integer":
        yield from ((scale, None) for scale in floats.candidates(w.abs().amax(1, keepdim=True), scheme))
        return
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    for shrink in torch.linspace(1.0, 0.5, 24).tolist():
        sides = [(shrink, shrink)] if scheme.symmetric else [(shrink, shrink), (1.0, shrink), (shrink, 1.0)]
        for left, right in sides[:1] if shrink == 1.0 else sides:
            yield affine.params_from_range(low * left, high * right, scheme)


def _error(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Rounding error of one group [rows, width]."""
    step = scale.float()
    if scheme.number != "integer":
        return floats.nearest(w / step, scheme).mul_(step).sub_(w)
    offset = torch.full_like(step, float(scheme.midpoint)) if zero is None else zero.float()
    codes = (w / step).round_().clamp_(-offset, scheme.levels - 1 - offset)
    return codes.mul_(step).sub_(w)


def _rounded(
    weight: Tensor, step: Tensor, zeros: Tensor | None, scheme: Scheme, fallback: str | None = None
) -> Solution:
    return Solution(QuantTensor(affine.quantize(weight, step, zeros, scheme), step, zeros, scheme), None, fallback)


def thin_stack(weights: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Keep at most ``SEARCH_ROWS`` rows, spread evenly, of linears [out, in] stacked along their rows.

    Returns them in float32, and how many rows each of them stands for. Only the rows that are kept are copied.
    """
    total = sum(weight.shape[0] for weight in weights)
    every, start, parts = -(-total // SEARCH_ROWS), 0, []
    for weight in weights:
        parts.append(weight[-start % every :: every].float())
        start += weight.shape[0]
    thin = torch.cat(parts)
    return thin, total / thin.shape[0]


def _thin(consumers: Sequence[Consumer]) -> list[Consumer]:
    """Consumers with rows left out evenly, their shares raised to make up for them.

    One H of all is made float32 once; of several (experts) each is when it is used, so that they are not all held
    twice.
    """
    shared = consumers[0].correlations() if len({id(c.hessian) for c in consumers}) == 1 else None
    thinned = []
    for c in consumers:
        weight, each = thin_stack([c.weight])
        thinned.append(Consumer(weight, c.hessian if shared is None else shared, c.channels, c.scheme, c.share * each))
    return thinned


def _loss(consumers: Sequence[Consumer], factors: Tensor, clip: bool) -> float:
    """Mean squared error of the consumers' outputs, summed over outputs; inf if a scale cannot be stored."""
    total = 0.0
    for c in consumers:
        delta = rounding_error(c, factors, clip)
        if delta is None:
            return float("inf")
        total += c.share * float(((delta @ c.correlations()) * delta).sum())
    return total


def rounding_error(c: Consumer, factors: Tensor, clip: bool = False) -> Tensor | None:
    """Compute ``Q(W s) / s - W``, float32 [out, in], or None if a scale cannot be stored.

    clip: round in a searched range instead of between the extremes.
    """
    return _rounding_error(c.weight, factors[c.channels], c.scheme, c.sizes() if clip else None)


def _rounding_error(w: Tensor, s: Tensor, scheme: Scheme, square: Tensor | None) -> Tensor | None:
    """``Q(w s) / s - w``, or None if a scale cannot be stored.

    square: mean of each input's square, by which ranges are searched; None for the extremes.
    """
    scaled = w * s
    try:
        if square is not None:
            step, zeros = affine.searched_params(scaled, scheme, square / s**2, steps=12)
        else:
            step, zeros = affine.minmax_params(scaled, scheme)
    except NumericsError:
        return None
    return affine.dequantize(affine.quantize(scaled, step, zeros, scheme), step, zeros, scheme) / s - w


def _statistics(consumers: Sequence[Consumer], channels: int) -> tuple[Tensor, Tensor]:
    """Per channel: root mean square of the input, and mean of |w| over the largest of its group. float32 [channels]."""
    square, spread, count = torch.zeros(3, channels, device=consumers[0].weight.device)
    for c in consumers:
        groups = affine.split_groups(c.weight.abs(), c.scheme)
        share = (groups / groups.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1)[:, : c.weight.shape[1]].mean(0)
        square.index_add_(0, c.channels, c.sizes().clamp(min=0) * c.share)
        spread.index_add_(0, c.channels, share * c.share)
        count.index_add_(0, c.channels, torch.full((len(c.channels),), c.share, device=count.device))
    return (square / count).sqrt(), (spread / count).clamp(min=1e-3)


def input_size(consumers: Sequence[Consumer], channels: int) -> Tensor:
    """Compute the root mean square of the input in each channel, over all consumers: float32 [channels]."""
    return _statistics(consumers, channels)[0]


def _normalise(s: Tensor) -> Tensor:
    """Geometric mean 1, no factor beyond ``LARGEST_FACTOR``."""
    log = s.clamp(min=1e-20).log()
    return (log - log.mean()).exp().clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
