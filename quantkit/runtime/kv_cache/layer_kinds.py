"""What each layer of a model keeps between steps, as transformers' own cache for it says.

Attention layers keep keys and values: those lie in quantkit's pages. What else a layer keeps (the states of linear
attention, of state spaces and of convolutions, the keys of a sparse indexer) stays in transformers' own layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.model.language import text_config


@dataclass(frozen=True)
class LayerKind:
    """What one layer keeps.

    attention: keys and values, in pages.
    window: sliding window of these in tokens, None for all.
    template: transformers' own cache layer for what else it keeps, unused; None for nothing else.
    """

    attention: bool
    window: int | None = None
    template: Any = None


def layer_kinds(model: Any) -> tuple[LayerKind, ...] | None:
    """Return what each layer keeps; None for a model whose cache is of a kind that is not known here.

    model: a transformers model.
    """
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=text_config(model)).layers
    except (AttributeError, LookupError, TypeError, ValueError):  # no layers in the config, or kinds without a cache
        return None
    kinds = [_kind(layer) for layer in layers]
    known = [kind for kind in kinds if kind is not None]
    return tuple(known) if len(known) == len(kinds) and known else None


def _kind(layer: Any) -> LayerKind | None:
    from transformers import cache_utils

    window = getattr(layer, "sliding_window", None)
    plain = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    if type(layer) in plain:
        return LayerKind(True, window)
    # by name: older versions of transformers have fewer of them
    with_keys = (
        "DynamicIndexedLayer", "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
    )  # fmt: skip
    if type(layer).__name__ in with_keys:
        return LayerKind(True, window, layer)
    return LayerKind(False, None, layer) if type(layer).__name__ in ("LinearAttentionLayer", "DummyLayer") else None


def plain(kinds: tuple[LayerKind, ...] | None) -> bool:
    """Tell whether every layer keeps keys and values, and nothing else."""
    return kinds is not None and all(kind.attention and kind.template is None for kind in kinds)
