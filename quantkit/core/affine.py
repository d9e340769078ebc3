"""Choose scales and zero points, quantize, dequantize: THE definition of our numbers.

``w = (code - zero) * scale`` with unsigned codes, ``0 <= code < 2**bits``; groups run along ``in_features`` and the
last group may be shorter. Scales are rounded to their storage dtype before codes are chosen. Every kernel, format and
algorithm is tested against this file. Codes that are floating-point numbers (``Scheme.number``) have no zero points:
``w = number(code) * scale``; they are handed on to ``core.rounding.scales``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.core import compiled
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.rounding import scales as floats
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError

# The smallest normal fp16 is 6.1e-5. Below it scales lose mantissa bits, and some kernels flush them to zero, so a
# smaller scale is raised to this value; the group then uses fewer of its codes. Reported per layer.
SMALLEST_SCALE = 2.0**-14


def fixed(weight: Tensor, scheme: Scheme) -> Scheme:
    """Return the scheme with what one weight fixes for all its groups: the global scale of nvfp4."""
    return scheme if scheme.number == "integer" else floats.fixed(weight, scheme)


def smallest_scale(scheme: Scheme) -> float:
    """Return the smallest scale that a group may have; groups of zeros have it."""
    return SMALLEST_SCALE if scheme.number == "integer" else floats.smallest_scale(scheme)


def steps(codes: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """Return what the scales multiply, float32 ``[out, in]``: ``code - zero``, or the code's number.

    codes: uint8 ``[out, in]``. zeros: ``[out, groups]`` or None.
    """
    if scheme.number != "integer":
        return floats.decode(codes, scheme)
    offset: Tensor | float = float(scheme.midpoint)
    if zeros is not None:
        offset = expand_groups(zeros.float(), codes.shape[1], scheme)
    return codes.float() - offset


def group_index(in_features: int, scheme: Scheme, device: torch.device | str | None = None) -> Tensor:
    """Return the group of each input: int64 ``[in_features]``."""
    return torch.arange(in_features, device=device) // scheme.width(in_features)


def expand_groups(values: Tensor, in_features: int, scheme: Scheme) -> Tensor:
    """Repeat per-group values ``[out, groups]`` to per-input values ``[out, in]``."""
    width = scheme.width(in_features)
    return values.repeat_interleave(width, dim=1)[:, :in_features]


def split_groups(weight: Tensor, scheme: Scheme, fill: float = 0.0) -> Tensor:
    """Split ``[out, in]`` into ``[out, groups, width]``; a short last group is filled with ``fill``."""
    out, in_features = weight.shape
    width, groups = scheme.width(in_features), scheme.groups(in_features)
    missing = groups * width - in_features
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing), value=fill)
    return weight.reshape(out, groups, width)


def store_scale(scale: Tensor, scheme: Scheme) -> Tensor:
    """Round scales to their storage dtype; zero and subnormal ones are raised to ``SMALLEST_SCALE``.

    Raises NumericsError if one overflows.
    """
    if scheme.number != "integer":
        return floats.store(scale, scheme)
    largest = torch.finfo(scheme.torch_scale_dtype).max
    if scale.numel() and float(scale.max()) > largest:
        raise NumericsError(
            f"a scale of {float(scale.max()):.3g} overflows {scheme.scale_dtype} (largest {largest:.3g}). "
            "Use --scale-dtype bfloat16; weights this large suggest a damaged model."
        )
    return scale.clamp(min=SMALLEST_SCALE).to(scheme.torch_scale_dtype)


def params_from_range(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Compute scale and zero point of groups whose values span ``[low, high]`` (zero included by the caller).

    low, high: float ``[out, groups]`` with ``low <= 0 <= high``.
    Returns scales in the storage dtype and zeros (int16 ``[out, groups]``, 0 .. 2**bits - 1), or None when symmetric.

    Symmetric scales are ``absmax / (2**(bits-1) - 1)``: the largest weight, which matters most, is then exact.
    (Dividing by ``2**(bits-1) - 0.5`` uses the range better but puts that weight half a step off: KL 0.0045 instead of
    0.0040 for 8 bits per channel on smollm2-135m. ``searched_params`` tries both.)
    """
    if scheme.symmetric:
        absmax = torch.maximum(-low, high)
        return store_scale(absmax / (scheme.midpoint - 1), scheme), None
    scale = store_scale((high - low) / (scheme.levels - 1), scheme)
    zero = torch.round(-low / scale.float()).clamp(0, scheme.levels - 1)
    return scale, zero.to(torch.int16)


def minmax_params(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Compute scale and zero point per group from the extreme values, zero included.

    weight: float ``[out, in]`` -> scales ``[out, groups]`` in the storage dtype, zeros int16 ``[out, groups]`` or None.

    >>> s, z = minmax_params(torch.tensor([[-1.0, 0.0, 2.0, 0.5]]), Scheme(bits=2, group_size=None, symmetric=False))
    >>> s.item(), z.item()          # (2 - -1) / 3,  round(1 / 1)
    (1.0, 1)
    """
    if scheme.number != "integer":
        return floats.minmax(weight, scheme), None
    groups = split_groups(weight.float(), scheme)
    return params_from_range(groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0), scheme)


SEARCH_STEPS = 24


def searched_params(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    *,
    steps: int = SEARCH_STEPS,
    smallest: float = 0.5,
) -> tuple[Tensor, Tensor | None]:
    """Search the scale and zero point per group that minimise the (weighted) squared rounding error.

    The candidates are a grid of shrunken ranges: the range of each group is shrunk by ``steps`` factors between 1 and
    ``smallest``; an asymmetric range is also shrunk from one end only, because one outlier usually sits at one end.
    Never worse than ``minmax_params``, which is the first candidate.

    weight: float ``[out, in]``.
    importance: non-negative weights per input ``[in]`` (for example the Hessian's diagonal), or of each row's inputs
        ``[out, in]``, or None for the plain squared error.
    Returns the same pair as ``minmax_params``.

    The idea: Nagel et al., arXiv 2106.08295, section 3.1 (MSE range setting).
    """
    if scheme.number != "integer":
        return floats.search(weight, scheme, importance), None
    if importance is None:
        importance = torch.ones(weight.shape[1], device=weight.device)
    gain = split_groups(importance.float().reshape(-1, weight.shape[1]), scheme)
    sides = [(1.0, 1.0)]
    for step in range(1, steps):
        shrink = 1 - (1 - smallest) * step / (steps - 1)
        sides += [(shrink, shrink)] if scheme.symmetric else [(shrink, shrink), (1.0, shrink), (shrink, 1.0)]
    found = compiled_ranges(weight, gain, scheme, lambda twin, *given, **kind: twin.search(*given, sides, **kind))
    if found is not None:
        return found
    # A few rows at a time: the temporaries then stay in the processor's cache, which is several times faster.
    # A GPU wants much at a time instead: each part costs hundreds of launches.
    rows = max(1, (_PIECE if weight.device.type == "cpu" else SEARCH_ELEMENTS_GPU) // weight.shape[1])
    gains = gain.split(rows) if len(gain) > 1 else itertools.repeat(gain)
    ranges = [
        _search_rows(split_groups(part.float(), scheme), own, sides, scheme)
        for part, own in zip(weight.split(rows), gains, strict=False)
    ]
    zeros = None if scheme.symmetric else torch.cat([zero for _, zero in ranges if zero is not None])
    return torch.cat([scale for scale, _ in ranges]), zeros


def compiled_ranges(
    weight: Tensor, gain: Tensor, scheme: Scheme, search: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor | None] | None:
    """Search scales and zero points by compiled code (``runtime.kernels.numba.ranges``), some rows at a time.

    weight: float ``[out, in]``.
    gain: importance, ``[1 or out, groups, width]``.
    search: gets the module, some rows and their importance in float32, the width of a group, and what kind of scheme it
        is by name; returns scales and zero points.

    Returns what ``minmax_params`` returns, or None where there is no compiled code for such weights.
    """
    width = scheme.width(weight.shape[1])
    twin = compiled.twin("ranges") if weight.device.type == "cpu" else None
    if twin is None or not twin.takes(width, weight.shape[1]):
        return None
    kind = {"bits": scheme.bits, "symmetric": scheme.symmetric, "half": scheme.scale_dtype == "float16"}
    rows = max(1, _SEARCHED // weight.shape[1])
    gains = gain.flatten(1).float()
    scales, zeros = [], []
    for index, part in enumerate(weight.split(rows)):
        raise_if_interrupted()  # all rows of an embedding take seconds
        own = gains[index * rows : (index + 1) * rows] if len(gains) > 1 else gains
        scale, zero = search(twin, part.float(), own, width, smallest=SMALLEST_SCALE, **kind)
        scales.append(store_scale(scale, scheme))
        zeros.append(zero.to(torch.int16))
    return torch.cat(scales), None if scheme.symmetric else torch.cat(zeros)


def group_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension; ``values`` is overwritten.

    On a CPU halves are added to halves: the same sum on every processor, and the compiled search's.
    """
    if values.device.type != "cpu":
        return values.sum(-1)
    left = values.shape[-1]
    while left > 1:
        half = (left + 1) // 2
        values[..., : left - half] += values[..., half:left]
        left = half
    return values[..., 0]


_SEARCHED = 1 << 24  # weights that compiled code searches at a time, in some tenths of a second
_PIECE = 1 << 18  # weights in work at a time on a CPU: what is computed in between stays in its second cache
SEARCH_ELEMENTS_GPU = 1 << 25  # about nine times as many floats are alive


def _search_rows(
    groups: Tensor, gain: Tensor, sides: list[tuple[float, float]], scheme: Scheme
) -> tuple[Tensor, Tensor | None]:
    """The best of the candidate ranges for some rows ``[rows, groups, width]``."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    raise_if_interrupted()  # all rows of an embedding take minutes
    best_scale, best_zero = params_from_range(low, high, scheme)
    best = _group_error(groups, gain, best_scale, best_zero, scheme)
    for left, right in sides[1:]:
        scale, zero = params_from_range(low * left, high * right, scheme)
        error = _group_error(groups, gain, scale, zero, scheme)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    return best_scale, best_zero


def _group_error(groups: Tensor, gain: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Weighted squared rounding error of each group. Codes are clamped around zero, so the zero point drops out."""
    step = scale.float().unsqueeze(-1)
    offset = torch.full_like(step, float(scheme.midpoint)) if zero is None else zero.float().unsqueeze(-1)
    codes = (groups / step).round_().clamp_(-offset, scheme.levels - 1 - offset)
    return group_sum(codes.mul_(step).sub_(groups).square_().mul_(gain))


def quantize(weight: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """Round to the nearest codes: ``clamp(round(w / scale + zero), 0, 2**bits - 1)``, uint8 ``[out, in]``.

    scales, zeros: ``[out, groups]`` as the functions above return them. Ties round to even (torch.round).
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows in _pieces(weight):
        part = weight[rows].float()
        step, offset = _beside(part, rows, scales, zeros, scheme)
        if scheme.number != "integer":
            _by_group(codes[rows], step).copy_(floats.encode(_by_group(part, step) / step, scheme))
            continue
        rounded = (_by_group(part, step) / step).add_(offset).round_().clamp_(0, scheme.levels - 1)
        _by_group(codes[rows], step).copy_(rounded)
    return codes


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """Compute ``(code - zero) * scale`` in float32, ``[out, in]``."""
    weight = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    for rows in _pieces(codes):
        step, offset = _beside(codes, rows, scales, zeros, scheme)
        into = _by_group(weight[rows], step)
        if scheme.number != "integer":
            torch.mul(floats.decode(_by_group(codes[rows], step), scheme), step, out=into)
            continue
        torch.sub(_by_group(codes[rows], step), offset, out=into).mul_(step)
    return weight


def _pieces(matrix: Tensor) -> list[slice]:
    """Return slices of rows; on a CPU so small that what is computed in between stays in its second cache."""
    size = _PIECE // max(1, matrix.shape[1]) if matrix.device.type == "cpu" else matrix.shape[0]
    size = max(1, size)
    return [slice(first, first + size) for first in range(0, matrix.shape[0], size)]


def _beside(
    matrix: Tensor, rows: slice, scales: Tensor, zeros: Tensor | None, scheme: Scheme
) -> tuple[Tensor, Tensor | float]:
    """Return scale and zero, float32, to meet ``_by_group`` of some rows; one number where all zeros are the midpoint.

    ``[rows, groups, 1]`` where groups divide the rows: nothing is repeated in memory. Else ``[rows, in]``.
    """

    def shaped(values: Tensor) -> Tensor:
        even = matrix.shape[1] == scales.shape[1] * scheme.width(matrix.shape[1])
        return values.float()[..., None] if even else expand_groups(values.float(), matrix.shape[1], scheme)

    return shaped(scales[rows]), float(scheme.midpoint) if zeros is None else shaped(zeros[rows])


def _by_group(rows: Tensor, step: Tensor) -> Tensor:
    """View rows as ``step`` (of ``_beside``) wants them."""
    return rows.unflatten(1, (step.shape[1], -1)) if step.dim() == 3 else rows
