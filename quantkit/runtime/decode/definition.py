"""The reference decoder: a step of the transformers model over the paged cache. Faster steps are proved against it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.errors import UnsupportedModel
from quantkit.model.language import trunk
from quantkit.runtime.kv_cache.recompute import TokenCache, recompute_step


class TransformersModel(Protocol):
    """A transformers model as the reference decoder needs it: its body gives hidden states."""

    @property
    def base_model(self) -> Any: ...


def definition_step(
    module: TransformersModel,
    ids: Tensor,
    cache: Any,
    counts: Sequence[int] | None = None,
    beside: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Run tokens through the transformers model over a cache, appending to it.

    Returns the final hidden states ``[batch, tokens, hidden]``, after the last norm.

    module: the transformers model.
    ids: int64 ``[batch, tokens]``.
    cache: as ``transformers_cache`` returns it.
    counts: how many of the tokens, the last ones, each sequence has (the others are padding); None: all.
    beside: images, as arguments of the model's forward, which then counts positions itself. For an empty cache.

    Raises UnsupportedModel if the forward does not take them.
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
    given = {"attention_mask": mask, "position_ids": position, **dict.fromkeys(CACHE_NAMES, cache)}
    body = trunk(module)
    kind: Any = type(body)
    taken = _taken(kind) - (frozenset() if paged.positions else {"position_ids", "attention_mask"})
    if beside:
        given = {**given, **_images(beside, taken, module)}
        taken -= {"position_ids"}
    arguments = {name: value for name, value in given.items() if name in taken}
    hidden: Tensor = body(input_ids=ids, use_cache=True, **arguments).last_hidden_state
    return hidden


def _images(beside: Mapping[str, Tensor], taken: frozenset[str], module: Any) -> Mapping[str, Tensor]:
    """Return what a forward takes of a processor's tensors. Kinds of tokens are for models that ask for them."""
    lost = sorted({*beside} - taken - {"attention_mask", "token_type_ids", "mm_token_type_ids"})
    if lost:
        raise UnsupportedModel(
            f"{module.config.model_type}: its body takes no {', '.join(lost)} beside tokens: images are not supported."
        )
    return beside


# what a model's forward calls its cache: since transformers 5.24, before, and for state spaces
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@lru_cache(maxsize=64)
def _taken(kind: Any) -> frozenset[str]:
    """Return the arguments that a model's forward names: state spaces know no positions, and name the cache otherwise.

    Positions may also be handed on unnamed.
    """
    parameters = inspect.signature(kind.forward).parameters
    on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if on and "cache_params" not in parameters:  # a wrapper that hands everything on
        usual = set() if "cache" in parameters else {"past_key_values"}
        return frozenset({*parameters, "position_ids", "attention_mask", *usual})
    return frozenset(parameters)
