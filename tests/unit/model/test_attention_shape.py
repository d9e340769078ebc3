"""The shape of attention from a config equals that of the weights, and of what reaches the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import tiny_model

from quantkit.model.attention_shape import cached_kv_heads, head_dim, kv_heads

# name -> channels of a head, heads of keys and values in the weights, and in the cache
SHAPES = {
    "llama": (8, 2, 2),
    "qwen3": (8, 2, 2),
    "gemma3_text": (8, 2, 2),
    "opt": (8, 4, 4),
    "gpt_neox": (8, 4, 4),
    "falcon": (8, 1, 1),  # multi_query
    "falcon-new": (8, 2, 4),  # num_kv_heads; a copy for each query reaches the cache
    "falcon-alibi": (8, 4, 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_config_tells_what_the_weights_hold_and_what_is_cached(name: str) -> None:
    model: Any = tiny_model(name).eval()
    config = model.config
    assert (head_dim(config), kv_heads(config), cached_kv_heads(config)) == SHAPES[name]
    with torch.inference_mode():
        cache = model(torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
    assert tuple(cache.layers[0].keys.shape) == (1, cached_kv_heads(config), 3, head_dim(config))
    fused = [m for n, m in model.named_modules() if n.endswith("query_key_value")]
    if fused:
        heads = config.num_attention_heads + 2 * kv_heads(config)
        assert fused[0].weight.shape[0] == heads * head_dim(config)


def test_a_head_is_a_share_of_the_width_where_the_config_names_no_size() -> None:
    config = tiny_model("gpt_neox").config
    assert getattr(config, "head_dim", None) is None
    assert head_dim(config) == config.hidden_size // config.num_attention_heads
