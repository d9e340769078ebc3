"""The limits on a config's fields refuse no architecture that transformers knows."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import ARCHITECTURES, tiny_config

from quantkit.checkpoint.foreign_files.config import check_claims, check_config
from quantkit.checkpoint.foreign_files.fields import parse_object
from quantkit.errors import SourceError

# 16,384 experts of one row each; not a model that quantkit converts
BEYOND = {"doge"}


def test_the_default_config_of_every_causal_language_model_is_allowed() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    refused, seen = {}, 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            text = CONFIG_MAPPING[kind]().to_json_string(use_diff=False)
        except Exception:  # a class without defaults of its own
            continue
        seen += 1
        try:
            check_config(parse_object(text.encode(), kind), kind)
        except SourceError as error:
            refused[kind] = str(error)
    assert set(refused) <= BEYOND, refused
    assert seen > 100


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_our_own_tiny_configs_are_allowed(name: str) -> None:
    check_config(tiny_config(name), name)


def test_a_config_may_not_claim_more_than_the_checkpoint_holds() -> None:
    check_claims({"num_hidden_layers": 500, "hidden_size": 4}, [8] * 600, "model")
    with pytest.raises(SourceError, match="500 layers"):
        check_claims({"num_hidden_layers": 500, "hidden_size": 4}, [8] * 20, "model")
    with pytest.raises(SourceError, match="vocab_size"):
        check_claims({"vocab_size": 1 << 26, "hidden_size": 1 << 14}, [1 << 20] * 20, "model")


def test_more_experts_than_the_bytes_could_hold() -> None:
    large = {"n_routed_experts": 384, "num_hidden_layers": 61, "hidden_size": 7168}
    check_claims(large, [7168 * 2048 * 2] * 1000, "model")
    with pytest.raises(SourceError, match="n_routed_experts"):
        check_claims({"n_routed_experts": 16384, "num_hidden_layers": 4, "hidden_size": 64}, [1 << 10] * 20, "model")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": 0},
        {"full_attention": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}},
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_factors_that_do_not_fit_each_other_or_the_heads(key: str, rope: dict[str, Any]) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, key: rope}
    for given in (config, {"text_config": config}):
        with pytest.raises(SourceError, match=r"short_factor|long_factor|beta_fast"):
            check_config(given, "config.json")


def test_rope_factors_of_a_part_of_the_head() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "partial_rotary_factor": 0.5}
    check_config({"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": rope}, "config.json")
