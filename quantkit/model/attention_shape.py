"""The shape of a model's attention, read from its config: channels of a head, heads of keys and values."""

from __future__ import annotations

from typing import Any


def head_dim(config: Any) -> int:
    """Channels of one head of keys or values."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_heads(config: Any) -> int:
    """Heads of keys and values that the weights hold, which engines split over ranks.

    falcon has names and rules of its own: one head for all queries (``multi_query``), else ``num_kv_heads``.
    """
    named = getattr(config, "num_key_value_heads", None)
    if named is None and _one_for_all(config):
        return 1
    return int(named or getattr(config, "num_kv_heads", None) or config.num_attention_heads)


def cached_kv_heads(config: Any) -> int:
    """Heads of keys and values as they reach the cache: those of the weights, but in falcon's new decoder architecture.

    There transformers hands the cache a copy of keys and values for each query head.
    """
    named = getattr(config, "num_key_value_heads", None)
    if named is None and _one_for_all(config):
        return 1
    return int(named or config.num_attention_heads)


def _one_for_all(config: Any) -> bool:
    """Whether falcon's queries share one head of keys and values."""
    return bool(getattr(config, "multi_query", False)) and not getattr(config, "new_decoder_architecture", False)
