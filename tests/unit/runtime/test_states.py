"""Generation of models whose layers keep states: each token is what the whole text would give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.errors import QuantkitWarning, UnsupportedModel
from quantkit.model.language import text_config
from quantkit.runtime.decode import states
from quantkit.runtime.kv_cache.recompute import TokenCache
from quantkit.runtime.model import Model

SMALL = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    # linear attention and attention
    "qwen3_next": dict(**SMALL, **LINEAR, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                       shared_expert_intermediate_size=16),
    # convolutions and attention
    "lfm2": dict(**SMALL, num_hidden_layers=3, block_multiple_of=8, layer_types=["conv", "full_attention", "conv"]),
    # a state space alone, whose cache has another name
    "mamba": dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=8, bos_token_id=0, eos_token_id=1,
                  pad_token_id=1),
    # state space and attention in one layer
    "falcon_h1": dict(**SMALL, num_hidden_layers=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
                      mamba_n_groups=1, mamba_chunk_size=16),
}  # fmt: skip


class _Letters:
    """A tokenizer of 96 characters."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 32 for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(32 + i) for i in ids)


def _model(kind: str, plan: KVPlan | None = None) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    data = {**config.to_dict(), "model_type": kind}
    return Model(module, data, device=torch.device("cpu"), dtype=torch.float32, read_tokenizer=_Letters, kv_plan=plan)


@pytest.fixture
def _no_proofs_kept() -> Iterator[None]:
    states.tried.cache_clear()
    yield
    states.tried.cache_clear()


def _greedy(model: Model, ids: list[int], count: int) -> list[int]:
    """Tokens by the whole text each time."""
    text = list(ids)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_over_states_are_those_of_the_whole_text(kind: str) -> None:
    model = _model(kind)
    assert model._stepping.caches  # a warning would fail the test
    prompts = [[5, 9, 3, 40, 22, 7, 60, 33, 2, 8, 11], [70, 71], [5, 9, 3, 40]]
    answers = model.generate([_Letters().decode(prompt) for prompt in prompts], max_tokens=9, ignore_eos=True)
    assert [a.tokens for a in answers] == [_greedy(model, prompt, 9) for prompt in prompts]


def test_packed_pages_serve_the_attention_layers_of_a_hybrid() -> None:
    plan = KVPlan(KVScheme(keys=8, values=8))
    model, exact = _model("qwen3_next", plan), _model("qwen3_next")
    ids = torch.randint(2, 96, (2, 200), generator=torch.Generator().manual_seed(1))
    wanted, found = exact(ids), model(ids)
    error = float((found - wanted).norm() / wanted.norm())
    assert 0 < error < 0.05
    assert len(model.new_cache().layers) == 1


@pytest.mark.usefixtures("_no_proofs_kept")
def test_a_cache_that_is_not_understood_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.runtime.decode.states.layer_kinds", lambda model: None)
    model = _model("qwen3_next")
    with pytest.warns(QuantkitWarning, match="the whole text again for every token"):
        tokens = model.generate(_Letters().decode([5, 9, 3]), max_tokens=5, ignore_eos=True).tokens
    assert isinstance(model.new_cache(), TokenCache)
    assert tokens == _greedy(model, [5, 9, 3], 5)
    with pytest.raises(UnsupportedModel, match="cannot be held in fewer bits"):
        _ = _model("qwen3_next", KVPlan(KVScheme(keys=8, values=8))).new_cache()


def test_the_language_models_part_of_a_config_is_found() -> None:
    model = _model("lfm2")
    assert text_config(model.module) is model.module.config
