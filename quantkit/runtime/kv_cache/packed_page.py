"""Packed pages of one layer: the fields of a page, encoding and decoding (``core/kvpages.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core import kvpages as numbers
from quantkit.core.kvscheme import PAGE_TOKENS, KVScheme, LayerScales, row_bytes
from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime.kv_cache.page_pool import Fields


@dataclass(frozen=True)
class Packing:
    """How pages of a layer are packed.

    scheme: of the layer.
    static: its calibrated scales, on the device of the cache; None for online scales.
    dtype: the run-time dtype, for a side (keys or values) that stays at 16 bits.

    Fields of a page::

        keys          uint8    [kv_heads, 64, row]            (dtype, [kv_heads, 64, head_dim] at 16 bits)
        key_scales    float16  [kv_heads, 2, head_dim]        online scales only: scale, low
        values        uint8    [kv_heads, 64, row]
        value_scales  float16  [kv_heads, 64, groups, 2]      online scales only: scale, low
    """

    scheme: KVScheme
    dtype: torch.dtype
    static: LayerScales | None = None

    def __post_init__(self) -> None:
        if self.scheme.scales != "online" and self.static is None:
            raise RequestError(
                f"kv_scales={self.scheme.scales}: this layer has no calibrated scales. Convert with --kv-bits"
                f" {self.scheme.label}, or use online scales."
            )

    def fields(self, kv_heads: int, key_dim: int, value_dim: int) -> Fields:
        """Return shape and dtype of each field of a page, by name.

        kv_heads: key-value heads of the layer.
        key_dim: channels of a key.
        value_dim: channels of a value.

        Raises CheckpointError where the static scales are for keys and values of another shape.
        """
        if self.static is not None and self.static.k_scale.shape != (kv_heads, key_dim):
            raise CheckpointError(
                f"the stored KV scales are for {list(self.static.k_scale.shape)} heads and channels, this model caches"
                f" {[kv_heads, key_dim]}. Convert again with --kv-bits."
            )
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, bits, dim in (("keys", self.scheme.keys, key_dim), ("values", self.scheme.values, value_dim)):
            if bits == 16:
                shapes[name] = ((kv_heads, PAGE_TOKENS, dim), self.dtype)
            else:
                shapes[name] = ((kv_heads, PAGE_TOKENS, row_bytes(dim, bits, self.dtype)), torch.uint8)
        if self.scheme.scales == "online":
            if self.scheme.keys < 16:
                shapes["key_scales"] = ((kv_heads, 2, key_dim), torch.float16)
            if self.scheme.values < 16:
                shapes["value_scales"] = ((kv_heads, PAGE_TOKENS, self.scheme.groups(value_dim), 2), torch.float16)
        return shapes

    def encode(self, k: Tensor, v: Tensor, skip: int) -> dict[str, Tensor]:
        """Encode whole pages into fields.

        k: keys ``[pages, kv_heads, 64, head_dim]``.
        v: values, in the same shape.
        skip: tokens at the front of each page that do not count for the range of keys.
        """
        scheme, parts = self.scheme, {"keys": k, "values": v}
        if scheme.scales == "fp8" and self.static is not None:
            parts["keys"] = numbers.encode_fp8(k, self.static.k_scale)
            parts["values"] = numbers.encode_fp8(v, self.static.v_scale)
        elif scheme.scales == "static" and self.static is not None:
            s = self.static
            if scheme.keys < 16:
                parts["keys"] = numbers.encode_static(k, s.k_scale, s.k_low, scheme.keys)
            if scheme.values < 16:
                parts["values"] = numbers.encode_static(numbers.rotate(v), s.v_scale, s.v_low, scheme.values)
        else:
            if scheme.keys < 16:
                parts["keys"], parts["key_scales"] = numbers.encode_keys(k, scheme.keys, skip)
            if scheme.values < 16:
                groups = scheme.groups(v.shape[-1])
                parts["values"], parts["value_scales"] = numbers.encode_values(v, scheme.values, groups)
        return parts

    def round_tokens(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Round tokens as they come, where the scheme keeps none exact; else return them as they are.

        k, v: keys and values ``[batch, kv_heads, tokens, head_dim]``.
        """
        if not self.scheme.at_once or self.static is None:
            return k, v
        scales = (self.static.k_scale, k), (self.static.v_scale, v)
        keys, values = (numbers.decode_fp8(numbers.encode_fp8(x, scale), scale).to(x.dtype) for scale, x in scales)
        return keys, values

    def decode(self, stored: Mapping[str, Tensor], head_dim: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Decode fields into keys and values ``[..., kv_heads, 64, head_dim]`` of the run-time dtype.

        stored: fields ``[..., kv_heads, 64, ...]`` by name.
        head_dim: channels of a key and of a value.
        """
        scheme, keys, values = self.scheme, stored["keys"], stored["values"]
        if scheme.scales == "fp8" and self.static is not None:
            keys = numbers.decode_fp8(keys, self.static.k_scale)
            values = numbers.decode_fp8(values, self.static.v_scale)
        elif scheme.scales == "static" and self.static is not None:
            s = self.static
            if scheme.keys < 16:
                keys = numbers.decode_static(keys, s.k_scale, s.k_low, scheme.keys)
            if scheme.values < 16:
                values = numbers.rotate(numbers.decode_static(values, s.v_scale, s.v_low, scheme.values))
        else:
            if scheme.keys < 16:
                keys = numbers.decode_keys(keys, stored["key_scales"], scheme.keys)
            if scheme.values < 16:
                rotated = numbers.decode_values(values, stored["value_scales"], scheme.values, head_dim[1])
                values = numbers.rotate(rotated)
        return keys.to(self.dtype), values.to(self.dtype)
