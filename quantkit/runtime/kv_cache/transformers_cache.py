"""Attention over the paged cache: quantkit's cache as the ``past_key_values`` of a transformers model.

Keys reach ``Cache.update`` after rotary. ``update`` appends them to the pages and gives the model's own attention dense
keys and values decoded from those pages, sequences aligned at their ends (``definition_step`` masks what lies before
them), so every architecture, mask and attention variant of transformers works unchanged.
"""

from __future__ import annotations

import copy
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
from quantkit.runtime.kv_cache.layer_kinds import layer_kinds
from quantkit.runtime.kv_cache.paged_layer import LayerSpec, PagedLayer, layer_spec
from quantkit.runtime.kv_cache.recompute import TokenCache


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
    kinds = layer_kinds(model) or ()
    wanted = [index for index, kind in enumerate(kinds) if kind.attention]
    if not wanted or not set(wanted) <= set(names):
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise UnsupportedModel(
            f"{kind}: {len(wanted)} of its layers keep keys and values, but {len(names)} attention modules with a cache"
            " index were found; a KV cache of fewer bits is not supported."
        )
    return {index: names[index] for index in wanted}


def layer_specs(model: Any, plan: KVPlan, dtype: torch.dtype, device: torch.device) -> list[LayerSpec]:
    """Return one spec per layer that keeps keys and values.

    model: the transformers model.
    plan: how the cache is kept.
    dtype: the run-time dtype.
    device: of the cache.

    Raises CheckpointError naming the module whose scheme or scales are missing or do not fit the model.
    """
    windows = {index: kind.window for index, kind in enumerate(layer_kinds(model) or ()) if kind.attention}
    if not plan.quantized:
        return [LayerSpec(dtype, window) for window in windows.values()]
    names = attention_modules(model)
    unknown = sorted(set(plan.layers) - set(names.values()))
    absent = sorted(set(names.values()) - set(plan.layers)) if plan.layers else []
    if unknown or absent:
        what = f"{unknown[0]!r}, which this model has not" if unknown else f"all attention modules but {absent[0]!r}"
        raise CheckpointError(f"the KV cache is described for {what}. Convert again with --kv-bits.")
    heads = cached_kv_heads(text_config(model))
    specs = []
    for index, window in windows.items():
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
    """Return a cache as the ``past_key_values`` of a transformers model (a ``transformers.Cache``).

    It is made once for a cache: what layers keep beside keys and values lies in it.
    """
    if isinstance(cache, TokenCache):
        return cache
    if cache.seam is None:
        from transformers.cache_utils import Cache

        plain = _paged_class()
        with_states, with_indexer = _classes_with_more()
        pages, layers = iter(cache.layers), []
        for kind in cache.kinds:
            if not kind.attention:
                layers.append(copy.deepcopy(kind.template))
            elif kind.template is None:
                layers.append(plain(next(pages)))
            else:
                layer_class = with_states if hasattr(kind.template, "update_conv_state") else with_indexer
                layers.append(layer_class(next(pages), kind.template))
        cache.seam = Cache(layers=layers)
        cache.seam.paged = cache
    return cache.seam


@lru_cache(maxsize=1)
def _paged_class() -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class PagedCacheLayer(CacheLayerMixin):  # type: ignore[misc, valid-type, unused-ignore]
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

    return PagedCacheLayer


@lru_cache(maxsize=1)
def _classes_with_more() -> tuple[Any, Any]:
    """Return the classes of layers that keep more than keys and values: states, or the keys of an indexer."""
    from transformers import cache_utils

    linear: Any = getattr(cache_utils, "LinearAttentionLayer", object)
    paged = _paged_class()

    class PagedLayerWithStates(linear, paged):  # type: ignore[misc, valid-type, unused-ignore]
        """Keys and values in pages, and the states of linear attention in transformers' own layer."""

        def __init__(self, layer: PagedLayer, template: Any) -> None:
            linear.__init__(self, number_of_states=template.number_of_states)
            paged.__init__(self, layer)

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            if kwargs:  # of states
                linear.lazy_initialization(self, **kwargs)

    class PagedIndexedLayer(paged):  # type: ignore[misc, valid-type, unused-ignore]
        """Keys and values in pages, and the keys of a sparse indexer in transformers' own layer."""

        def __init__(self, layer: PagedLayer, template: Any) -> None:
            super().__init__(layer)
            self.indexed = copy.deepcopy(template)

        def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
            keys: Tensor = self.indexed.update_indexer(indexer_key_states)
            return keys

    return PagedLayerWithStates, PagedIndexedLayer
