"""The shape of a model's attention, read from its config: channels of a head, heads of keys and values.

Where layers differ, the largest counts: the numbers bound memory.
"""

from __future__ import annotations

from typing import Any


def head_dim(config: Any) -> int:
    """Channels of one head of keys or values."""
    return _largest(config, "head_dim") or config.hidden_size // query_heads(config)


def query_heads(config: Any) -> int:
    """Heads of queries, 1 in a model without attention."""
    return _largest(config, "num_attention_heads") or 1


def kv_heads(config: Any) -> int:
    """Heads of keys and values that the weights hold, which engines split over ranks.

    falcon has names and rules of its own: one head for all queries (``multi_query``), else ``num_kv_heads``.
    """
    named = _largest(config, "num_key_value_heads")
    if not named and _one_for_all(config):
        return 1
    return named or _largest(config, "num_kv_heads") or query_heads(config)


def cached_kv_heads(config: Any) -> int:
    """Heads of keys and values as they reach the cache: those of the weights, but in falcon's new decoder architecture.

    There transformers hands the cache a copy of keys and values for each query head.
    """
    named = _largest(config, "num_key_value_heads")
    if not named and _one_for_all(config):
        return 1
    return named or query_heads(config)


def _largest(config: Any, name: str) -> int:
    """Return a number of the config, the largest where layers have their own, 0 where it has none."""
    try:
        value = getattr(config, name, None) or 0
    except RuntimeError:  # layers differ: transformers asks for one of them
        value = [getattr(layer, name, 0) or 0 for layer in config.per_layer_config]
    return max(map(int, value), default=0) if isinstance(value, (list, tuple)) else int(value)


def _one_for_all(config: Any) -> bool:
    """Whether falcon's queries share one head of keys and values."""
    return bool(getattr(config, "multi_query", False)) and not getattr(config, "new_decoder_architecture", False)
