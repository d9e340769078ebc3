"""Names of experts: what hub checkpoints store, and what is written."""

from __future__ import annotations

import pytest
from architectures import tiny_config

from quantkit.checkpoint.names import ParameterPart
from quantkit.model.naming import Naming
from quantkit.model.skeleton import build_skeleton

FAMILIES = {
    "mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "qwen3_moe": {name: name for name in ("gate_proj", "up_proj", "down_proj")},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_one_tensor_per_expert_is_understood_and_written(kind: str) -> None:
    naming = Naming(build_skeleton(tiny_config(kind)))
    holder = "block_sparse_moe" if kind == "mixtral" else "mlp"
    for projection, local in FAMILIES[kind].items():
        parameter = f"model.layers.2.mlp.experts.3.{projection}.weight"
        stored = f"model.layers.2.{holder}.experts.3.{local}.weight"
        assert naming.parts_of(stored) == [ParameterPart(parameter)]
        assert naming.written(parameter) == stored
        assert naming.module(stored.removesuffix(".weight")) == parameter.removesuffix(".weight")
    assert naming.written("model.layers.2.mlp.gate.weight") == f"model.layers.2.{holder}.gate.weight"
    assert naming.written("model.norm.weight") == "model.norm.weight"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_fused_tensor_holds_every_expert(kind: str) -> None:
    naming = Naming(build_skeleton(tiny_config(kind)))
    parts = naming.parts_of("model.layers.0.mlp.experts.gate_up_proj")
    assert len(parts) == 8
    assert parts[2] == ParameterPart("model.layers.0.mlp.experts.1.gate_proj.weight", 1)
    assert naming.module("model.layers.0.mlp.experts.gate_up_proj") is None
    biases = naming.parts_of("model.layers.0.mlp.experts.down_proj_bias")
    assert len(biases) == (4 if kind == "gpt_oss" else 0)


def test_what_is_no_parameter_has_no_place() -> None:
    naming = Naming(build_skeleton(tiny_config("mixtral")))
    for name in ("model.layers.0.block_sparse_moe.experts.4.w1.weight", "model.layers.0.mlp.experts.x.w1.weight",
                 "model.layers.0.mlp.experts.0.w4.weight",
                 "model.layers.0.mlp.experts.gate_up_proj_blocks"):  # fmt: skip
        assert naming.parts_of(name) == []
