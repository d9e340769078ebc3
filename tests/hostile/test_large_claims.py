"""A config that claims a large table, under whatever name, is refused before the table takes memory or time."""

from __future__ import annotations

from typing import Any

import pytest
from hostile.limits import Limited

SMALL: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 256},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 1, "vocab_size": 256},
    "gpt_neo": {
        "hidden_size": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 256,
        "attention_types": [[["global", "local"], 1]],
    },
    "roformer": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 256},
    "llama4_text": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
        "intermediate_size": 32, "intermediate_size_mlp": 64, "num_local_experts": 2, "vocab_size": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gptj", "codegen", "gpt_neo"])
@pytest.mark.parametrize("positions", [1 << 27, 1 << 24])
def test_a_table_of_positions_that_no_model_has(kind: str, positions: int, limited: Limited) -> None:
    outcome = limited(
        "hostile.entries:built", {"model_type": kind, **SMALL[kind], "max_position_embeddings": positions}
    )
    outcome.refused("config.json", "positions", "download it again")


@pytest.mark.parametrize(("kind", "positions"), [("roformer", 1 << 24), ("llama4_text", 10 << 20), ("gptj", 1 << 16)])
def test_many_positions_of_a_model_that_may_have_them(kind: str, positions: int, limited: Limited) -> None:
    outcome = limited(
        "hostile.entries:built", {"model_type": kind, **SMALL[kind], "max_position_embeddings": positions}
    )
    assert outcome.kind == "passed", outcome


def test_a_field_of_transformers_own_is_named(limited: Limited) -> None:
    config = {"model_type": "gptj", **SMALL["gptj"], "use_cache": None}
    limited("hostile.entries:built", config).refused("config.json of this gptj", "use_cache is null", "true or false")
    limited("hostile.entries:built", config | {"use_cache": True, "activation_function": "soft"}).refused(
        "config.json of this gptj", "activation_function is soft"
    )


def test_a_wide_matrix_beside_experts(limited: Limited) -> None:
    config = {
        "model_type": "jetmoe", "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 16,
        "intermediate_size": 1 << 24, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 256,
    }  # fmt: skip
    outcome = limited("hostile.entries:built", config)
    outcome.refused("config.json asks for a matrix")
