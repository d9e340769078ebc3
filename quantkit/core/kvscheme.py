"""KVScheme and KVScales: how the keys and values of a cache become integers, and the calibrated scales that do it.

A scale belongs to one layer, one key/value head and one group of channels; it is static, that is, the same for every
token. ``code = clamp(round(x / scale) + zero, 0, 2**bits - 1)`` and ``x ~ (code - zero) * scale``. Unlike the zeros of
weights, a zero here is any whole number: the keys of a biased projection may lie wholly on one side of 0, and their
range then need not contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RequestError

KV_BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class KVScheme:
    """bits: 16 (not quantized), 8 or 4, keys and values alike. group_size: channels of a head that share a scale.

    Raises RequestError for a value outside its range.

    >>> KVScheme(bits=4).width(80)      # 64 does not divide 80; 40 is the largest divisor up to 64
    40
    """

    bits: int = 16
    group_size: int = 64

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in KV_BITS:
            raise RequestError(f"kv_bits={self.bits}: the KV cache is kept at {', '.join(map(str, KV_BITS))} bits.")
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise RequestError(
                f"kv group_size={self.group_size}: a positive number of channels (64, or 1 for per channel)."
            )

    @property
    def levels(self) -> int:
        """Number of codes."""
        return 1 << self.bits

    def width(self, head_dim: int) -> int:
        """Channels per group: the largest divisor of ``head_dim`` that is at most ``group_size``."""
        return next(w for w in range(min(self.group_size, head_dim), 0, -1) if head_dim % w == 0)

    def groups(self, head_dim: int) -> int:
        """Groups per head; always equal in size."""
        return head_dim // self.width(head_dim)

    def bytes_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one token's key and value take in one layer (``dtype`` is what 16 bit means at run time)."""
        if self.bits == 16:
            return 2 * kv_heads * head_dim * dtype.itemsize
        return 2 * kv_heads * -(-head_dim * self.bits // 8)


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Scales of one layer, each float32 ``[kv_heads, groups]``: scales finite and positive, zeros finite whole numbers.

    Raises CheckpointError naming the field if that does not hold.
    """

    k_scale: Tensor
    k_zero: Tensor
    v_scale: Tensor
    v_zero: Tensor
    head_dim: int

    def __post_init__(self) -> None:
        shape = self.k_scale.shape
        for name in SCALE_NAMES:
            value: Tensor = getattr(self, name)
            if value.dtype != torch.float32 or value.dim() != 2 or value.shape != shape:
                raise CheckpointError(
                    f"{name} is {value.dtype} {list(value.shape)}, expected float32 [kv_heads, groups] {list(shape)}"
                )
            if not bool(torch.isfinite(value).all()) or (name.endswith("scale") and bool((value <= 0).any())):
                raise CheckpointError(
                    f"{name} holds a value that is not finite{' and positive' if name.endswith('scale') else ''}"
                )
            if name.endswith("zero") and not torch.equal(value, value.round()):
                raise CheckpointError(f"{name} holds a value that is no whole number")
        if self.head_dim < 1 or self.head_dim % shape[1]:
            raise CheckpointError(f"{shape[1]} groups do not divide head_dim {self.head_dim}")


SCALE_NAMES = tuple(f.name for f in fields(LayerScales) if f.name != "head_dim")


@dataclass(frozen=True, slots=True)
class KVScales:
    """The calibrated scales of a model, by the name of each attention module (``model.layers.0.self_attn``)."""

    scheme: KVScheme
    layers: Mapping[str, LayerScales]


def kv_quantize(x: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    """Codes of keys or values: float ``[..., kv_heads, tokens, head_dim]`` -> uint8 of the same shape.

    scale, zero: float32 ``[kv_heads, groups]``. The one definition; kernels are tested against it.
    """
    heads, tokens, head_dim = x.shape[-3:]
    grouped = x.float().reshape(*x.shape[:-1], scale.shape[1], head_dim // scale.shape[1])
    codes = torch.round(grouped / scale[:, None, :, None]).add_(zero[:, None, :, None]).clamp_(0, levels - 1)
    return codes.to(torch.uint8).reshape(*x.shape[:-3], heads, tokens, head_dim)


def kv_dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``(code - zero) * scale``: uint8 ``[..., kv_heads, tokens, head_dim]`` -> float32 of the same shape."""
    grouped = codes.float().reshape(*codes.shape[:-1], scale.shape[1], codes.shape[-1] // scale.shape[1])
    return grouped.sub_(zero[:, None, :, None]).mul_(scale[:, None, :, None]).reshape(codes.shape)
