"""HQQ: round without text. Channels scaled by importance from random tokens, ranges searched, scales fitted.

Three steps, of which none reads data:

* The model runs on a few hundred tokens drawn at random from its vocabulary. What that tells of correlations is of no
  use, but the size of each input channel, ``r_j = rms(x_j)``, is nearly that of real text: it is decided by norms and
  weights.
* Where channels can be scaled (``quantkit.model.folds``), by ``s_j = r_j ** a``: AWQ's equation 5 (Lin et al., arXiv
  2306.00978) with three values of a, of which the one with the smallest ``sum_j r_j**2 e_j**2`` of plain rounding is
  kept.
* Each group starts from the half-quadratic solution (Badri and Shaji, "Half-Quadratic Quantization of Large Machine
  Learning Models", 2023): with the shrinking operator of the l_p norm, p = 1/2, outliers leave the residual and the
  zero point is the mean of what remains. It is then rounded, since zeros are integers here (symmetric schemes have
  none: more ranges are tried). Of that and some shrunken ranges the one with the smallest ``sum_j r_j**2 e_j**2`` is
  kept, and its scale is fitted to its codes by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import LARGEST_FACTOR, Scales, Solution
from quantkit.algorithms.awq import Consumer, Realise, input_size, rounding_error
from quantkit.core import affine
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError

# tried beside no factors at all: with groups of 64 the first is best, in whole rows of 8 bits factors do harm
EXPONENTS = (0.5, 0.25)
FLOOR = 1e-2  # of the channels' mean size: beneath it a channel is not scaled down further
SHRINKS = (1.0, 0.94, 0.88)
# Without a zero there is no half-quadratic start, and nothing else finds the narrow range that few bits need.
SYMMETRIC_SHRINKS = tuple(1 - 0.075 * step for step in range(9))
FITS = 2
BETA, ITERATIONS = 10.0, 3  # of the half-quadratic solver; eight iterations and p = 0.7 lower the loss no further
_ELEMENTS = 1 << 18  # weights in work at a time on a CPU: the temporaries stay in the cache


def search_channel_factors(consumers: Sequence[Consumer], channels: int, realise: Realise = lambda s: s) -> Tensor:
    """Choose the best of a few ``channel_factors`` and of none (all ones), float32 ``[channels]``.

    Only the sizes of inputs are read. Raises NumericsError if the inputs are not finite.
    """
    size = input_size(consumers, channels)
    if not bool(torch.isfinite(size).all()):
        raise NumericsError("its inputs are not finite")
    tried = [torch.ones_like(size), *(realise(channel_factors(size, exponent)) for exponent in EXPONENTS)]
    losses = [_weighted_loss(consumers, factors) for factors in tried]
    return tried[min(range(len(tried)), key=lambda i: losses[i])]


def _weighted_loss(consumers: Sequence[Consumer], factors: Tensor) -> float:
    """``sum_j r_j**2 e_j**2`` of rounding between the extremes; inf if a scale cannot be stored."""
    total = 0.0
    for c in consumers:
        error = rounding_error(c, factors)
        if error is None:
            return math.inf
        total += c.share * float((error.square() * c.sizes()).sum())
    return total if math.isfinite(total) else math.inf


def channel_factors(size: Tensor, exponent: float) -> Tensor:
    """Compute ``size ** exponent`` with geometric mean 1, float32 ``[channels]``.

    size: root mean square of each channel.
    """
    size = size.float()
    log = exponent * (size + FLOOR * size.mean() + 1e-30).log()
    return (log - log.mean()).exp().clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def hqq(weight: Tensor, scheme: Scheme, scales: Scales = "search", importance: Tensor | None = None) -> Solution:
    """Round ``weight`` [out, in], already scaled, for a small ``sum_j importance_j * e_j**2``.

    Never worse by that sum than rounding with the extremes. Rows do not influence one another.

    scales: "minmax" takes the extremes.
    importance: mean square of each input, float ``[in]``; None, or nothing but zeros: all alike.

    Raises NumericsError if the importance is not finite.
    """
    gain = torch.ones(weight.shape[1], device=weight.device) if importance is None else importance.float()
    if not bool(torch.isfinite(gain).all()):
        raise NumericsError("the size of its inputs is not finite")
    if float(gain.sum()) <= 0:  # no input was ever anything but zero
        gain = torch.ones_like(gain)
    if scales == "minmax":
        step, zeros = affine.minmax_params(weight, scheme)
        return Solution(QuantTensor(affine.quantize(weight, step, zeros, scheme), step, zeros, scheme))
    split = affine.split_groups((gain / gain.mean()).reshape(1, -1), scheme)
    shrinks = SYMMETRIC_SHRINKS if scheme.symmetric else SHRINKS
    found = affine.compiled_ranges(
        weight, split, scheme,
        lambda twin, *given, **kind: twin.search_hqq(*given, shrinks, FITS, BETA, ITERATIONS, **kind),
    )  # fmt: skip
    if found is not None:
        step, zeros = found
        return Solution(QuantTensor(affine.quantize(weight, step, zeros, scheme), step, zeros, scheme))
    size = _ELEMENTS if weight.device.type == "cpu" else affine.SEARCH_ELEMENTS_GPU
    rows = max(1, size // weight.shape[1])
    ranges = [_Groups(affine.split_groups(w.float(), scheme), split, scheme).best() for w in weight.split(rows)]
    step = torch.cat([part.scale for part in ranges])
    zeros = None if scheme.symmetric else torch.cat([part.zero for part in ranges if part.zero is not None])
    return Solution(QuantTensor(affine.quantize(weight, step, zeros, scheme), step, zeros, scheme))


@dataclass
class _Params:
    """scale ``[rows, groups]`` in storage dtype, zero int16 or None."""

    scale: Tensor
    zero: Tensor | None


class _Groups:
    """Some rows' groups, ``[rows, groups, width]``, and the best scale and zero point of each so far.

    gain: importance of each input, ``[1, groups, width]``.
    """

    def __init__(self, groups: Tensor, gain: Tensor, scheme: Scheme) -> None:
        self.groups, self.gain, self.scheme = groups, gain, scheme
        self.low, self.high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        self.params = _Params(*affine.params_from_range(self.low, self.high, scheme))
        self.error = self._error(self._codes(self.params), self.params)

    def best(self) -> _Params:
        """Return the scale and zero point with the smallest weighted squared error of those tried."""
        for shrink in (SYMMETRIC_SHRINKS if self.scheme.symmetric else SHRINKS)[1:]:
            self._try(_Params(*affine.params_from_range(self.low * shrink, self.high * shrink, self.scheme)))
        if not self.scheme.symmetric:
            self._try(self._half_quadratic())
        for _ in range(FITS):
            self._try(self._fit(self.params))
        return self.params

    def _codes(self, params: _Params) -> Tensor:
        """Codes minus zero."""
        offset = self._offset(params)
        codes = (self.groups / params.scale.float().unsqueeze(-1)).round_()
        return codes.clamp_(-offset, self.scheme.levels - 1 - offset)

    def _offset(self, params: _Params) -> Tensor:
        if params.zero is None:
            return torch.full_like(params.scale, float(self.scheme.midpoint), dtype=torch.float32).unsqueeze(-1)
        return params.zero.float().unsqueeze(-1)

    def _error(self, codes: Tensor, params: _Params) -> Tensor:
        delta = (codes * params.scale.float().unsqueeze(-1)).sub_(self.groups)
        return affine.group_sum(delta.square_().mul_(self.gain))

    def _try(self, params: _Params) -> None:
        raise_if_interrupted()
        error = self._error(self._codes(params), params)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.params.scale = torch.where(better, params.scale, self.params.scale)
        if params.zero is not None and self.params.zero is not None:
            self.params.zero = torch.where(better, params.zero, self.params.zero)

    def _half_quadratic(self) -> _Params:
        """Scale of the extremes, zero point by half-quadratic splitting, rounded; then the scale fitted to codes."""
        top = self.scheme.levels - 1
        scale = affine.store_scale((self.high - self.low) / top, self.scheme)
        step = scale.float().unsqueeze(-1)
        zero = -self.low.unsqueeze(-1) / step
        weights = self.gain / affine.group_sum(self.gain.clone()).unsqueeze(-1).clamp(min=1e-30)
        for _ in range(ITERATIONS):
            codes = (self.groups / step + zero).round_().clamp_(0, top)
            left = self.groups / step - (codes - zero)  # in steps: what is shrunk must not depend on the weights' size
            size = left.abs().clamp_(min=1e-8)
            outliers = size.sub_(size.rsqrt().div_(BETA)).clamp_(min=0).copysign_(left)  # p = 1/2
            zero = affine.group_sum((codes + outliers - self.groups / step).mul_(weights)).unsqueeze(-1)
        return self._fit(_Params(scale, zero.squeeze(-1).round_().clamp_(0, top).to(torch.int16)))

    def _fit(self, params: _Params) -> _Params:
        """The scale with the least squares for the codes of ``params``, with the same zero."""
        codes = self._codes(params)
        square = affine.group_sum((codes * codes).mul_(self.gain))
        fitted = affine.group_sum(codes.mul_(self.groups).mul_(self.gain)) / square.clamp(min=1e-30)
        usable = (square > 0) & (fitted > 0)
        return _Params(affine.store_scale(torch.where(usable, fitted, params.scale.float()), self.scheme), params.zero)
