"""Calibrate the KV cache: static scales per channel, and the keys and values that a cache gives back.

Static scales are chosen on a bounded sample of tokens, channel by channel, for the least squared error (``fit_range``):
each channel is a number line of its own, and the weight that attention gives a channel is the same for all ranges tried
on it. With 8 bits the range is that of every token seen: what would be gained by clipping is less than what one clipped
token may lose. Keys come after rotary, as the cache sees them; values are rotated by the Hadamard matrix first, as the
pages hold them. Tokens that the cache keeps exact (the first ones of a sequence, which are unlike all others) are left
out.

fp8: one scale for all keys of a layer and one for all values, the largest magnitude / 448, of all tokens: vLLM and
SGLang, which read these scales, keep no token exact.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.core.kvpages import (
    FP8_MOST,
    decode_fp8,
    decode_keys,
    decode_static,
    decode_values,
    encode_fp8,
    encode_keys,
    encode_static,
    encode_values,
    quantize,
    rotate,
)
from quantkit.core.kvscheme import FIRST_EXACT, PAGE_TOKENS, KVScheme, LayerScales
from quantkit.errors import NumericsError, RequestError

NON_FINITE_LIMIT = 0.1  # share of dropped tokens above which scales would mean nothing
SAMPLE_TOKENS = 2048  # a channel's range of 15 steps is known to a few percent from so many
SMALLEST = 2.0**-40  # of a float32 scale: a channel that is always the same
SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
REFITS = 10

Range = tuple[Tensor, Tensor]  # scale and low, float32 [kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """What calibration measured of one layer's cache.

    keys, values: range of every channel, by bits.
    key_sensitivity, value_sensitivity: what each width costs, by bits (``convert`` with a budget, else empty).
    """

    keys: dict[int, Range]
    values: dict[int, Range]
    key_sensitivity: dict[int, float] = field(default_factory=dict)
    value_sensitivity: dict[int, float] = field(default_factory=dict)

    def scales(self, scheme: KVScheme) -> LayerScales:
        """Return the scales for one choice of bits.

        A side of 16 bits has no scales: 1 and 0 stand there, which nothing reads.
        """
        sides = [self._side(self.keys, scheme.keys), self._side(self.values, scheme.values)]
        return LayerScales(*sides[0], *sides[1])

    def _side(self, ranges: dict[int, Range], bits: int) -> Range:
        if bits == 16:
            shape = next(iter((*self.keys.values(), *self.values.values())))[0].shape
            return torch.ones(shape), torch.zeros(shape)
        return ranges[bits]


class KVObserver:
    """Statistics of one layer: the extreme values of every channel and a uniform random sample of tokens.

    Memory is bounded by ``sample_tokens`` (2 x kv_heads x sample_tokens x head_dim floats), however much is added. The
    same seed and the same calls give the same sample.

    first: tokens at the beginning of each sequence that are left out.
    """

    def __init__(self, first: int = FIRST_EXACT, sample_tokens: int = SAMPLE_TOKENS, seed: int = 0) -> None:
        self.first, self.sample_tokens = first, sample_tokens
        self.tokens = 0
        self.dropped = 0  # tokens left out because a key or value was not finite
        self._generator = torch.Generator().manual_seed(seed)
        self._priority = torch.empty(0)
        self._sides: list[_Side] = []

    def add(self, k: Tensor, v: Tensor) -> None:
        """Add keys and values; tokens with NaN or inf are left out.

        k, v: float ``[batch, kv_heads, tokens, head_dim]`` from the beginning of sequences, keys after rotary.
        """
        if k.shape != v.shape or k.dim() != 4:
            raise NumericsError(
                f"keys {list(k.shape)} and values {list(v.shape)}: the quantized cache needs equal shapes "
                "[batch, kv_heads, tokens, head_dim]."
            )
        if not self._sides:
            self._sides = [_Side(turned=False), _Side(turned=True)]
        flat = [x.detach().transpose(0, 1).reshape(k.shape[1], -1, k.shape[3]).float() for x in (k, v)]
        late = (torch.arange(k.shape[2], device=k.device) >= self.first).repeat(k.shape[0])
        finite = torch.isfinite(flat[0]).all(-1).all(0) & torch.isfinite(flat[1]).all(-1).all(0)
        if not bool(finite.all()):
            self.dropped += int((~finite).sum())
            flat, late = [x[:, finite] for x in flat], late[finite]
        for side, x in zip(self._sides, flat, strict=True):
            side.see(x)
        flat = [x[:, late] for x in flat]
        count = flat[0].shape[1]
        if not count:
            return
        priority = torch.cat([self._priority, torch.rand(count, generator=self._generator)])
        keep = priority.topk(min(self.sample_tokens, len(priority))).indices.sort().values
        for side, x in zip(self._sides, flat, strict=True):
            side.add(x, keep, len(self._priority))
        self._priority = priority[keep]
        self.tokens += count

    def ranges(self, schemes: Collection[KVScheme]) -> LayerRanges:
        """Choose ranges for every width of keys and of values in ``schemes``, all of them fp8 or none.

        Raises RequestError if nothing was added, NumericsError if more than a tenth of it was not finite.
        """
        if not self.tokens:
            raise RequestError(
                "no keys and values to calibrate were observed: the calibration windows have no more than the"
                f" {self.first} tokens that stay exact. Use a longer --seq-len."
            )
        if self.dropped > NON_FINITE_LIMIT * (self.tokens + self.dropped):
            raise NumericsError(
                f"{self.dropped} of {self.tokens + self.dropped} calibration tokens have NaN or infinite keys or"
                " values; no cache scale can be calibrated from them. Check the model with `quantkit eval`, or use"
                " --kv-bits 16."
            )
        keys, values = self._sides
        if any(scheme.scales == "fp8" for scheme in schemes):
            return LayerRanges({8: keys.fp8()}, {8: values.fp8()})
        return LayerRanges(
            {bits: keys.range(bits) for bits in sorted({s.keys for s in schemes} - {16})},
            {bits: values.range(bits) for bits in sorted({s.values for s in schemes} - {16})},
        )


class _Side:
    """Keys or values: extremes ``[kv_heads, head_dim]`` and a sample ``[kv_heads, tokens, head_dim]``.

    turned: by Hadamard.
    """

    def __init__(self, turned: bool) -> None:
        self.turned = turned
        self.sample = torch.empty(0)
        self.low = torch.empty(0)
        self.high = torch.empty(0)
        self.largest = 0.0

    def see(self, x: Tensor) -> None:
        """Track the largest magnitude before any token is left out: other engines' fp8 caches keep none exact."""
        if x.numel():
            self.largest = max(self.largest, float(x.abs().amax()))

    def add(self, x: Tensor, keep: Tensor, before: int) -> None:
        """Add x ``[kv_heads, tokens, head_dim]``.

        keep: indices into the sample of ``before`` tokens with x behind it.
        """
        x = rotate(x) if self.turned else x
        low, high = x.amin(1).cpu(), x.amax(1).cpu()
        new = x[:, (keep[keep >= before] - before).to(x.device)].cpu()
        if not self.sample.numel():
            self.low, self.high, self.sample = low, high, new.contiguous()
            return
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self.sample = torch.cat([self.sample[:, keep[keep < before]], new], dim=1)

    def range(self, bits: int) -> Range:
        if bits == 8:
            return full_range(self.low, self.high, bits)
        return fit_range(self.sample.transpose(1, 2).contiguous(), bits)

    def fp8(self) -> Range:
        scale = torch.full_like(self.low, max(self.largest / FP8_MOST, SMALLEST))
        return scale, torch.zeros_like(scale)


def full_range(low: Tensor, high: Tensor, bits: int) -> Range:
    """Return the range whose ends are codes: scale and low."""
    return ((high - low) / ((1 << bits) - 1)).clamp(min=SMALLEST), low.clone()


def fit_range(x: Tensor, bits: int) -> Range:
    """Fit scale and low of groups along the last dimension for a small squared error; never worse than the full range.

    x: float32 ``[..., n]`` -> ``[...]`` each.

    First both ends are pulled towards the mean together, as far as that helps; then range and codes are fitted to each
    other in turn (the range by least squares for fixed codes: Lloyd's method, IEEE Trans. Inf. Theory 28, 1982, with
    levels that stay evenly spaced), which can only lower the error.
    """
    centre, low, high = x.mean(-1), x.amin(-1), x.amax(-1)
    scale, least = full_range(low, high, bits)
    error = _error(x, scale, least, bits)
    for shrink in SHRINKS[1:]:
        tried = full_range(centre + (low - centre) * shrink, centre + (high - centre) * shrink, bits)
        scale, least, error = _better(x, bits, tried, (scale, least), error)
    for _ in range(REFITS):
        codes = quantize(x, scale[..., None], least[..., None], bits)
        mean = codes.mean(-1)
        codes -= mean[..., None]
        spread = codes.square().sum(-1)
        slope = (codes * (x - centre[..., None])).sum(-1) / spread.clamp(min=1e-30)
        slope = torch.where((spread > 0) & (slope > SMALLEST), slope, scale)
        scale, least, error = _better(x, bits, (slope, centre - slope * mean), (scale, least), error)
    return scale, least


def _better(x: Tensor, bits: int, tried: Range, held: Range, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cost = _error(x, *tried, bits)
    better = cost < error
    scale, least = (torch.where(better, new, old) for new, old in zip(tried, held, strict=True))
    return scale, least, torch.minimum(cost, error)


def _error(x: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    back = quantize(x, scale[..., None], low[..., None], bits).mul_(scale[..., None]).add_(low[..., None])
    return back.sub_(x).square_().sum(-1)


def as_cached(
    k: Tensor, v: Tensor, scheme: KVScheme, static: LayerScales | None = None, behind: int = 0
) -> tuple[Tensor, Tensor]:
    """Round whole sequences as the cache gives them to the query with ``behind`` tokens after it.

    The query is itself the newest of ``recent``: it has position ``n = tokens - 1 - behind``; pages that end at or
    before ``n + 1 - recent`` are rounded, the rest is exact.

    k, v: float ``[batch, kv_heads, tokens, head_dim]``, unpadded; results of their dtypes.
    static: scales of a scheme that is not online.
    """
    end = max(0, k.shape[2] - behind - scheme.recent) // PAGE_TOKENS * PAGE_TOKENS
    if not end:
        return k, v
    sides = []
    for x, bits, rounded in ((k, scheme.keys, _cached_keys), (v, scheme.values, _cached_values)):
        if bits < 16:
            x = x.clone()
            x[:, :, scheme.first : end] = rounded(x[:, :, :end], scheme, static)[:, :, scheme.first :].to(x.dtype)
        sides.append(x)
    return sides[0], sides[1]


def _cached_keys(x: Tensor, scheme: KVScheme, static: LayerScales | None) -> Tensor:
    if static is not None and scheme.scales != "online":
        return _static(x, static.k_scale, static.k_low, scheme, scheme.keys)
    pages = x.unflatten(2, (-1, PAGE_TOKENS))
    parts = [(pages[:, :, :1], scheme.first), (pages[:, :, 1:], 0)]
    decoded = [decode_keys(*encode_keys(page, scheme.keys, skip), scheme.keys) for page, skip in parts if page.shape[2]]
    return torch.cat(decoded, 2).flatten(2, 3)


def _cached_values(x: Tensor, scheme: KVScheme, static: LayerScales | None) -> Tensor:
    if static is not None and scheme.scales == "fp8":
        return _static(x, static.v_scale, static.v_low, scheme, 8)
    if static is not None and scheme.scales == "static":
        return rotate(_static(rotate(x), static.v_scale, static.v_low, scheme, scheme.values))
    stored = encode_values(x, scheme.values, scheme.groups(x.shape[-1]))
    return rotate(decode_values(*stored, scheme.values, x.shape[-1]))


def _static(x: Tensor, scale: Tensor, low: Tensor, scheme: KVScheme, bits: int) -> Tensor:
    scale, low = scale.to(x.device), low.to(x.device)
    if scheme.scales == "fp8":
        return decode_fp8(encode_fp8(x, scale), scale)
    return decode_static(encode_static(x, scale, low, bits), scale, low, bits)
