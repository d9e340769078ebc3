"""Describe how a KV cache is kept: bits and scales layer by layer, and the calibrated scales of the static kind.

The numbers themselves are in ``kvpages.py``. A scheme belongs to one layer; a model has one for each of its attention
modules (``KVPlan``), all alike unless a budget has given them different bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RequestError

KV_BITS = (16, 8, 4, 3, 2)
PAGE_TOKENS = 64  # tokens of a page: keys of one channel share a scale along them
# Keys and values of trained models stay below 1,000; below the smallest normal float32 a scale is 0 in some kernels.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**15
MOST_RECENT = 1 << 24  # newest tokens at 16 bits: longer than any context
FIRST_EXACT = 4  # attention sinks: keys unlike all others, which everything attends to
_PAIR = re.compile(r"k(\d+)v(\d+)")

KVScales = Literal["online", "static", "fp8"]


@dataclass(frozen=True, slots=True)
class KVScheme:
    """How one layer's keys and values are kept.

    keys, values: bits, 16 (not quantized), 8, 4, 3 or 2.
    scales: "online" (each page of keys and each token of values has its own), "static" (one per channel, calibrated by
        convert) or "fp8" (8 bits as E4M3 floats with one calibrated scale for all keys and one for all values, what
        other engines call an fp8 cache).
    group_size: channels of a token's value that share an online scale.
    recent: newest tokens that stay at 16 bits at least.
    first: tokens at the beginning of a sequence that stay at 16 bits.
    at_once: every token is rounded as it is stored, so that none is read exactly, as engines with an fp8 cache do.
    Raises RequestError for a value outside its range.

    >>> KVScheme.of("k4v2").label, KVScheme.of(8).label, KVScheme.of(2).recent
    ('k4v2', 8, 128)
    >>> KVScheme().width(80)      # 64 does not divide 80; 40 is the largest divisor up to 64
    40
    """

    keys: int = 16
    values: int = 16
    scales: KVScales = "online"
    group_size: int = 64
    recent: int = 64
    first: int = FIRST_EXACT
    at_once: bool = False

    def __post_init__(self) -> None:
        for bits in (self.keys, self.values):
            if isinstance(bits, bool) or bits not in KV_BITS:
                raise RequestError(f"kv_bits={bits}: the KV cache is kept at {', '.join(map(str, KV_BITS))} bits.")
        if self.scales not in ("online", "static", "fp8"):
            raise RequestError(f"kv_scales={self.scales!r}: online, static or fp8.")
        if self.scales == "fp8" and (self.keys, self.values) != (8, 8):
            raise RequestError(f"kv_scales=fp8 with kv_bits={self.label}: fp8 has 8 bits; use --kv-bits fp8.")
        if self.at_once and self.scales != "fp8":
            raise RequestError(
                "kv_exact=0 (--kv-exact 0) reads an fp8 cache as other engines do: only its scales are known before a"
                f" token comes. Add --kv-bits fp8, or leave it out ({self.label} bits here)."
            )
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise RequestError(f"kv group_size={self.group_size}: a positive number of channels (64).")
        if not 1 <= self.recent <= MOST_RECENT or not 0 <= self.first < PAGE_TOKENS:
            raise RequestError(
                f"kv recent={self.recent}, first={self.first}: 1 to {MOST_RECENT} newest, less than {PAGE_TOKENS}"
                " first ones."
            )

    @classmethod
    def of(cls, bits: int | str, scales: KVScales = "online") -> KVScheme:
        """Return the scheme of ``--kv-bits``: 8, "8" or "k4v2".

        With 2-bit keys the newest 128 tokens stay at 16 bits, else 64. Raises RequestError for anything else.
        """
        text = str(bits).strip().lower()
        if text == "fp8":
            return cls(8, 8, "fp8")
        pair = _PAIR.fullmatch(text)
        keys, values = (int(n) for n in pair.groups()) if pair else (int(text) if text.isdecimal() else 0,) * 2
        if isinstance(bits, bool) or not {keys, values} <= set(KV_BITS):
            raise RequestError(
                f"--kv-bits {bits}: choose {', '.join(map(str, KV_BITS))} or fp8, or name keys and values apart, as"
                " k4v2."
            )
        return cls(keys, values, scales, recent=128 if keys == 2 else 64)

    @property
    def quantized(self) -> bool:
        return min(self.keys, self.values) < 16

    @property
    def label(self) -> int | str:
        """Bits as the command line takes them."""
        if self.scales == "fp8":
            return "fp8"
        return self.keys if self.keys == self.values else f"k{self.keys}v{self.values}"

    def width(self, head_dim: int) -> int:
        """Count the channels of a value that share an online scale.

        The largest divisor of ``head_dim`` that is at most ``group_size``.
        """
        return next(w for w in range(min(self.group_size, head_dim), 0, -1) if head_dim % w == 0)

    def groups(self, head_dim: int) -> int:
        """Groups per head; always equal in size."""
        return head_dim // self.width(head_dim)

    def page_bytes(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Count the bytes of one packed page of 64 tokens, keys and values, scales included.

        dtype: what 16 bit means at run time.
        """
        keys = PAGE_TOKENS * row_bytes(head_dim, self.keys, dtype)
        values = PAGE_TOKENS * row_bytes(head_dim, self.values, dtype)
        if self.scales == "online":
            keys += 4 * head_dim if self.keys < 16 else 0
            values += 4 * PAGE_TOKENS * self.groups(head_dim) if self.values < 16 else 0
        return kv_heads * (keys + values)

    def bytes_per_token(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> float:
        """Count the bytes that one token's key and value take in one layer, once they are packed."""
        return self.page_bytes(kv_heads, head_dim, dtype) / PAGE_TOKENS

    def cache_bytes(self, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Count the bytes of the pages of one sequence in one layer without a sliding window.

        Packed pages, pages of the 16-bit tail, and the first tokens.
        """
        exact = 2 * kv_heads * head_dim * dtype.itemsize
        packed = max(0, tokens + 1 - self.recent) // PAGE_TOKENS if self.quantized else 0
        tail = -(-tokens // PAGE_TOKENS) - packed
        sinks = self.first * exact if self.quantized else 0
        return packed * self.page_bytes(kv_heads, head_dim, dtype) + tail * PAGE_TOKENS * exact + sinks


def row_bytes(channels: int, bits: int, dtype: torch.dtype) -> int:
    """Count the bytes of one token of one head without its scales; three bits are a plane of two and a plane of one."""
    if bits == 16:
        return channels * dtype.itemsize
    if bits == 3:
        return -(-channels // 4) + -(-channels // 8)
    return -(-channels * bits // 8)


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Static scales of one layer, each float32 ``[kv_heads, head_dim]``: ``x ~ code * scale + low``.

    Scales are finite and positive. Those of values are for rotated ones (``kvpages.rotate``); those of fp8 are not
    rotated, are all equal, and their lows are 0.

    Raises CheckpointError naming the field if that does not hold.
    """

    k_scale: Tensor
    k_low: Tensor
    v_scale: Tensor
    v_low: Tensor

    def __post_init__(self) -> None:
        shape = self.k_scale.shape
        for name in SCALE_NAMES:
            value: Tensor = getattr(self, name)
            if value.dtype != torch.float32 or value.dim() != 2 or value.shape != shape:
                raise CheckpointError(
                    f"{name} is {value.dtype} {list(value.shape)}, expected float32 [kv_heads, head_dim] {list(shape)}"
                )
            positive = name.endswith("scale")
            if not bool(torch.isfinite(value).all()) or (positive and bool((value <= 0).any())):
                raise CheckpointError(f"{name} holds a value that is not finite{' and positive' if positive else ''}")
            # A low end may be any number, 0 too; a scale must be large enough to divide by.
            least = float(value.amin()) if positive and value.numel() else SMALLEST_SCALE
            most = float(value.abs().amax()) if value.numel() else SMALLEST_SCALE
            if most > LARGEST_SCALE or least < SMALLEST_SCALE:
                shown = most if most > LARGEST_SCALE else least
                raise CheckpointError(f"{name} holds {shown:.4g}; keys and values that need it are absurd")


SCALE_NAMES = ("k_scale", "k_low", "v_scale", "v_low")


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How a model's KV cache is kept.

    scheme: where ``layers`` does not say otherwise.
    layers: by the name of the attention module (``model.layers.0.self_attn``).
    static: calibrated scales by the same names, for the bits of that layer.
    """

    scheme: KVScheme = field(default_factory=KVScheme)
    layers: Mapping[str, KVScheme] = field(default_factory=dict)
    static: Mapping[str, LayerScales] = field(default_factory=dict)

    def of(self, name: str) -> KVScheme:
        """The scheme of one attention module."""
        return self.layers.get(name, self.scheme)

    @property
    def quantized(self) -> bool:
        return self.scheme.quantized or any(layer.quantized for layer in self.layers.values())

    def with_scales(self, scales: KVScales) -> KVPlan:
        """The same bits with other scales."""
        return KVPlan(
            replace(self.scheme, scales=scales),
            {name: replace(layer, scales=scales) for name, layer in self.layers.items()},
            self.static,
        )

    def rounded_at_once(self) -> KVPlan:
        """The same cache with every token rounded as it is stored. Raises RequestError for any but fp8."""
        return KVPlan(
            replace(self.scheme, at_once=True, recent=1, first=0),
            {name: replace(layer, at_once=True, recent=1, first=0) for name, layer in self.layers.items()},
            self.static,
        )

    @property
    def kind(self) -> str | None:
        """The scales of the quantized layers: "online", "static" or "fp8"; None at 16 bits.

        Where layers differ, the kinds with "and" between them.
        """
        schemes = [*self.layers.values()] or [self.scheme]
        return " and ".join(sorted({scheme.scales for scheme in schemes if scheme.quantized})) or None

    @property
    def label(self) -> int | str:
        """Bits as the command line takes them, or the average of layers that differ."""
        schemes = list(self.layers.values())
        if not schemes or len(set(schemes)) == 1:
            return (schemes[0] if schemes else self.scheme).label
        mean = sum(scheme.keys + scheme.values for scheme in schemes) / (2 * len(schemes))
        return f"{mean:.2f} on average"


def bits_words(label: int | str) -> str:
    """Write a plan's label for people: ``4 bits``, ``k4v2``, ``fp8``, ``2.83 bits on average``.

    >>> bits_words("2.83 on average")
    '2.83 bits on average'
    """
    if str(label).startswith(("k", "fp8")):
        return str(label)
    number, _, rest = str(label).partition(" ")
    return " ".join([number, "bits", *([rest] if rest else [])])


def cache_words(label: int | str, kind: str | None, stored: float | None) -> str:
    """Describe a KV cache, as every command does.

    kind: ``KVPlan.kind``.
    stored: bits of a number with its scales, None where they are not known.

    >>> cache_words("k4v2", "online", 3.5)
    'k4v2, online scales: 3.500 bits per number with its scales'
    >>> cache_words(16, None, 32.0)
    '32 bits'
    """
    if kind is None:
        return f"{stored:.3g} bits" if stored is not None else bits_words(label)
    scales = f"{bits_words(label)}, {'calibrated' if kind == 'fp8' else kind} scales"
    return scales if stored is None else f"{scales}: {stored:.3f} bits per number with its scales"
