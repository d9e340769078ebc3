"""The reference decoder: a step of the transformers model over the paged cache. Faster steps are proved against it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.model.language import trunk
from quantkit.runtime.kv_cache.recompute import TokenCache, recompute_step


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
    if isinstance(cache, TokenCache):
        return recompute_step(module, ids, cache)
    paged, tokens = cache.paged, ids.shape[1]
    lengths = torch.tensor(paged.expect(counts or [tokens] * len(ids), tokens), device=ids.device)[:, None]
    for layer in cache.layers:
        if hasattr(layer, "expect"):
            layer.expect(tokens)
    longest = int(lengths.max())
    position = (lengths - tokens + torch.arange(tokens, device=ids.device)).clamp(min=0)
    mask = None
    if int(lengths.min()) < longest:
        mask = (torch.arange(longest, device=ids.device) >= longest - lengths).long()
    given = {"attention_mask": mask, "position_ids": position, "past_key_values": cache, "cache_params": cache}
    body = trunk(module)
    kind: Any = type(body)
    taken = _taken(kind) - (frozenset() if paged.positions else {"position_ids", "attention_mask"})
    arguments = {name: value for name, value in given.items() if name in taken}
    hidden: Tensor = body(input_ids=ids, use_cache=True, **arguments).last_hidden_state
    return hidden


@lru_cache(maxsize=64)
def _taken(kind: Any) -> frozenset[str]:
    """Return the arguments that a model's forward names: state spaces know no positions, and name the cache otherwise.

    Positions may also be handed on unnamed.
    """
    parameters = inspect.signature(kind.forward).parameters
    on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if on and "cache_params" not in parameters:  # a wrapper that hands everything on
        return frozenset({*parameters, "position_ids", "attention_mask", "past_key_values"})
    return frozenset(parameters)
