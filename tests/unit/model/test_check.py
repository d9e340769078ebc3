"""The random twin, and the proofs that ``quantkit inspect --check`` does on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from quantkit.model.check import check_model
from quantkit.model.skeleton import find_blocks
from quantkit.model.twin import small_config, small_twin

LARGE: dict[str, Any] = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128008],
    max_position_embeddings=131072,
    rope_scaling=dict(rope_type="llama3", factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0,
                      original_max_position_embeddings=8192),
)  # fmt: skip


def test_a_large_model_has_a_small_twin_with_the_same_head_ratio() -> None:
    config = small_config(LARGE)
    assert config["num_attention_heads"] / config["num_key_value_heads"] == 4
    twin = small_twin(LARGE)
    assert sum(p.numel() for p in twin.parameters()) < 1e6
    assert all(float(p.std()) > 0.01 for p in twin.parameters())  # constant norm weights would prove nothing
    again = small_twin(LARGE)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), again.parameters(), strict=True))


def test_the_twin_has_every_kind_of_layer() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = dict(model_type="gemma3_text", num_hidden_layers=12, layer_types=kinds * 2)
    twin = small_twin(config)
    assert set(twin.config.layer_types) == set(kinds)
    assert len(find_blocks(twin)) == twin.config.num_hidden_layers == 3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "opt", "phi3"])
def test_check_proves_stepping_and_lists_folds(kind: str) -> None:
    check = check_model(
        {"model_type": kind, **(LARGE if kind == "llama" else {}), **(dict(pad_token_id=0) if kind == "phi3" else {})}
    )
    assert check.exact
    assert check.difference == 0.0
    assert [len(found.folds.accepted) for found in check.kinds] == [4]
    assert json.loads(json.dumps(check.to_json()))["stepping_equals_forward"] is True


@pytest.mark.parametrize("kind", ["codegen", "gptj", "xlstm", "youtu", "granitemoehybrid", "mamba2"])
def test_a_model_of_its_types_usual_size_has_a_small_twin_that_runs(kind: str) -> None:
    twin = small_twin({"model_type": kind})
    assert sum(p.numel() for p in twin.parameters()) < 5e6
    with torch.no_grad():
        assert twin(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.isfinite().all()


def test_the_twin_keeps_a_layer_of_every_kind_that_is_given_by_a_period() -> None:
    config = small_config(dict(model_type="jamba", attn_layer_period=8, attn_layer_offset=4))
    assert config["num_hidden_layers"] == 5
