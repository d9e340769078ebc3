"""Measured sensitivity to rounding: against KL itself, and what must hold whatever is measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate import sensitivity
from quantkit.calibrate.sensitivity import (
    Read,
    backward,
    channel_shares,
    head_reads,
    head_sensitivity,
    rounding_sensitivity,
    steadied,
    tail_gradient,
)
from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import BlockArguments
from quantkit.model.skeleton import Blocks, find_blocks
from quantkit.model.stepper import record, run_block, run_tail


def noise(weight: Tensor, size: float) -> Tensor:
    return weight + size * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.shape[0]))


@pytest.fixture(scope="module")
def stepped() -> tuple[Any, Blocks, Tensor, list[BlockArguments], list[Tensor]]:
    """A small model, tokens of one window, every block's call, and the states in front of and behind every block."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         initializer_range=0.15)  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    blocks = find_blocks(model)
    ids = torch.randint(0, 128, (1, 400), generator=torch.Generator().manual_seed(1))
    recording = record(model, blocks, ids)
    states = [recording.hidden.clone()]
    for block, call in zip(blocks.modules, recording.calls, strict=True):
        states.append(run_block(block, states[-1], call))
    return model, blocks, ids, recording.calls, states


def kl(before: Tensor, after: Tensor) -> float:
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("group", [("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)])
@pytest.mark.parametrize("index", [0, 1])
def test_the_sensitivity_of_a_small_change_is_about_its_divergence(
    index: int, group: tuple[str, ...], stepped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "STRIDE", 1)
    model, blocks, ids, calls, states = stepped
    draws = torch.rand(400, generator=torch.Generator().manual_seed(2))
    gradient = tail_gradient(model, blocks, ids, states[-1], draws)
    for i in (1, 0):
        gradient, reads = backward(blocks.modules[i], states[i], calls[i], gradient, group)
        if i == index:
            break
    block = blocks.modules[index]
    weights = {name: block.get_submodule(name).weight.clone() for name in group}
    (found,) = rounding_sensitivity(weights, reads, [partial(noise, size=0.003)], 400)
    with torch.no_grad():
        for name in group:
            block.get_submodule(name).weight.copy_(noise(weights[name], 0.003))
        after = model(input_ids=ids, use_cache=False).logits
        for name in group:
            block.get_submodule(name).weight.copy_(weights[name])
    true = kl(run_tail(model, blocks, ids, states[-1]), after)
    assert 0.5 < found / true < 2


def test_the_sensitivity_of_a_head_is_its_divergence(stepped: Any) -> None:
    model, blocks, ids, _, states = stepped
    reads = head_reads(model, blocks, ids, states[-1])
    weight = model.lm_head.weight
    true = kl(reads.x @ weight.t(), reads.x @ noise(weight, 0.003).t())
    assert head_sensitivity(weight, reads, partial(noise, size=0.003)) == pytest.approx(true, rel=0.03)


def test_gradients_reach_the_front_as_they_do_in_one_piece(stepped: Any) -> None:
    """Through both blocks by hand: the gradient of the same labels' log-probabilities at the embeddings."""
    model, blocks, ids, calls, states = stepped
    draws = torch.rand(400, generator=torch.Generator().manual_seed(3))
    gradient = tail_gradient(model, blocks, ids, states[-1], draws)
    for i in (1, 0):
        gradient, _ = backward(blocks.modules[i], states[i], calls[i], gradient, [])
    start = states[0].clone().requires_grad_(True)
    logits = model(inputs_embeds=start, use_cache=False).logits
    p = logits.detach().softmax(-1)[0]
    labels = torch.searchsorted(p.double().cumsum(-1), draws.double()[:, None]).clamp(max=127)
    logits.log_softmax(-1)[0].gather(1, labels).sum().backward()
    torch.testing.assert_close(gradient, start.grad, rtol=1e-3, atol=1e-4)


def test_inputs_are_told_apart_also_where_memory_is_used_again(stepped: Any) -> None:
    _, blocks, _, calls, states = stepped
    names = [name for name, module in blocks.modules[0].named_modules() if isinstance(module, nn.Linear)]
    _, reads = backward(blocks.modules[0], states[0], calls[0], torch.ones_like(states[0]), names)
    found = [tuple(read.gradients) for read in reads]
    assert sorted(sorted(one) for one in found) == [
        ["mlp.down_proj"], ["mlp.gate_proj", "mlp.up_proj"],
        ["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"], ["self_attn.o_proj"],
    ]  # fmt: skip


def test_steadying_keeps_the_order_of_the_rough_measure_and_the_level_of_the_direct_one() -> None:
    assert steadied([2.0, 8.0], [1.0, 1.0]) == pytest.approx([4.0, 4.0])
    assert steadied([3.0, 0.0], [1.0, 0.0]) == pytest.approx([3.0, 0.0])


def test_where_channels_are_scaled_first_the_scaled_weight_is_rounded_and_scaled_back() -> None:
    generator = torch.Generator().manual_seed(7)
    weights = {"up": torch.randn(4, 6, generator=generator), "gate": torch.randn(4, 6, generator=generator)}
    reads = [
        Read(torch.randn(10, 6, generator=generator), {n: torch.randn(10, 4, generator=generator) for n in weights})
        for _ in range(2)
    ]
    factors, seen = torch.linspace(0.5, 2, 6), []

    def scaling(asked: Any, size: Tensor) -> Tensor:
        seen.append((set(asked), size))
        return factors

    before = {name: weight.clone() for name, weight in weights.items()}
    (found,) = rounding_sensitivity(weights, reads, [lambda w: w.round()], 10, scaling)
    (wanted,) = rounding_sensitivity(weights, reads, [lambda w: (w * factors).round() / factors], 10)
    assert found == pytest.approx(wanted)
    assert found != pytest.approx(rounding_sensitivity(weights, reads, [lambda w: w.round()], 10)[0])
    ((names, size),) = seen
    assert names == {"up", "gate"}
    torch.testing.assert_close(size, torch.cat([read.x for read in reads]).square().mean(0).sqrt())
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    (few,) = rounding_sensitivity(weights, reads[:1], [lambda w: w.round()], 10, scaling)  # ten tokens say too little
    assert len(seen) == 1
    assert few == rounding_sensitivity(weights, reads[:1], [lambda w: w.round()], 10)[0]


def test_a_weight_that_no_token_passes_is_named() -> None:
    reads = [Read(torch.ones(2, 3), {"a": torch.ones(2, 4)})]
    with pytest.raises(UnsupportedModel, match=r"b, c: .* no token passes"):
        rounding_sensitivity({"b": torch.ones(4, 3), "c": torch.ones(4, 3)}, reads, [lambda w: w * 2], 2)


def test_what_a_channel_counts_does_not_hang_on_a_few_tokens() -> None:
    gradients = [
        torch.randn(1, 400, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2, 1, 1, 1, 0])
        for _ in range(2)
    ]
    shares = channel_shares(gradients)
    assert float(shares.mean()) == pytest.approx(1.0)
    assert float(shares[1]) == pytest.approx(
        3 * float(shares[0]), rel=0.2
    )  # 4 times but for what tokens are divided by
    assert float(shares[5]) == 0
    gradients[0][0, 0] = torch.tensor([1e4, 0, 0, 0, 0, 1e4])  # such as a first token's
    gradients[1][0, :3, 0] = torch.tensor([float("nan"), float("inf"), 0.0])
    gradients[1][0, 3] = 0.0
    assert torch.allclose(channel_shares(gradients), shares, atol=0.03)


def test_channels_count_the_same_where_nothing_is_known() -> None:
    assert torch.equal(channel_shares([torch.zeros(1, 4, 3), torch.full((1, 2, 3), float("nan"))]), torch.ones(3))


def test_a_channel_that_the_norm_behind_takes_out_hardly_counts(stepped: Any) -> None:
    model, blocks, ids, _, states = stepped
    norm, draws = model.model.norm.weight, torch.rand(400, generator=torch.Generator().manual_seed(2))
    before = channel_shares([tail_gradient(model, blocks, ids, states[-1], draws)])
    kept = norm[7].clone()
    norm[7] = 0.0
    after = channel_shares([tail_gradient(model, blocks, ids, states[-1], draws)])
    norm[7] = kept
    assert float(after[7]) < 0.05 * float(before[7])
