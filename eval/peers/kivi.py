"""KIVI's recipe as a transformers cache, to compare with.

Keys share a scale by channel over 32 tokens, values by token over 32 channels. After its paper (arXiv 2402.02750,
section 3 and algorithm 1) and the order of its reference code: keys are quantized 128 at a time, when 128 have
gathered; a value when 128 newer ones are there. Nothing else stays exact, the first tokens neither. Numbers, not bytes:
what is kept are the floats that the codes stand for, scale and minimum rounded to fp16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def rounded(x: Tensor, bits: int, group: int) -> Tensor:
    """Groups along the last dimension, asymmetric min-max, codes of ``bits``."""
    grouped = x.unflatten(-1, (-1, group))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    top = (1 << bits) - 1
    low, scale = low.half().float(), ((high - low) / top).clamp(min=2.0**-24).half().float()
    return (((grouped - low) / scale).clamp(0, top).round() * scale + low).flatten(-2)


class KiviLayer(CacheLayerMixin):
    """``old``: quantized, ``new``: exact; keys and values part at different tokens."""

    is_compileable = False
    is_sliding = False

    def __init__(self, bits: int, group: int = 32, residual: int = 128) -> None:
        super().__init__()
        self.bits, self.group, self.residual, self.length = bits, group, residual, 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first update makes the tensors."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[batch, heads, tokens, head_dim]``; what attention sees.

        That is quantized where it was quantized before this step.
        """
        if not self.length:
            self.old = [x[:, :, :0] for x in (key_states, value_states)]
            self.new = list(self.old)
        self.new = [torch.cat([new, x], 2) for new, x in zip(self.new, (key_states, value_states), strict=True)]
        self.length += key_states.shape[2]
        seen = [torch.cat(pair, 2) for pair in zip(self.old, self.new, strict=True)]
        keys, values = self.new
        self._settle(0, keys.shape[2] // self.residual * self.residual)
        self._settle(1, max(0, values.shape[2] - self.residual))
        return seen[0], seen[1]

    def _settle(self, side: int, count: int) -> None:
        if not count:
            return
        leaving = self.new[side][:, :, :count]
        if side == 0:  # by channel, over tokens
            leaving = rounded(leaving.transpose(2, 3), self.bits, self.group).transpose(2, 3)
        else:
            leaving = rounded(leaving, self.bits, self.group)
        self.old[side] = torch.cat([self.old[side], leaving], 2)
        self.new[side] = self.new[side][:, :, count:]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def kivi_cache(layers: int, bits: int, group: int = 32, residual: int = 128) -> Cache:
    return Cache(layers=[KiviLayer(bits, group, residual) for _ in range(layers)])
