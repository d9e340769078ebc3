"""A decode step between its matrices, in plain torch: the definitions that the Triton kernels of a step are tested against.

Everything that changes from step to step (position, padding, pages) is a tensor on the device: see ``Pages``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.core.kvscheme import kv_dequantize, kv_quantize

PAGE = 64  # tokens a page of the cache; ``cache.PAGE_TOKENS``


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and of key and value heads, channels of each; scores are multiplied by ``scaling``."""

    query: int
    kv: int
    dim: int
    scaling: float


@dataclass(frozen=True)
class Pages:
    """Where one layer's keys and values lie, and where the current token goes.

    pads: int32 ``[sequences]``, padded tokens at the front; -1: no sequence, nothing is read or written for it. length: int32 ``[1]``,
    the position of the current token, padding counted. table: int64 ``[sequences, pages]``; start: int32 ``[1]``: position t is in page
    ``table[b, t // 64 - start]``. pools: int64 ``[2]``, addresses of the pools of keys and of values (``cache.py`` draws them). window: in
    tokens, or 0. bits: 16 (as they come), 8 or 4; then k_scale, k_zero, v_scale, v_zero: float32 ``[kv heads, groups]``.
    """

    pads: Tensor
    length: Tensor
    table: Tensor
    start: Tensor
    pools: Tensor
    window: int = 0
    bits: int = 16
    scales: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def groups(self) -> int:
        return 1 if self.scales is None else self.scales[0].shape[1]

    def numbers(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scales and zeros as kernels take them; a tensor that is not touched where there are none."""
        return self.scales or (unused, unused, unused, unused)

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes of one token and head in a page."""
        return dim * dtype.itemsize if self.bits == 16 else -(-dim * self.bits // 8)


def root_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * weight / sqrt(mean x^2 + eps)`` over the last dimension, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_norm(
    residual: Tensor, delta: Tensor | None, after: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """``residual += [norm by after] delta`` in place, then its norm by ``weight``, rounded to ``dtype``.

    residual: float32 ``[tokens, hidden]``; delta: the same shape in any dtype, or None; after, weight: float32 ``[hidden]``.
    """
    if delta is not None:
        residual += delta.float() if after is None else root_norm(delta.float(), after, eps)
    return root_norm(residual, weight, eps).to(dtype)


def activated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """``act(gate) * up`` in float32, rounded to the dtype of ``gate``. act: silu or gelu_tanh."""
    x = gate.float()
    value = nn.functional.silu(x) if act == "silu" else nn.functional.gelu(x, approximate="tanh")
    return (value * up.float()).to(gate.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary on the first channels of heads ``[sequences, heads, dim]``, float32; cos, sin ``[sequences, width]``."""
    width = cos.shape[-1]
    inside, rest = x[..., :width], x[..., width:]
    left, right = inside.chunk(2, dim=-1)
    swapped = torch.cat([-right, left], dim=-1)
    return torch.cat([inside * cos[:, None] + swapped * sin[:, None], rest], dim=-1)


def rotary_and_cache(
    q: Tensor, k: Tensor, v: Tensor, norms: tuple[Tensor | None, Tensor | None], angles: tuple[Tensor, Tensor],
    pages: Pages, heads: Heads, eps: float, pools: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """[norm], rotary, and the write of keys and values into ``pools`` (what ``pages.pools`` points at).

    q, k, v: ``[sequences, heads * dim]``; norms: of queries and keys, float32 ``[dim]`` or None; angles: cos and sin, float32
    ``[positions, width]``. Returns the queries ``[sequences, heads, dim]``.
    """
    where = (pages.length - pages.pads).long()
    cos, sin = (part[where] for part in angles)
    turned = []
    for x, norm, count in ((q, norms[0], heads.query), (k, norms[1], heads.kv)):
        x = x.view(-1, count, heads.dim).float()
        turned.append(turn(x if norm is None else root_norm(x, norm, eps), cos, sin).to(q.dtype))
    now = int(pages.length)
    page = pages.table[:, now // PAGE - int(pages.start)]
    for index, (pool, x) in enumerate(zip(pools, (turned[1], v.view(-1, heads.kv, heads.dim)), strict=True)):
        pool[page, :, now % PAGE] = _encode(x, pages, index)
    return turned[0]


def _encode(x: Tensor, pages: Pages, index: int) -> Tensor:
    if pages.scales is None:
        return x
    scale, zero = pages.scales[2 * index : 2 * index + 2]
    codes = kv_quantize(x[:, :, None], scale, zero, 1 << pages.bits)[:, :, 0]
    if pages.bits == 8:
        return codes
    codes = nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., ::2] | codes[..., 1::2] << 4


def attend(q: Tensor, pages: Pages, heads: Heads, pools: tuple[Tensor, Tensor]) -> Tensor:
    """Softmax attention of one query a sequence over what its pages hold, the current token included, in float32.

    q: ``[sequences, heads, dim]`` -> ``[sequences, heads * dim]`` in its dtype.
    """
    now, start = int(pages.length), int(pages.start) * PAGE
    keys, values = (_decode(pool[pages.table], pages, i, heads.dim, q.dtype) for i, pool in enumerate(pools))
    at = torch.arange(start, start + keys.shape[2], device=q.device)
    seen = (at <= now) & (at >= pages.pads[:, None])
    if pages.window:
        seen &= at > now - pages.window
    grouped = q.float().view(-1, heads.kv, heads.query // heads.kv, heads.dim)
    scores = (grouped @ keys.transpose(-1, -2) * heads.scaling).masked_fill(~seen[:, None, None], -torch.inf)
    values = values.masked_fill(~seen[:, None, :, None], 0.0)
    return (scores.softmax(-1) @ values).reshape(len(q), -1).to(q.dtype)


def _decode(stored: Tensor, pages: Pages, index: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Pages ``[sequences, pages, kv heads, 64, width]`` -> float32 ``[sequences, kv heads, tokens, dim]``."""
    stored = stored.transpose(1, 2).flatten(2, 3)
    if pages.scales is None:
        return stored.float()
    if pages.bits == 4:
        stored = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)[..., :dim]
    scale, zero = pages.scales[2 * index : 2 * index + 2]
    return kv_dequantize(stored, scale, zero).to(dtype).float()
