"""The reference decoder: a step of the transformers model over the paged cache. Faster steps are proved against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class TransformersModel(Protocol):
    """A transformers model as the reference decoder needs it: its body gives hidden states."""

    @property
    def base_model(self) -> Any: ...


def definition_step(module: TransformersModel, ids: Tensor, cache: Any, counts: Sequence[int] | None = None) -> Tensor:
    """Run tokens through the transformers model over a cache, appending to it.

    Returns the final hidden states ``[batch, tokens, hidden]``, after the last norm.

    module: the transformers model.
    ids: int64 ``[batch, tokens]``.
    cache: as ``transformers_cache`` returns it.
    counts: how many of the tokens, the last ones, each sequence has (the others are padding); None: all.
    """
    paged, tokens = cache.paged, ids.shape[1]
    lengths = torch.tensor(paged.expect(counts or [tokens] * len(ids), tokens), device=ids.device)[:, None]
    for layer in cache.layers:
        layer.expect(tokens)
    longest = int(lengths.max())
    position = (lengths - tokens + torch.arange(tokens, device=ids.device)).clamp(min=0)
    mask = None
    if int(lengths.min()) < longest:
        mask = (torch.arange(longest, device=ids.device) >= longest - lengths).long()
    output = module.base_model(
        input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
    )
    hidden: Tensor = output.last_hidden_state
    return hidden
