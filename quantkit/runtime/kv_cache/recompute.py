"""A cache that keeps the tokens alone: for models whose own cache is not understood, the text is computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.model.language import trunk
from quantkit.runtime.kv_cache.cache import KVCache


class TokenCache(KVCache):
    """The tokens of one sequence."""

    def __init__(self) -> None:
        super().__init__([])
        self.tokens: Tensor | None = None  # int64 [1, tokens]
        self.paged = self  # as the seam of a paged cache names it

    @property
    def lengths(self) -> list[int]:
        return [] if self.tokens is None else [self.tokens.shape[1]]

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def select(self, sequences: Sequence[int]) -> None:
        if not sequences:
            self.tokens = None


def recompute_step(module: Any, ids: Tensor, cache: TokenCache) -> Tensor:
    """Run the whole text of one sequence, and return the new tokens' final hidden states ``[1, tokens, hidden]``.

    module: the transformers model.
    ids: int64 ``[1, tokens]``, the new ones.
    cache: the tokens before them; gets the new ones.
    """
    raise_if_interrupted()
    cache.tokens = ids if cache.tokens is None else torch.cat([cache.tokens, ids], dim=1)
    hidden: Tensor = trunk(module)(input_ids=cache.tokens, use_cache=False).last_hidden_state
    return hidden[:, -ids.shape[1] :]
