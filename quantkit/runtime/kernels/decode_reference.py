"""The reference of a decode step between its matrices, in plain torch: what the Triton kernels are tested against.

Everything that changes from step to step (position, padding, pages) is a tensor on the device: see ``Pages``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.core import kvpages
from quantkit.core.kvscheme import PAGE_TOKENS

PAGE = PAGE_TOKENS
FIELDS = (
    "keys",
    "key_scales",
    "values",
    "value_scales",
)  # of packed pages, as ``kv_cache.packed_page.Packing`` draws them


@dataclass(frozen=True)
class Heads:
    """The attention heads of a layer.

    query, kv: numbers of query heads and of key and value heads. dim: channels of each.
    scaling: scores are multiplied by it.
    """

    query: int
    kv: int
    dim: int
    scaling: float


@dataclass(frozen=True)
class PackedPages:
    """A layer's packed pages, with online scales.

    table: int64 ``[sequences, pages]``.
    done: int32 ``[sequences]``, pages that were packed when the device tables were written.
    fields: int64 ``[6]``, addresses of the pools' fields (``FIELDS``; 0 where there is none), then of the exact first
    keys and values ``[sequences, kv heads, first, dim]``.
    keys, values: bits.
    groups: channel groups of a token's value, each with a scale.
    recent, first: of the ``KVScheme``.
    """

    table: Tensor
    done: Tensor
    fields: Tensor
    keys: int
    values: int
    groups: int
    recent: int
    first: int


@dataclass(frozen=True)
class Pages:
    """Where one layer's keys and values lie, and where the current token goes.

    pads: int32 ``[sequences]``, by how many tokens a sequence is shorter than the longest; -1: no sequence, nothing is
    read or written for it.
    length: int32 ``[1]``, the position of the current token in the longest: in sequence b it is ``n = length -
    pads[b]``.
    table: int64 ``[sequences, pages]``: token t of a sequence is in page ``table[b, t // 64]`` of the exact ones, or of
    the packed ones where that page has been packed: all pages that end at or before ``n + 1 - recent``, and those that
    were before.
    pools: int64 ``[2]``, addresses of the exact pools of keys and of values ``[pages, kv heads, 64, dim]``.
    window: in tokens, or 0.
    """

    pads: Tensor
    length: Tensor
    table: Tensor
    pools: Tensor
    window: int = 0
    packed: PackedPages | None = None


@dataclass(frozen=True)
class PackJob:
    """Layers whose pages are packed alike.

    index: int32 ``[layers of the job]``, their numbers among all. The other tensors are those of ``Pages`` and
    ``PackedPages`` for all layers:
    exact, packed: int64 ``[layers, sequences, pages]``.
    done: int32 ``[layers, sequences]``.
    pools: int64 ``[layers, 2]``. fields: int64 ``[layers, 6]``. windows: int32 ``[layers]``.
    """

    index: Tensor
    pads: Tensor
    length: Tensor
    exact: Tensor
    packed: Tensor
    done: Tensor
    pools: Tensor
    fields: Tensor
    windows: Tensor
    keys: int
    values: int
    groups: int
    recent: int
    first: int


@dataclass(frozen=True)
class PageTensors:
    """The tensors behind the addresses of ``Pages``, for the definitions here."""

    keys: Tensor
    values: Tensor
    packed: Mapping[str, Tensor] | None = None
    first: tuple[Tensor, Tensor] | None = None


def root_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * weight / sqrt(mean x^2 + eps)`` over the last dimension, in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_norm(
    residual: Tensor, delta: Tensor | None, after: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Do ``residual += [norm by after] delta`` in place, then return its norm by ``weight``, rounded to ``dtype``.

    residual: float32 ``[tokens, hidden]``; delta: the same shape in any dtype, or None; after, weight: float32
    ``[hidden]``.
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
    """Rotate the first channels of heads ``[sequences, heads, dim]``, float32; cos, sin ``[sequences, width]``."""
    width = cos.shape[-1]
    inside, rest = x[..., :width], x[..., width:]
    left, right = inside.chunk(2, dim=-1)
    swapped = torch.cat([-right, left], dim=-1)
    return torch.cat([inside * cos[:, None] + swapped * sin[:, None], rest], dim=-1)


def rotary_and_cache(
    q: Tensor, k: Tensor, v: Tensor, norms: tuple[Tensor | None, Tensor | None], angles: tuple[Tensor, Tensor],
    pages: Pages, heads: Heads, eps: float, stored: PageTensors,
) -> Tensor:  # fmt: skip
    """Apply [norm] and rotary, and write keys and values into exact pages.

    First tokens of a packed layer are written beside the pages too. Returns the queries ``[sequences, heads, dim]``.

    q, k, v: ``[sequences, heads * dim]``.
    norms: of queries and keys, float32 ``[dim]`` or None.
    angles: cos and sin, float32 ``[positions, width]``.
    """
    now = (pages.length - pages.pads).long()
    cos, sin = (part[now] for part in angles)
    turned = []
    for x, norm, count in ((q, norms[0], heads.query), (k, norms[1], heads.kv)):
        x = x.view(-1, count, heads.dim).float()
        turned.append(turn(x if norm is None else root_norm(x, norm, eps), cos, sin).to(q.dtype))
    page = pages.table.gather(1, now[:, None] // PAGE)[:, 0]
    first = stored.first or (stored.keys, stored.values)
    for pool, kept, x in zip(
        (stored.keys, stored.values), first, (turned[1], v.view(-1, heads.kv, heads.dim)), strict=True
    ):
        pool[page, :, now % PAGE] = x
        if pages.packed is not None:
            rows = (now < pages.packed.first).nonzero()[:, 0]
            kept[rows, :, now[rows]] = x[rows]
    return turned[0]


def packed_pages(pages: Pages, b: int) -> int:
    """Count the pages of sequence b that are packed when attention of the current token reads them."""
    packed = pages.packed
    if packed is None:
        return 0
    return max(int(packed.done[b]), (int(pages.length) - int(pages.pads[b]) + 1 - packed.recent) // PAGE)


def pack(pages: Pages, stored: PageTensors) -> None:
    """Pack the pages that this token makes old enough.

    A caller that steps one token at a time packs each page once, at most one a sequence.
    """
    packed = pages.packed
    assert packed is not None
    assert stored.packed is not None
    for b, pad in enumerate(pages.pads.tolist()):
        last = int(pages.length) - pad + 1 - packed.recent
        page = last // PAGE - 1
        if pad < 0 or last % PAGE or page < int(packed.done[b]) or (pages.window and packed.recent >= pages.window):
            continue
        source, target = int(pages.table[b, page]), int(packed.table[b, page])
        k, v, fields = (
            stored.keys[source],
            stored.values[source],
            {"keys": stored.keys[source], "values": stored.values[source]},
        )
        if packed.keys < 16:
            skip = 0 if page else packed.first
            fields["keys"], fields["key_scales"] = kvpages.encode_keys(k, packed.keys, skip)
        if packed.values < 16:
            fields["values"], fields["value_scales"] = kvpages.encode_values(v, packed.values, packed.groups)
        for name, x in fields.items():
            stored.packed[name][target] = x


def attend(q: Tensor, pages: Pages, heads: Heads, stored: PageTensors) -> Tensor:
    """Softmax attention of one query a sequence over its pages, the current token included, in float32.

    q: ``[sequences, heads, dim]`` -> ``[sequences, heads * dim]`` in its dtype; 0 where there is no sequence.
    """
    y = torch.zeros_like(q)
    for b, pad in enumerate(pages.pads.tolist()):
        if pad < 0:
            continue
        now = int(pages.length) - pad
        begin = max(0, now - pages.window + 1) if pages.window else 0
        keys, values = _whole(pages, stored, b, begin // PAGE, now // PAGE + 1, heads.dim)
        inside = slice(begin % PAGE, now + 1 - begin // PAGE * PAGE)
        keys, values = keys[:, inside], values[:, inside]
        grouped = q[b].float().view(heads.kv, -1, heads.dim)
        weights = (grouped @ keys.transpose(-1, -2) * heads.scaling).softmax(-1)
        y[b] = (weights @ values).flatten(0, 1).to(q.dtype)
    return y.flatten(1)


def _whole(pages: Pages, stored: PageTensors, b: int, begin: int, end: int, dim: int) -> tuple[Tensor, Tensor]:
    """Pages ``begin .. end`` of a sequence as float32 ``[kv heads, tokens, dim]``."""
    packed, old = pages.packed, min(max(begin, packed_pages(pages, b)), end)
    exact = pages.table[b, old:end]
    parts = [[pool[exact].float()] for pool in (stored.keys, stored.values)]
    if packed is not None and stored.packed is not None and begin < old:
        f = {name: x[packed.table[b, begin:old]] for name, x in stored.packed.items()}
        keys = f["keys"] if packed.keys == 16 else kvpages.decode_keys(f["keys"], f["key_scales"], packed.keys)
        values = f["values"].float()
        if packed.values < 16:
            rotated = kvpages.decode_values(f["values"], f["value_scales"], packed.values, dim)
            values = kvpages.rotate(rotated)
        keys = keys.float()
        if begin == 0 and stored.first is not None:
            keys[0, :, : packed.first], values[0, :, : packed.first] = (x[b].float() for x in stored.first)
        parts = [[keys, *parts[0]], [values, *parts[1]]]
    whole = [torch.cat(part).transpose(0, 1).flatten(1, 2) for part in parts]
    return whole[0], whole[1]
