"""Scales of weights whose codes are floating-point numbers: ``w = number(code) * scale``.

``fp8``    E4M3 codes; scales float32 or bfloat16 for a row, for blocks of 128 rows by 128 inputs, or for the matrix.
``nvfp4``  E2M1 codes; for 16 inputs of a row the scale ``e4m3 / global_scale``, with one ``global_scale`` a matrix.
``mxfp4``  E2M1 codes; for 32 inputs of a row a power of two (E8M0).

Scales are kept as the float32 numbers that codes are multiplied by, and are always numbers that the file can hold. Our
``global_scale`` is a power of two: e2m1 * e4m3 / global_scale then has at most 6 bits of mantissa, so that the weights
are exact in float32, bfloat16 and float16 alike, whatever an engine multiplies first.

The smallest scale of an all-zero group is the smallest of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.rounding.numbers import (
    LARGEST_E2M1,
    LARGEST_E4M3,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    power_of_two,
    round_e2m1,
    round_e4m3,
)
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError

SMALLEST = 2.0**-40  # of fp8 and mxfp4: no weight of a model is that small
LEAST_E4M3 = 2.0**-9
# Of the scale, in octaves: which phase fits the row best.
FP8_OCTAVES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, -0.125, -0.25)
NVFP4_NEIGHBOURS = (0, 1, 2, 3, 4, 5, 6, -1, -2)  # in E4M3, above the scale that takes the largest weight to 6
MXFP4_NEIGHBOURS = (0, 1, -1)
FOUR = 4.0  # "four over six": the largest weight may become 4 instead of 6, where the numbers lie closer
_PIECE = 1 << 20  # weights whose error is measured at a time


def decode(codes: Tensor, scheme: Scheme) -> Tensor:
    """Return the number of each uint8 code, float32."""
    return decode_e4m3(codes) if scheme.number == "fp8" else decode_e2m1(codes)


def encode(numbers: Tensor, scheme: Scheme) -> Tensor:
    """Return the code of the number nearest to each of ``numbers``, uint8."""
    return encode_e4m3(numbers) if scheme.number == "fp8" else encode_e2m1(numbers)


def nearest(numbers: Tensor, scheme: Scheme) -> Tensor:
    """Round to the nearest number that has a code, float32."""
    return round_e4m3(numbers) if scheme.number == "fp8" else round_e2m1(numbers)


def ordered(scheme: Scheme) -> Tensor:
    """Return all numbers that have a code, in ascending order, float32.

    >>> ordered(Scheme.of("nvfp4")).tolist()[7:]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    numbers = decode(torch.arange(scheme.levels, dtype=torch.uint8), scheme)
    found: Tensor = numbers[torch.isfinite(numbers)].unique()
    return found


def largest(scheme: Scheme) -> float:
    """Return the largest number that has a code."""
    return LARGEST_E4M3 if scheme.number == "fp8" else LARGEST_E2M1


def fixed(weight: Tensor, scheme: Scheme) -> Scheme:
    """Return the scheme with the global scale for this weight, where it has one and none is set.

    It is the largest power of two at which the block of the largest weight can still choose 4 over 6.

    >>> fixed(torch.tensor([[0.5, -1.75]]), Scheme.of("nvfp4")).global_scale
    1024.0
    """
    if scheme.number != "nvfp4" or scheme.global_scale is not None:
        return scheme
    most = float(weight.abs().amax()) if weight.numel() else 0.0
    if not math.isfinite(most):
        raise NumericsError("the weight holds NaN or infinite values. Use a sound model.")
    exponent = math.floor(math.log2(LARGEST_E4M3 * FOUR / most)) if most > 0 else 0
    return replace(scheme, global_scale=2.0 ** min(max(exponent, -100), 100))


def smallest_scale(scheme: Scheme) -> float:
    """Return the smallest scale that a group may have."""
    return SMALLEST if scheme.global_scale is None else LEAST_E4M3 / scheme.global_scale


def store(scale: Tensor, scheme: Scheme) -> Tensor:
    """Round scales to the nearest that the file can hold, float32. Raises NumericsError for one that overflows."""
    if scale.numel() and not bool(torch.isfinite(scale).all()):
        raise NumericsError("a scale is not finite: weights this large suggest a damaged model.")
    scale = scale.float()
    if scheme.number == "nvfp4":
        assert scheme.global_scale is not None
        return round_e4m3((scale * scheme.global_scale).clamp(min=LEAST_E4M3)) / scheme.global_scale
    scale = scale.clamp(min=SMALLEST)
    if scheme.number == "mxfp4":
        return power_of_two(scale.log2().round_())
    return scale.bfloat16().float() if scheme.scale_dtype == "bfloat16" else scale


def from_largest(most: Tensor, scheme: Scheme) -> Tensor:
    """Return the scales of groups whose largest magnitude is ``most``, float32 ``[out, groups]``.

    fp8 and nvfp4: the largest weight becomes the largest number. mxfp4: as the format's standard says (section 6.3),
    ``2**(floor(log2 most) - 2)``, which cuts weights between 6 and 8 times the scale.
    """
    if scheme.number == "mxfp4":
        exponent = torch.frexp(most.float().clamp(min=SMALLEST))[1] - 1
        return power_of_two(exponent - 2).clamp(min=SMALLEST)
    return store(most.float() / largest(scheme), scheme)


def candidates(most: Tensor, scheme: Scheme) -> Iterator[Tensor]:
    """Yield the scales that a search tries for groups whose largest magnitude is ``most``, ``from_largest`` first.

    nvfp4: all E4M3 scales from those that cut a little to those that take the largest weight to 4; the choice of "four
    over six" is among them.
    """
    first = from_largest(most, scheme)
    if scheme.number == "fp8":
        yield from (store(first * 2.0**octave, scheme) for octave in FP8_OCTAVES)
    elif scheme.number == "mxfp4":
        yield from ((first * 2.0**step).clamp(min=SMALLEST) for step in MXFP4_NEIGHBOURS)
    else:
        assert scheme.global_scale is not None
        code = encode_e4m3(first * scheme.global_scale).to(torch.int16)
        for step in NVFP4_NEIGHBOURS:
            yield decode_e4m3((code + step).clamp(1, 126).to(torch.uint8)) / scheme.global_scale


def tie(values: Tensor, rows: int | None, how: str) -> Tensor:
    """Give rows that share their scales one value: the "largest" or the "sum", ``[out, groups]`` -> the same shape.

    rows: how many share, from the first on; None for all, 1 for none.
    """
    if rows == 1 or not len(values):
        return values
    parts = values.split(rows or len(values))
    one = [part.amax(0, keepdim=True) if how == "largest" else part.sum(0, keepdim=True) for part in parts]
    return torch.cat([value.expand(len(part), -1) for value, part in zip(one, parts, strict=True)])


def minmax(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return the scales of ``from_largest`` for a float weight ``[out, in]``: float32 ``[out, groups]``."""
    return from_largest(_largest_of_groups(weight, scheme), fixed(weight, scheme))


def search(weight: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Return, of ``candidates``, the scale of each group with the smallest (weighted) squared rounding error.

    weight: float ``[out, in]``. importance: ``[in]``, ``[out, in]``, or None. Rows that share scales choose together.
    """
    scheme = fixed(weight, scheme)
    best = chosen = None
    for scale in candidates(_largest_of_groups(weight, scheme), scheme):
        raise_if_interrupted()
        error = tie(_group_errors(weight, scale, scheme, importance), scheme.rows, "sum")
        if best is None or chosen is None:
            best, chosen = error, scale
            continue
        better = error < best
        best, chosen = torch.where(better, error, best), torch.where(better, scale, chosen)
    assert chosen is not None
    return chosen


def _largest_of_groups(weight: Tensor, scheme: Scheme) -> Tensor:
    parts = weight.float().abs().split(scheme.width(weight.shape[1]), dim=1)
    return tie(torch.stack([part.amax(1) for part in parts], 1), scheme.rows, "largest")


def _group_errors(weight: Tensor, scale: Tensor, scheme: Scheme, importance: Tensor | None) -> Tensor:
    """Sum the weighted squared errors of each group, ``[out, groups]``; some rows at a time."""
    width, groups = scheme.width(weight.shape[1]), scale.shape[1]
    missing = groups * width - weight.shape[1]
    errors = torch.empty_like(scale)
    count = max(1, _PIECE // weight.shape[1])
    for first in range(0, len(weight), count):
        rows = slice(first, first + count)
        part = weight[rows].float()
        step = scale[rows].repeat_interleave(width, 1)[:, : part.shape[1]]
        error = nearest(part / step, scheme).mul_(step).sub_(part).square_()
        if importance is not None:
            error *= importance if importance.dim() == 1 or len(importance) == 1 else importance[rows]
        if missing:
            error = torch.nn.functional.pad(error, (0, missing))
        errors[rows] = error.unflatten(1, (groups, width)).sum(-1)
    return errors
