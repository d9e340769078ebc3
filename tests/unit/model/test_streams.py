"""Blocks with inputs beside the hidden state that depend on the tokens, and with several hidden states at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import Streams, by_batch, require_nothing_handed_on
from quantkit.model.skeleton import find_blocks
from quantkit.model.stepper import record, run_block, run_norm, run_tail

SMALL = dict(
    vocab_size=96, vocab_size_per_layer_input=96, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, hidden_size_per_layer_input=16, sliding_window=8, max_position_embeddings=64,
    bos_token_id=0, eos_token_id=1, pad_token_id=1, num_kv_shared_layers=2, laurel_rank=8,
    intermediate_size=[96] * 4, activation_sparsity_pattern=[0.0] * 4,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3n_text", **SMALL), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _ids(seed: int) -> Tensor:
    return torch.randint(2, 96, (2, 11), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_stepping_equals_the_models_own_forward(model: Any) -> None:
    blocks = find_blocks(model)
    recordings = [record(model, blocks, _ids(seed)) for seed in (1, 2)]
    calls = by_batch([recording.calls for recording in recordings], "gemma3n")
    assert recordings[0].hidden.shape == (2, 11, 4 * 64)  # four hidden states, side by side
    assert all(set(call.by_batch[0]) == {"per_layer_input", "shared_kv_states"} for call in calls)
    states = [recording.hidden for recording in recordings]
    for block, call in zip(blocks.modules, calls, strict=True):  # block by block: the others' states come in between
        states = [run_block(block, hidden, call.to(hidden.device).of(batch)) for batch, hidden in enumerate(states)]
    for hidden, seed in zip(states, (1, 2), strict=True):
        assert torch.equal(run_tail(model, blocks, _ids(seed), hidden), model(input_ids=_ids(seed)).logits)
        last = model.base_model(input_ids=_ids(seed)).last_hidden_state
        assert torch.equal(run_norm(model, blocks, _ids(seed), hidden), last)


def test_a_single_batch_has_a_mapping_of_its_own(model: Any) -> None:
    calls = record(model, find_blocks(model), _ids(1)).calls
    assert all(set(call.by_batch[0]) == {"shared_kv_states"} for call in by_batch([calls], "gemma3n"))


def test_other_arguments_that_depend_on_the_tokens_are_refused(model: Any) -> None:
    calls = record(model, find_blocks(model), _ids(1)).calls
    other = record(model, find_blocks(model), _ids(1)).calls
    other[0].kwargs["some_number"] = 3
    with pytest.raises(UnsupportedModel, match="depend on the tokens"):
        by_batch([calls, other], "gemma3n")


ATTENTION = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
LATENT = dict(
    ATTENTION, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32, intermediate_size=96,
    index_topk=4, index_n_heads=2, index_head_dim=16, index_topk_freq=2, mlp_layer_types=["dense"] + ["sparse"] * 3,
)  # fmt: skip


def _random(kind: str, **config: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def test_what_a_block_returns_beside_the_hidden_state_reaches_the_next_also_if_it_runs_again() -> None:
    """Layers of glm_moe_dsa that share their choice of tokens with the layer before them."""
    model = _random("glm_moe_dsa", **LATENT)
    blocks = find_blocks(model)
    recordings = [record(model, blocks, _ids(seed)) for seed in (1, 2)]
    assert any(call.takes for call in recordings[0].calls)
    calls = by_batch([recording.calls for recording in recordings], "glm")
    states = [recording.hidden for recording in recordings]
    for block, call in zip(blocks.modules, calls, strict=True):
        for batch, hidden in enumerate(states):
            run_block(block, 2 * hidden, call.of(batch))  # as statistics are collected, before its weights change
        states = [run_block(block, hidden, call.of(batch)) for batch, hidden in enumerate(states)]
    for hidden, seed in zip(states, (1, 2), strict=True):
        assert torch.equal(run_tail(model, blocks, _ids(seed), hidden), model(input_ids=_ids(seed)).logits)


def test_what_blocks_hand_on_is_not_mixed_between_two_runs() -> None:
    calls = record(model := _random("glm_moe_dsa", **LATENT), find_blocks(model), _ids(1)).calls
    with pytest.raises(UnsupportedModel, match="--gptaq does not take that"):
        require_nothing_handed_on(calls, "glm", "--gptaq")


@pytest.mark.parametrize(
    ("axis", "shape"), [(0, (4, 2, 11, 64)), (2, (2, 11, 4, 64))], ids=["streams first", "streams last"]
)
def test_several_hidden_states_lie_side_by_side_and_come_apart_again(axis: int, shape: tuple[int, ...]) -> None:
    hidden = torch.randn(shape)
    streams = Streams.of(hidden, 2, 11)
    assert streams == Streams(4, axis)
    assert streams.side_by_side(hidden).shape == (2, 11, 256)
    assert torch.equal(streams.apart(streams.side_by_side(hidden)), hidden)
    assert Streams.of(torch.randn(2, 12, 4, 64), 2, 11) is None
