"""Fused experts become linears: the layout is found by experiment, and what does not fit is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import MOE, tiny_config, tiny_model
from torch import nn

from quantkit.errors import UnsupportedModel
from quantkit.model.mixture.experts import expert_modules, fill, is_fused
from quantkit.model.mixture.find import find_layout, unfuse_experts
from quantkit.model.mixture.layout import usual
from quantkit.model.mixture.routers import routers
from quantkit.model.skeleton import block_linears, build_skeleton, dense_weights_of, find_blocks
from quantkit.model.stepper import input_groups, record

LAYOUTS = {
    "mixtral": usual(),
    "qwen3_moe": usual(),
    "gpt_oss": usual(transposed=True, interleaved=True, bias=True),
}


def unfused(kind: str) -> tuple[Any, Any]:
    """A model as transformers builds it, and its twin with one linear per expert and projection."""
    model, twin = tiny_model(kind), tiny_model(kind)
    fused = {name: module for name, module in twin.named_modules() if is_fused(module)}
    unfuse_experts(twin)
    for name, experts in expert_modules(twin):
        fill(experts, fused[name])
    return model, twin


@pytest.mark.parametrize("kind", MOE)
def test_experts_as_linears_compute_the_same(kind: str) -> None:
    model, twin = unfused(kind)
    ids = torch.randint(3, 100, (3, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        a, b = model(input_ids=ids, use_cache=False).logits, twin(input_ids=ids, use_cache=False).logits
    assert float((a - b).norm() / a.norm()) <= 1e-5
    assert {experts.layout for _, experts in expert_modules(twin)} == {LAYOUTS[kind]}


@pytest.mark.parametrize("kind", MOE)
def test_any_routing_is_handled(kind: str) -> None:
    """All tokens to one expert, an expert nobody chooses, the same expert twice, a single token."""
    model, twin = unfused(kind)
    name, experts = next(iter(expert_modules(twin)))
    original = model.get_submodule(name)
    for chosen in ([[0, 1]], [[3, 3]] * 4, [[2, 1], [1, 2], [2, 0]]):
        index = torch.tensor(chosen)
        x, weights = torch.randn(len(index), 32), torch.rand(len(index), 2)
        with torch.no_grad():
            torch.testing.assert_close(experts(x, index, weights), original(x, index, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MOE)
def test_routers_are_no_linears_to_quantize(kind: str) -> None:
    blocks = find_blocks(build_skeleton(tiny_model(kind).config.to_dict()))
    linears = block_linears(blocks.modules[0])
    router = "router" if kind == "gpt_oss" else "gate"
    assert routers(blocks.modules[0]) == {f"mlp.{router}"}
    assert not [name for name in linears if router in name.split(".")]
    assert [name for name in linears if ".experts.2." in name] == [
        f"mlp.experts.2.{p}_proj" for p in ("gate", "up", "down")
    ]


def test_a_shared_experts_gate_is_a_router_and_the_shared_expert_is_not() -> None:
    config = dict(
        model_type="qwen2_moe", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_experts=4,
        vocab_size=50, moe_intermediate_size=24, shared_expert_intermediate_size=24, intermediate_size=32,
        num_experts_per_tok=2,
    )  # fmt: skip
    block = find_blocks(build_skeleton(config)).modules[0]
    assert routers(block) == {"mlp.gate", "mlp.shared_expert_gate"}
    assert "mlp.shared_expert.up_proj" in block_linears(block)


@pytest.mark.parametrize("kind", MOE)
def test_input_groups_name_experts_that_no_token_reached(kind: str) -> None:
    _, twin = unfused(kind)
    blocks = find_blocks(twin)
    recording = record(twin, blocks, torch.tensor([[3]]))  # one token reaches two of four experts
    groups = input_groups(blocks.modules[0], recording.hidden, recording.calls[0])
    for index in range(4):
        assert (f"mlp.experts.{index}.gate_proj", f"mlp.experts.{index}.up_proj") in groups
        assert (f"mlp.experts.{index}.down_proj",) in groups
    assert groups.index(("self_attn.o_proj",)) < groups.index(("mlp.experts.0.down_proj",))


class Gated(nn.Module):
    """Experts of a shape that quantkit knows, with a forward to get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.gate_up_proj = nn.Parameter(torch.empty(3, 16, 12, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(3, 12, 8, device="meta"))

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for token in range(hidden.shape[0]):
            for place in range(chosen.shape[1]):
                expert = int(chosen[token, place])
                inner = self._apply_gate(self.gate_up_proj[expert] @ hidden[token])
                out[token] += weights[token, place] * (self.down_proj[expert] @ inner)
        return out


def test_a_family_never_seen_is_understood_by_experiment() -> None:
    class UpFirst(Gated):
        def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
            up, gate = both[..., ::2], both[..., 1::2]
            return torch.nn.functional.gelu(gate) * up

    assert find_layout(Gated(), "here") == usual()
    with pytest.raises(UnsupportedModel, match="here: which of its outputs are gates"):
        find_layout(UpFirst(), "here")  # gates come second: written as gate_proj, an engine would swap them


def test_experts_that_compute_something_else_are_refused_by_name() -> None:
    class Scaled(Gated):
        def forward(self, *args: Any) -> torch.Tensor:
            return 1.001 * super().forward(*args)

    class Mixed(Gated):
        def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
            return super()._apply_gate(both).cumsum(-1)

    class More(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.third = nn.Parameter(torch.empty(3, 2, 2))

    with pytest.raises(UnsupportedModel, match=r"model\.0 .*computes something else"):
        find_layout(Scaled(), "model.0 (Scaled)")
    with pytest.raises(UnsupportedModel, match="which of its outputs are gates"):
        find_layout(Mixed(), "model.0 (Mixed)")
    with pytest.raises(UnsupportedModel, match="third"):
        find_layout(More(), "model.0 (More)")


def test_a_convolution_is_no_expert() -> None:
    config = dict(model_type="mamba", hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=4)
    model = build_skeleton(config | dict(bos_token_id=1, eos_token_id=2, pad_token_id=0))
    assert isinstance(model.get_submodule("backbone.layers.0.mixer.conv1d"), nn.Conv1d)
    dense = dense_weights_of(find_blocks(model).modules[0])
    assert {"mixer.A_log", "mixer.conv1d.weight"} <= set(dense)


def test_no_memory_is_taken_for_experts_of_a_skeleton() -> None:
    """A terabyte of experts in one layer."""
    config = tiny_config("mixtral", num_hidden_layers=1, hidden_size=1 << 17, intermediate_size=1 << 17)
    config |= dict(num_local_experts=8)
    model = build_skeleton(config)
    assert all(p.is_meta and not p.requires_grad for p in model.parameters())
    assert [len(experts) for _, experts in expert_modules(model)] == [8]
    assert sum(p.numel() * 4 for p in model.parameters()) > 1e12
