"""Static scales for the KV cache: a bounded sample of keys and values, then the range that minimises rounding error.

A 4-bit scale that spans the extreme values wastes most of its 15 steps on outliers (attention sinks, single channels), so
the range of each group is clipped where the mean of |error|**3 over the sample is smallest. Idea of the search: Nagel et
al., arXiv 2106.08295, section 3.1, which squares. The cube clips less: attention follows the large keys. Seen on SmolLM2-135M
(2560 tokens of calibration, KL over 768): 8 bits 0.0022 unclipped, 0.0026 squared, 0.0021 cubed; 4 bits 0.52, 0.24, 0.22.
Keys come after rotary, as the cache sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core.kvscheme import KVScheme, LayerScales
from quantkit.errors import NumericsError, RequestError

# A scale is never smaller than this fraction of its group's largest magnitude: codes of a (nearly) constant group stay
# far inside the range where float32 represents whole numbers exactly (zero = value / scale < 2**24).
SMALLEST_RELATIVE_SCALE = 2.0**-16


NON_FINITE_LIMIT = 0.1  # share of dropped tokens above which scales would mean nothing
SAMPLE_TOKENS = 2048  # enough for a scale per head and group: hundreds of thousands of values


class KVObserver:
    """Statistics of one layer: the extreme value of every channel and a uniform random sample of tokens.

    Memory is bounded by ``sample_tokens`` (2 x kv_heads x sample_tokens x head_dim floats), however much is added.
    The same seed and the same calls give the same sample.
    """

    def __init__(self, sample_tokens: int = SAMPLE_TOKENS, seed: int = 0) -> None:
        self.sample_tokens = sample_tokens
        self.tokens = 0
        self.dropped = 0  # tokens left out because a key or value was not finite
        self._generator = torch.Generator().manual_seed(seed)
        self._priority = torch.empty(0)
        self._sides: list[_Side] = []

    def add(self, k: Tensor, v: Tensor) -> None:
        """k, v: float ``[batch, kv_heads, tokens, head_dim]``, keys after rotary. Tokens with NaN or inf are left out."""
        if k.shape != v.shape or k.dim() != 4:
            raise NumericsError(
                f"keys {list(k.shape)} and values {list(v.shape)}: the quantized cache needs equal shapes "
                "[batch, kv_heads, tokens, head_dim]."
            )
        if not self._sides:
            self._sides = [_Side(), _Side()]
        flat = [x.detach().transpose(0, 1).reshape(k.shape[1], -1, k.shape[3]).float().cpu() for x in (k, v)]
        finite = torch.isfinite(flat[0]).all(-1).all(0) & torch.isfinite(flat[1]).all(-1).all(0)
        if not bool(finite.all()):
            self.dropped += int((~finite).sum())
            flat = [x[:, finite] for x in flat]
        count = flat[0].shape[1]
        if not count:
            return
        priority = torch.cat([self._priority, torch.rand(count, generator=self._generator)])
        keep = priority.topk(min(self.sample_tokens, len(priority))).indices.sort().values
        for side, x in zip(self._sides, flat, strict=True):
            side.add(x, keep)
        self._priority = priority[keep]
        self.tokens += count

    def result(self, scheme: KVScheme) -> LayerScales:
        """The scales that minimise the cubed error over the sample.

        Raises RequestError if nothing was added, NumericsError if more than a tenth of it was not finite.
        """
        if scheme.bits == 16:
            raise RequestError("kv_bits=16: a 16-bit cache has no scales.")
        if not self._sides:
            raise RequestError("no keys and values were observed: the calibration text is empty.")
        if self.dropped > NON_FINITE_LIMIT * (self.tokens + self.dropped):
            raise NumericsError(
                f"{self.dropped} of {self.tokens + self.dropped} calibration tokens have NaN or infinite keys or values; no "
                "cache scale can be calibrated from them. Check the model with `quantkit eval`, or use --kv-bits 16."
            )
        head_dim = self._sides[0].sample.shape[-1]
        k_scale, k_zero = self._sides[0].scales(scheme)
        v_scale, v_zero = self._sides[1].scales(scheme)
        return LayerScales(k_scale, k_zero, v_scale, v_zero, head_dim)


class _Side:
    """Keys or values: extremes ``[kv_heads, head_dim]`` and a sample ``[kv_heads, tokens, head_dim]``."""

    def __init__(self) -> None:
        self.sample = torch.empty(0)
        self.low = torch.empty(0)
        self.high = torch.empty(0)

    def add(self, x: Tensor, keep: Tensor) -> None:
        low, high = x.amin(1), x.amax(1)
        first = not self.sample.numel()
        self.low = low if first else torch.minimum(self.low, low)
        self.high = high if first else torch.maximum(self.high, high)
        self.sample = (x if first else torch.cat([self.sample, x], dim=1))[:, keep].contiguous()

    def scales(self, scheme: KVScheme) -> tuple[Tensor, Tensor]:
        heads, tokens, head_dim = self.sample.shape
        groups = scheme.groups(head_dim)
        values = self.sample.reshape(heads, tokens, groups, -1).transpose(1, 2).reshape(heads, groups, -1)
        low = self.low.reshape(heads, groups, -1).amin(-1)
        high = self.high.reshape(heads, groups, -1).amax(-1)
        return search_range(values, low, high, scheme.levels)


def search_range(values: Tensor, low: Tensor, high: Tensor, levels: int, *, steps: int = 20) -> tuple[Tensor, Tensor]:
    """Scale and zero of each group that minimise ``sum |error|**3`` over ``values``, never worse there than the full range.

    values: float32 ``[..., n]``. low, high: ``[...]``, the extremes to start from. The two ends are pulled towards the
    group's mean in turn, two rounds of ``steps`` positions each. Returns float32 ``[...]``, zeros whole numbers.
    """
    centre = values.mean(-1)
    # Errors are measured against the full range, else the cubes of small values become subnormal, which is very slow.
    unit = (high - low).clamp(min=1e-30)[..., None]
    ends = [torch.ones_like(low), torch.ones_like(low)]
    candidates = torch.cat([torch.linspace(1.0, 0.1, steps - 4), torch.tensor([0.07, 0.05, 0.03, 0.02])])

    def trial(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, zero = _params(centre + (low - centre) * left, centre + (high - centre) * right, levels)
        codes = torch.round(values / scale[..., None]).add_(zero[..., None]).clamp_(0, levels - 1)
        error = codes.sub_(zero[..., None]).mul_(scale[..., None]).sub_(values).abs_().div_(unit)
        return error.mul_(error.square()).sum(-1), scale, zero

    best, scale, zero = trial(ends[0], ends[1])
    for _ in range(2):
        for end in (0, 1):
            for shrink in candidates:
                tried = list(ends)
                tried[end] = torch.full_like(low, float(shrink))
                error, new_scale, new_zero = trial(tried[0], tried[1])
                better = error < best
                best = torch.where(better, error, best)
                scale, zero = torch.where(better, new_scale, scale), torch.where(better, new_zero, zero)
                ends[end] = torch.where(better, tried[end], ends[end])
    return scale, zero


def _params(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    magnitude = torch.maximum(low.abs(), high.abs())
    smallest = (magnitude * SMALLEST_RELATIVE_SCALE).clamp(min=1e-12)
    scale = torch.maximum((high - low) / (levels - 1), smallest)
    return scale, torch.round(-low / scale)
