"""Mixtures of other builds: without a gate, flat, called in other ways, with choices that are no experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.checkpoint.names import ParameterPart
from quantkit.errors import UnsupportedModel
from quantkit.model.language import trunk
from quantkit.model.linears.kept_dense import kept_dense
from quantkit.model.mixture.experts import Experts, expert_groups, expert_modules, fill, is_fused
from quantkit.model.mixture.find import find_layout, unfuse_experts
from quantkit.model.mixture.layout import GATED
from quantkit.model.mixture.routers import routers
from quantkit.model.mixture.stand_in import NotOneExpert
from quantkit.model.naming import Naming
from quantkit.model.skeleton import block_linears, build_skeleton, find_blocks
from quantkit.model.stepper import record, run_block, run_tail

COMMON: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=50, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
)  # fmt: skip
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama4_text": dict(intermediate_size_mlp=48, interleave_moe_layer_step=1),
    "longcat_flash": dict(
        LATENT, num_hidden_layers=2, head_dim=4, qk_head_dim=12, expert_ffn_hidden_size=24, ffn_hidden_size=40,
        zero_expert_num=3, moe_topk=3, num_key_value_heads=4,
    ),
    "jetmoe": dict(kv_channels=8, num_key_value_heads=2, num_experts_per_tok=2),
    "dbrx": dict(
        d_model=32, n_heads=4, n_layers=1, max_seq_len=64,
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
        ffn_config=dict(ffn_hidden_size=40, moe_num_experts=4, moe_top_k=2),
    ),
    "nemotron_h": dict(layers_block_type=["moe"], moe_shared_expert_intermediate_size=24, moe_latent_size=16,
                       n_group=1, topk_group=1, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8),
}  # fmt: skip
OWN_CONFIG = ("dbrx",)


def config_of(kind: str) -> Any:
    given = dict(FAMILIES[kind], vocab_size=50) if kind in OWN_CONFIG else COMMON | FAMILIES[kind]
    return AutoConfig.for_model(kind, **given)


@pytest.mark.parametrize("kind", FAMILIES)
def test_linears_in_a_familys_own_forward_compute_the_same(kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    twin = copy.deepcopy(model)
    fused = {name: module for name, module in twin.named_modules() if is_fused(module)}
    unfuse_experts(twin)
    for name, experts in expert_modules(twin):
        fill(experts, fused[name])
    assert fused
    assert not [m for m in twin.modules() if is_fused(m)]
    ids = torch.randint(3, 50, (2, 16), generator=generator)
    with torch.no_grad():
        a, b = (m(input_ids=ids, use_cache=False).logits for m in (model, twin))
    assert float((a - b).norm() / a.norm()) <= 1e-5
    again = copy.deepcopy(twin)
    with torch.no_grad():
        for _, experts in expert_modules(twin):  # a copy runs its own linears, not those it was copied from
            for parameter in experts.parameters():
                parameter.zero_()
        assert torch.equal(again(input_ids=ids, use_cache=False).logits, b)
        assert not torch.equal(twin(input_ids=ids, use_cache=False).logits, b)


# kind -> the experts' module in the first layer, its groups of linears, its router
EXPECTED = {
    "llama4_text": ("feed_forward.experts", (GATED, ("down_proj",)), {"feed_forward.router"}),
    "longcat_flash": ("mlp.experts", (GATED, ("down_proj",)), {"mlp.router.classifier"}),
    "jetmoe": ("mlp.output_linear", (("linear",),), {"mlp.router.layer", "self_attention.experts.router.layer"}),
    "dbrx": ("ffn.experts.mlp", (("w1", "v1"), ("w2",)), {"ffn.router.layer"}),
    "nemotron_h": ("mixer.experts", (("up_proj",), ("down_proj",)), {"mixer.gate"}),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_linears_of_an_expert_and_its_router_are_found(kind: str) -> None:
    model = build_skeleton(config_of(kind).to_dict())
    name, groups, routing = EXPECTED[kind]
    block = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    experts = block.get_submodule(name)
    assert isinstance(experts, Experts)
    assert len(experts) == 4
    assert experts.layout.groups == groups
    assert expert_groups(name, experts)[0] == tuple(f"{name}.0.{local}" for local in groups[0])
    assert routers(block) == routing
    if kind == "nemotron_h":  # projections around the experts stand beside them, and decide nothing
        assert {"mixer.fc1_latent_proj", "mixer.fc2_latent_proj"} <= set(block_linears(block))


@pytest.mark.parametrize(
    ("kind", "more", "routing"),
    [
        ("afmoe", dict(num_dense_layers=0, n_group=1, topk_group=1), {"mlp.router.gate"}),
        ("hunyuan_v1_moe", dict(moe_topk=2), {"mlp.gate.wg"}),
        ("zaya", dict(num_hidden_layers=2, num_experts_per_tok=1), None),
    ],
)
def test_routers_nested_one_deeper_are_found(kind: str, more: dict[str, Any], routing: set[str] | None) -> None:
    model = build_skeleton(AutoConfig.for_model(kind, **COMMON | more).to_dict())
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    block = next(block for block in blocks if any(True for _ in expert_modules(block)))
    found = routers(block)
    assert found == routing if routing else found and all(name.startswith("mlp.gate.") for name in found)
    assert not found & set(block_linears(block))


def test_choices_that_are_no_experts_are_copied_and_never_run() -> None:
    naming = Naming(build_skeleton(config_of("longcat_flash").to_dict()))
    last, beyond = (f"model.layers.0.mlp.experts.{index}.up_proj.weight" for index in (3, 4))
    assert naming.parts_of(last) == [ParameterPart(last)]
    assert naming.written(last) == last
    assert naming.parts_of(beyond) == []
    assert naming.beside(beyond)
    assert not naming.beside("model.layers.0.mlp.experts.7.up_proj.weight")  # there are four and three


def test_experts_without_a_gate_have_their_familys_names() -> None:
    naming = Naming(build_skeleton(config_of("nemotron_h").to_dict()))
    parameter = "model.layers.0.mixer.experts.2.up_proj.weight"
    stored = "backbone.layers.0.mixer.experts.2.up_proj.weight"
    assert naming.parts_of(stored) == [ParameterPart(parameter)]
    assert naming.written(parameter) == stored


def test_flat_matrices_hold_one_expert_after_another() -> None:
    naming = Naming(build_skeleton(config_of("dbrx").to_dict()))
    parts = naming.parts_of("transformer.blocks.0.ffn.experts.mlp.w2")
    assert parts[3] == ParameterPart("transformer.blocks.0.ffn.experts.mlp.3.w2.weight", 3)
    assert len(parts) == 4


class Sorted(nn.Module):
    """Experts that are called with their tokens, sorted, and the number of each expert's; of real widths."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.width = 64, 2048
        self.up = nn.Parameter(torch.empty(64, 1024, 2048, device="meta"))
        self.down = nn.Parameter(torch.empty(64, 1024, 2048, device="meta"))

    def forward(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parts = x.view(-1, self.width).split(sizes)
        return torch.cat([
            nn.functional.linear(part, self.up[i]).relu() @ self.down[i] for i, part in enumerate(parts)
        ])  # fmt: skip


def test_a_build_never_seen_is_understood_without_memory_for_it() -> None:
    layout = find_layout(Sorted(), "here")
    assert layout.own
    assert layout.groups == (("up",), ("down",))
    assert [fused.transposed for fused in layout.fused] == [False, True]


def test_a_module_that_does_more_than_multiply_is_refused() -> None:
    class Mixed(Sorted):
        def forward(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            mean = self.up.mean(0)
            return nn.functional.linear(x, mean) @ self.down[0]

    with pytest.raises(UnsupportedModel, match=r"model\.0 .*no experts as quantkit knows them"):
        find_layout(Mixed(), "model.0 (Mixed)")


def test_a_fused_weight_cannot_be_read_through_its_stand_in() -> None:
    experts = Experts(Sorted(), find_layout(Sorted(), "here"))
    assert experts.up.shape == (64, 1024, 2048)
    assert experts.width == 2048
    for misuse in (lambda: experts.up[2:4], lambda: torch.relu(experts.up), lambda: experts.up[0].sum()):
        with pytest.raises((NotOneExpert, AttributeError)):
            misuse()


def test_a_model_whose_class_names_its_body_otherwise_has_a_trunk() -> None:
    model = build_skeleton(config_of("llama4_text").to_dict())
    assert model.base_model is model
    assert trunk(model) is model.get_submodule("model")


@torch.no_grad()
def test_routers_that_read_the_block_before_theirs_are_given_it() -> None:
    config = AutoConfig.for_model("zaya", **COMMON | dict(num_hidden_layers=3, num_experts_per_tok=1))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    blocks = find_blocks(model)
    recording = record(model, blocks, ids)
    assert [call.takes for call in recording.calls] == [(), *[("prev_router_hidden_states",)] * 2]
    hidden = recording.hidden
    for block, call in zip(blocks.modules, recording.calls, strict=True):
        hidden = run_block(block, hidden, call)
    assert torch.equal(run_tail(model, blocks, ids, hidden), model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("rows", "columns", "experts", "gate"),
    [
        (32, 2048, 8, True),  # in_proj_a of Qwen3.5
        (64, 2048, 512, True),  # in_proj_ba of Qwen3-Next, published
        (128, 4096, 512, True),
        (64, 2048, 1, False),  # keys of a single head in a dense block
        (256, 2048, 512, False),
    ],
)
def test_gates_of_published_sizes_stay_and_narrow_projections_do_not(
    rows: int, columns: int, experts: int, gate: bool
) -> None:
    with torch.device("meta"):
        block = nn.Module()
        block.narrow = nn.Linear(columns, rows, bias=False)
        block.wide = nn.Linear(columns, 3 * 512 * experts, bias=False)
        block.out = nn.Linear(columns, columns, bias=False)
    assert ("narrow" in kept_dense(block)) is gate
