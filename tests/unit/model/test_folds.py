"""Folds: found by running the block, accepted only if nothing but the consumers notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.model.arguments import BlockArguments
from quantkit.model.folds import Fold, apply_fold, find_folds, shared_modules
from quantkit.model.skeleton import find_blocks
from quantkit.model.stepper import record, run_block
from quantkit.model.twin import small_twin

ATTENTION, VALUES = (
    "input_layernorm -> self_attn.q_proj, self_attn.k_proj, self_attn.v_proj",
    "self_attn.v_proj -> self_attn.o_proj",
)
GATED = "mlp.up_proj -> mlp.down_proj"
USUAL = [ATTENTION, VALUES, "post_attention_layernorm -> mlp.gate_proj, mlp.up_proj", GATED]
EXPERTS = [ATTENTION, VALUES, "post_attention_layernorm -> mlp.gate, mlp.experts.*.gate_proj, mlp.experts.*.up_proj",
           "mlp.experts.*.up_proj -> mlp.experts.*.down_proj"]  # fmt: skip
EXPECTED: dict[str, list[str]] = {
    "llama": USUAL,
    "qwen2": USUAL,
    "qwen3": USUAL,
    "mistral": USUAL,
    "granite": USUAL,
    "gemma3_text": [ATTENTION, VALUES, "pre_feedforward_layernorm -> mlp.gate_proj, mlp.up_proj", GATED],
    "phi3": ["input_layernorm -> self_attn.qkv_proj", "self_attn.qkv_proj -> self_attn.o_proj",
             "post_attention_layernorm -> mlp.gate_up_proj", "mlp.gate_up_proj -> mlp.down_proj"],
    "opt": ["self_attn_layer_norm -> self_attn.q_proj, self_attn.k_proj, self_attn.v_proj",
            "self_attn.v_proj -> self_attn.out_proj", "final_layer_norm -> fc1", "fc1 -> fc2"],
    "olmo2": [VALUES, GATED],  # norms after attention and MLP only: they feed the residual
    "cohere2": [f"{ATTENTION}, mlp.gate_proj, mlp.up_proj", VALUES, GATED],  # one norm feeds both
    "starcoder2": [ATTENTION, VALUES, "post_attention_layernorm -> mlp.c_fc"],  # a GELU stands between c_fc and c_proj
    "gpt_neox": ["input_layernorm -> attention.query_key_value", "attention.query_key_value -> attention.dense",
                 "post_attention_layernorm -> mlp.dense_h_to_4h"],
    "gemma2": [ATTENTION, VALUES, "pre_feedforward_layernorm -> mlp.gate_proj, mlp.up_proj", GATED],
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    # up + 1 and a clamp stand between an expert's up and down
    "gpt_oss": [ATTENTION, VALUES,
                "post_attention_layernorm -> mlp.router, mlp.experts.*.gate_proj, mlp.experts.*.up_proj"],
    "falcon": ["input_layernorm -> self_attention.query_key_value, mlp.dense_h_to_4h",
               "self_attention.query_key_value -> self_attention.dense"],
}  # fmt: skip
GROUPED: dict[str, dict[str, Any]] = {
    "llama": dict(num_key_value_heads=8),
    "qwen2": dict(num_key_value_heads=4),
    "phi3": dict(num_key_value_heads=8, pad_token_id=0),
}


def first_block(kind: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, BlockArguments]:
    twin = small_twin({"model_type": kind, **GROUPED.get(kind, {})}, dtype)
    ids = torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(1))
    recording = record(twin, find_blocks(twin), ids)
    return find_blocks(twin).modules[0], recording.hidden, recording.calls[0]


@pytest.mark.parametrize("kind", EXPECTED)
def test_folds_of_an_architecture_leave_its_function_unchanged(kind: str) -> None:
    block, hidden, call = first_block(kind)
    weights = {name: p.clone() for name, p in block.named_parameters()}
    folds = find_folds(block, hidden, call).accepted
    assert sorted({fold.describe() for fold in folds}) == sorted(EXPECTED[kind])
    assert all(torch.equal(p, weights[name]) for name, p in block.named_parameters())

    before = run_block(block, hidden, call)
    for fold in folds:  # all together, with other factors than the search used
        apply_fold(block, fold, 0.25 + 4 * torch.rand(fold.channels, dtype=torch.float64))
    after = run_block(block, hidden, call)
    assert float((after - before).norm() / before.norm()) < 1e-6  # norms compute in float32 whatever the dtype


def test_query_heads_that_share_a_value_head_share_its_factors() -> None:
    block, hidden, call = first_block("llama")
    fold = next(f for f in find_folds(block, hidden, call).accepted if f.producer == "self_attn.v_proj")
    head = 16
    expected = torch.arange(fold.channels).reshape(-1, 1, head).repeat(1, 4, 1).reshape(-1)
    assert torch.equal(fold.consumers["self_attn.o_proj"], expected)


def test_norms_that_add_one_to_their_weight_are_found_by_experiment() -> None:
    for kind, offset in (("gemma3_text", 1.0), ("llama", 0.0)):
        folds = find_folds(*first_block(kind)).accepted
        assert {f.offset for f in folds if f.producer.endswith("norm")} == {offset}


def test_float32_gives_the_same_folds() -> None:
    for kind in ("phi3", "gemma3_text"):
        double, single = (find_folds(*first_block(kind, dtype)) for dtype in (torch.float64, torch.float32))
        assert [f.describe() for f in double.accepted] == [f.describe() for f in single.accepted]


class Toy(nn.Module):
    """norm -> up -> act -> down, plus what a test plants."""

    def __init__(self, plant: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.plant = plant
        if plant == "late reader":
            self.late = nn.Linear(8, 8)
        torch.manual_seed(0)
        for p in self.parameters():
            p.requires_grad_(False).copy_(torch.rand(p.shape) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.up(y)
        if self.plant == "gelu":
            z = nn.functional.gelu(z)
        if self.plant == "shift":
            z = z + 0.5
        out: Tensor = x + self.down(z)
        if self.plant == "residual":
            out = out + y
        if self.plant == "late reader":
            out = out + self.late(y.flip(1))
        return out


@pytest.mark.parametrize(
    ("plant", "accepted"),
    [
        ("", ["norm -> up", "up -> down"]),
        ("gelu", ["norm -> up"]),
        ("shift", ["norm -> up"]),
        ("residual", ["up -> down"]),
        ("late reader", ["norm -> up", "up -> down"]),  # its input is the norm's output in another order of tokens
    ],
)
def test_whoever_else_reads_a_producer_makes_the_fold_fail(plant: str, accepted: list[str]) -> None:
    block = Toy(plant)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    search = find_folds(block, x, BlockArguments((), {}))
    names = [f.describe() for f in search.accepted]
    if plant == "late reader":
        accepted = ["norm -> up, late", "up -> down"]
    assert names == accepted
    assert {r.producer for r in search.refused} >= {"norm", "up"} - {f.producer for f in search.accepted}
    assert all(r.reason for r in search.refused)


def test_modules_that_other_blocks_use_are_not_scaled() -> None:
    shared = nn.LayerNorm(8)
    model = nn.Module()
    model.blocks = nn.ModuleList([Toy(), Toy()])
    for block in model.blocks:
        block.norm = shared
    assert shared_modules(model, "blocks.0") == {"norm"}
    search = find_folds(
        model.blocks[0], torch.randn(1, 4, 8), BlockArguments((), {}), shared_modules(model, "blocks.0")
    )
    assert [f.producer for f in search.accepted] == ["up"]
    assert next(r for r in search.refused if r.producer == "norm").reason == "other blocks use it too"


class Experts(nn.Module):
    """Tokens go to expert 0 or 1; nobody goes to expert 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleList(
            [nn.ModuleDict({"up": nn.Linear(8, 6), "down": nn.Linear(6, 8)}) for _ in range(3)]
        )
        for p in self.parameters():
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).reshape(-1, 8)
        chosen = self.gate(y).argmax(-1)
        out = torch.zeros_like(y)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out[rows] = expert["down"](expert["up"](y[rows]).relu())
        return x + out.reshape(x.shape)


def test_experts_fold_one_by_one_and_idle_ones_like_their_namesakes() -> None:
    torch.manual_seed(0)
    block = Experts()
    x = torch.randn(1, 32, 8)
    folds = find_folds(block, x, BlockArguments((), {})).accepted
    norm: Fold = folds[0]
    assert set(norm.consumers) == {"gate", *(f"experts.{i}.up" for i in range(3))}
    assert [(f.producer, list(f.consumers)) for f in folds[1:]] == [
        (f"experts.{i}.up", [f"experts.{i}.down"]) for i in range(3)
    ]
