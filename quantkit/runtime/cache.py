"""The KV cache: pages of tokens, 16-bit or quantized, behind one interface. Pure torch; knows no model.

A layer holds a pool of pages of 64 tokens, keys and values apart, and a table that says which pages hold each sequence::

    pool   [pages, kv_heads, 64, width]     width = head_dim (float or 8-bit codes), ceil(head_dim / 2) (two 4-bit codes a byte)
    table  [batch, pages of a sequence]     int64, position t of sequence b is pool[table[b, t // 64 - dropped], :, t % 64]

Tokens are encoded when they are appended and decoded when they are read: what attention sees of a token is always what the
pages hold, the tokens of the current step included. A kernel may read pool and table directly. A sliding-window
layer frees pages that no later token can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.core.kvscheme import LayerScales, kv_dequantize, kv_quantize
from quantkit.errors import RequestError

PAGE_TOKENS = 64


class Codec(Protocol):
    """How keys (or values) of one layer are stored: ``[..., kv_heads, tokens, head_dim]`` <-> ``[..., width]``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored elements."""

    def width(self, head_dim: int) -> int:
        """Stored elements per token and head."""

    def encode(self, x: Tensor) -> Tensor: ...

    def decode(self, stored: Tensor, head_dim: int) -> Tensor: ...


@dataclass(frozen=True)
class PlainCodec:
    """As they come, in the run-time dtype: the 16-bit cache (float32 where a CPU has no bf16)."""

    dtype: torch.dtype

    def width(self, head_dim: int) -> int:
        return head_dim

    def encode(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        return stored


@dataclass(frozen=True)
class IntCodec:
    """Static integer codes: 8 bits one a byte; 4 bits two a byte, even channel in the low nibble, odd in the high one.

    scale, zero: float32 ``[kv_heads, groups]``. result: dtype that ``decode`` gives.
    """

    bits: int
    scale: Tensor
    zero: Tensor
    result: torch.dtype
    dtype: torch.dtype = torch.uint8

    def width(self, head_dim: int) -> int:
        return head_dim if self.bits == 8 else -(-head_dim // 2)

    def encode(self, x: Tensor) -> Tensor:
        codes = kv_quantize(x, self.scale, self.zero, 1 << self.bits)
        if self.bits == 8:
            return codes
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[..., ::2] | codes[..., 1::2] << 4

    def decode(self, stored: Tensor, head_dim: int) -> Tensor:
        if self.bits == 4:
            stored = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)[..., :head_dim]
        return kv_dequantize(stored, self.scale, self.zero).to(self.result)


@dataclass(frozen=True)
class LayerSpec:
    """How one layer is cached: codecs of keys and values, and the sliding window in tokens (None: all are kept)."""

    keys: Codec
    values: Codec
    window: int | None = None


def layer_spec(
    scales: LayerScales | None, bits: int, dtype: torch.dtype, device: torch.device, window: int | None
) -> LayerSpec:
    """The spec of a layer: plain at 16 bits, else integer codes with its calibrated scales."""
    if bits == 16:
        return LayerSpec(PlainCodec(dtype), PlainCodec(dtype), window)
    if scales is None:
        raise RequestError(f"kv_bits={bits}: this layer has no calibrated scales. Convert with --kv-bits {bits}.")
    keys = IntCodec(bits, scales.k_scale.to(device), scales.k_zero.to(device), dtype)
    values = IntCodec(bits, scales.v_scale.to(device), scales.v_zero.to(device), dtype)
    return LayerSpec(keys, values, window)


class PagedLayer:
    """Keys and values of one layer for a batch of sequences that advance together.

    capacity: tokens to reserve pages for at the first ``append``; more are taken when it is exceeded.
    """

    def __init__(self, spec: LayerSpec, capacity: int = 0) -> None:
        self.spec = spec
        self.capacity = capacity
        self.length = 0  # tokens appended so far, dropped ones included
        self.dropped = 0  # pages at the front that a sliding window has left behind
        self.head_dim = (0, 0)  # of keys, of values
        self.key_pool = torch.empty(0)
        self.value_pool = torch.empty(0)
        self.table = torch.empty(0, 0, dtype=torch.int64)
        self._free: list[int] = []

    @property
    def start(self) -> int:
        """Position of the first token that is still held."""
        return self.dropped * PAGE_TOKENS

    @property
    def batch(self) -> int:
        return self.table.shape[0]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Encode and store new tokens. k, v: ``[batch, kv_heads, tokens, head_dim]``. Call ``trim`` after the read."""
        if not self.length:
            self._allocate(k, v)
        tokens = k.shape[2]
        self.reserve(self.length + tokens)
        position = torch.arange(self.length, self.length + tokens, device=k.device)
        pages = self.table[:, position // PAGE_TOKENS - self.dropped]  # [batch, tokens]
        slots = (position % PAGE_TOKENS).expand_as(pages)
        # Two index tensors around a slice put batch and tokens first: [batch, tokens, kv_heads, width].
        self.key_pool[pages, :, slots] = self.spec.keys.encode(k).transpose(1, 2)
        self.value_pool[pages, :, slots] = self.spec.values.encode(v).transpose(1, 2)
        self.length += tokens

    def read(self) -> tuple[Tensor, Tensor]:
        """Decoded keys and values from ``start`` on: ``[batch, kv_heads, length - start, head_dim]``."""
        keys = self.spec.keys.decode(self._gather(self.key_pool), self.head_dim[0])
        return keys, self.spec.values.decode(self._gather(self.value_pool), self.head_dim[1])

    def advance(self, tokens: int) -> None:
        """Count tokens that a kernel has written into reserved pages itself, and free what they leave behind."""
        self.length += tokens
        self.trim()

    def trim(self) -> None:
        """Free the pages that a sliding window has left: the next token sees the last ``window - 1`` and itself."""
        if self.spec.window is None:
            return
        gone = max(0, (self.length - self.spec.window + 1) // PAGE_TOKENS - self.dropped)
        if gone:
            self._free += self.table[:, :gone].flatten().tolist()
            self.table = self.table[:, gone:].contiguous()
            self.dropped += gone

    def lease(self, length: int) -> Tensor:
        """Pages for every position up to ``length``, for a kernel that goes there by itself: int64 ``[batch, pages]``, position t in
        column ``t // 64 - dropped``. Behind a sliding window pages come round again. ``settle`` tells how far it went; nothing else may
        be called before. Only after the first ``append``."""
        columns = -(-length // PAGE_TOKENS) - self.dropped
        ring = columns
        if self.spec.window is not None:
            ring = min(columns, max(self.table.shape[1], (self.spec.window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1))
        self.reserve((self.dropped + ring) * PAGE_TOKENS)
        return self.table[:, torch.arange(columns, device=self.table.device) % ring]

    def settle(self, length: int) -> None:
        """Count the tokens that were written into leased pages up to ``length``; pages beyond, and those left behind, become free."""
        held = self.table.shape[1]
        self.length = length
        window = self.spec.window
        gone = 0 if window is None else max(0, (length - window + 1) // PAGE_TOKENS - self.dropped)
        needed = -(-length // PAGE_TOKENS) - self.dropped - gone
        # the columns in use, as the lease numbered them
        columns = torch.arange(gone, gone + held, device=self.table.device) % held
        turned = self.table[:, columns]
        self._free += turned[:, needed:].flatten().tolist()
        self.table = turned[:, :needed].contiguous()
        self.dropped += gone

    def select(self, rows: Tensor) -> None:
        """Keep these sequences only (int64 ``[kept]``, each at most once); the pages of the others become free."""
        keep = set(rows.tolist())
        gone = [row for row in range(self.batch) if row not in keep]
        self._free += self.table[gone].flatten().tolist()
        self.table = self.table[rows]

    def nbytes(self, length: int | None = None) -> int:
        """Bytes of the pages in use; length: of those that so many tokens need, where more are leased."""
        if length is None:
            return self.table.numel() * self.page_bytes()
        window = self.spec.window
        gone = 0 if window is None else max(0, length - window + 1) // PAGE_TOKENS
        return self.batch * (-(-length // PAGE_TOKENS) - gone) * self.page_bytes()

    def reserved_bytes(self) -> int:
        """Bytes of the whole pool, free pages included."""
        return self.key_pool.nbytes + self.value_pool.nbytes

    def page_bytes(self) -> int:
        """Bytes of one page, keys and values."""
        return self.reserved_bytes() // max(1, self.key_pool.shape[0])

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        self.head_dim = (k.shape[3], v.shape[3])
        batch, heads = k.shape[:2]
        self.table = torch.empty(batch, 0, dtype=torch.int64, device=k.device)
        self._free, self.dropped = [], 0
        for name, codec, dim in (
            ("key_pool", self.spec.keys, k.shape[3]),
            ("value_pool", self.spec.values, v.shape[3]),
        ):
            setattr(
                self, name, torch.zeros(0, heads, PAGE_TOKENS, codec.width(dim), dtype=codec.dtype, device=k.device)
            )
        tokens = self.capacity
        if self.spec.window is not None:
            tokens = min(tokens, self.spec.window + 2 * PAGE_TOKENS)
        self._grow(batch * -(-tokens // PAGE_TOKENS))

    def reserve(self, length: int) -> None:
        """Have pages for that many tokens of each sequence. Only after the first ``append``."""
        missing = -(-length // PAGE_TOKENS) - self.dropped - self.table.shape[1]
        if missing <= 0:
            return
        needed = missing * self.batch
        if needed > len(self._free):
            self._grow(needed - len(self._free))
        taken, self._free = self._free[:needed], self._free[needed:]
        # Pages of one sequence lie beside each other, which a kernel reads faster.
        fresh = torch.tensor(taken, dtype=torch.int64, device=self.table.device).reshape(self.batch, missing)
        self.table = torch.cat([self.table, fresh], dim=1)

    def _grow(self, pages: int) -> None:
        first = self.key_pool.shape[0]
        for name in ("key_pool", "value_pool"):
            pool: Tensor = getattr(self, name)
            setattr(
                self,
                name,
                torch.cat([pool, pool.new_zeros(pages, *pool.shape[1:])])
                if first
                else pool.new_zeros(pages, *pool.shape[1:]),
            )
        self._free += range(first, first + pages)

    def _gather(self, pool: Tensor) -> Tensor:
        stored = pool[self.table].transpose(1, 2)  # [batch, kv_heads, pages, 64, width]
        return stored.flatten(2, 3)[:, :, : self.length - self.start]


class KVCache:
    """The layers of one batch."""

    def __init__(self, specs: Sequence[LayerSpec], capacity: int = 0) -> None:
        self.layers = [PagedLayer(spec, capacity) for spec in specs]

    @property
    def length(self) -> int:
        """Tokens appended to every layer."""
        return self.layers[-1].length

    def select(self, rows: Tensor) -> None:
        """Keep these sequences only."""
        for layer in self.layers:
            layer.select(rows)

    def nbytes(self, length: int | None = None) -> int:
        """Bytes of the pages in use; scales, which every sequence shares, are not counted. length: see ``PagedLayer.nbytes``."""
        return sum(layer.nbytes(length) for layer in self.layers)

    def reserved_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(layer.reserved_bytes() for layer in self.layers)
