"""Attention over the paged cache: quantkit's cache as the ``past_key_values`` of a transformers model.

Keys reach ``Cache.update`` after rotary. ``update`` appends them to the pages and gives the model's own attention dense
keys and values decoded from those pages, sequences aligned at their ends (``definition_step`` masks what lies before
them), so every architecture, mask and attention variant of transformers works unchanged.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.kvscheme import PAGE_TOKENS, KVPlan
from quantkit.errors import CheckpointError, UnsupportedModel
from quantkit.model.attention_shape import cached_kv_heads
from quantkit.model.language import language_model, name_of, text_config
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.paged_layer import LayerSpec, PagedLayer, layer_spec

# What config.layer_types may hold; other kinds (linear attention, chunked) keep states that are no keys and values.
FULL, SLIDING = "full_attention", "sliding_attention"


def attention_modules(model: Any) -> dict[int, str]:
    """Return layer index -> name of the attention module that writes the cache there (``model.layers.0.self_attn``).

    Raises UnsupportedModel if they cannot be found.
    """
    names: dict[int, str] = {}
    decoder = language_model(model)
    for name, module in decoder.named_modules(prefix=name_of(model, decoder)):
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and "attention" in type(module).__name__.lower():
            names.setdefault(index, name)
    count = int(text_config(model).num_hidden_layers)
    if sorted(names) != list(range(count)):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise UnsupportedModel(
            f"{kind}: has {count} layers but {len(names)} attention modules with a cache index; not supported."
        )
    return names


def layer_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer in tokens, None for full attention.

    Raises UnsupportedModel for other layer kinds.
    """
    count = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Without a list, transformers' own cache treats every layer as sliding when the config has a window.
        return [window for _ in range(count)]
    odd = sorted(set(kinds) - {FULL, SLIDING})
    if odd or int(getattr(config, "num_kv_shared_layers", None) or 0):
        what = ", ".join(odd) or "layers that share a cache"
        raise UnsupportedModel(
            f"{config.model_type}: has {what}; the cache holds full and sliding-window attention only."
        )
    return [window if kind == SLIDING else None for kind in kinds]


def layer_specs(model: Any, plan: KVPlan, dtype: torch.dtype, device: torch.device) -> list[LayerSpec]:
    """Return one spec per layer.

    model: the transformers model.
    plan: how the cache is kept.
    dtype: the run-time dtype.
    device: of the cache.

    Raises CheckpointError naming the module whose scheme or scales are missing or do not fit the model.
    """
    windows = layer_windows(text_config(model))
    if not plan.quantized:
        return [LayerSpec(dtype, window) for window in windows]
    names = attention_modules(model)
    unknown = sorted(set(plan.layers) - set(names.values()))
    absent = sorted(set(names.values()) - set(plan.layers)) if plan.layers else []
    if unknown or absent:
        what = f"{unknown[0]!r}, which this model has not" if unknown else f"all attention modules but {absent[0]!r}"
        raise CheckpointError(f"the KV cache is described for {what}. Convert again with --kv-bits.")
    heads = cached_kv_heads(text_config(model))
    specs = []
    for index, window in enumerate(windows):
        name = names[index]
        scheme, static = plan.of(name), plan.static.get(name)
        if scheme.quantized and scheme.scales != "online":
            if static is None:
                raise CheckpointError(
                    f"no {scheme.scales} KV scales for {name!r}. Convert with --kv-bits {scheme.label}, or use"
                    " --kv-scales online."
                )
            if static.k_scale.shape[0] != heads:
                raise CheckpointError(f"{name}: KV scales for {static.k_scale.shape[0]} heads, the model has {heads}.")
        specs.append(layer_spec(scheme, static, dtype, device, window))
    return specs


def transformers_cache(cache: KVCache) -> Any:
    """Return a cache as the ``past_key_values`` of a transformers model (a ``transformers.Cache``)."""
    base, layer_class = _classes()
    seam = base(layers=[layer_class(layer) for layer in cache.layers])
    seam.paged = cache
    return seam


@lru_cache(maxsize=1)
def _classes() -> tuple[Any, Any]:
    from transformers.cache_utils import Cache, CacheLayerMixin

    class PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
        """Delegates to a PagedLayer."""

        is_compileable = False

        def __init__(self, layer: PagedLayer) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.layer = layer
            self.is_sliding = layer.spec.window is not None
            if layer.spec.window is not None:
                self.sliding_window = layer.spec.window
            self.is_initialized = True
            self.tokens = 0  # of the step that is under way

        def expect(self, tokens: int) -> None:
            """A step of so many tokens begins; the layer has been told whose they are."""
            self.tokens = tokens

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Nothing: the pool is made by the first append."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            raise_if_interrupted()  # a layer of a long prompt takes a while
            self.tokens = 0
            self.layer.append(key_states, value_states)
            keys, values = self.layer.read()
            self.layer.trim()
            if key_states.shape[2] > PAGE_TOKENS:
                self.layer.compact()  # before the next layer needs as much
            return keys, values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            length, start = self.layer.coming
            return length - start, start

        def get_seq_length(self) -> int:
            return self.layer.coming[0] - self.tokens if self.tokens else self.layer.length

        def get_max_length(self) -> int:
            return -1

        def get_max_cache_shape(self) -> int:  # the name of get_max_length before transformers 5.20 or so
            return -1

    return Cache, PagedCacheLayer
