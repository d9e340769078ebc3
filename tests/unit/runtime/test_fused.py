"""Linears that read one tensor become one matrix, and nothing that the model computes changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import tiny_model

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.reference import PackedWeight, WordsWeight
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.layers.fused import FusedLinear, find_fusable, fuse_linears, fuse_weights
from quantkit.runtime.layers.linear import QuantLinear

CPU = torch.device("cpu")


def quantized(weight: torch.Tensor, scheme: Scheme) -> QuantTensor:
    scales, zeros = affine.minmax_params(weight, scheme)
    return QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def packed_model(name: str, other: str = "") -> Any:
    """A tiny model of packed linears; those whose name ends in ``other`` have another scheme."""
    model = tiny_model(name)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and "layers." in path and "gate." not in path:
            scheme = Scheme(8, None) if other and path.endswith(other) else Scheme(4, 32, False)
            parent, _, local = path.rpartition(".")
            layer.weight.requires_grad_(False)
            weight = WordsWeight(quantized(layer.weight.float(), scheme))
            setattr(model.get_submodule(parent), local, QuantLinear(weight, layer.bias))
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "opt", "cohere"])
@torch.inference_mode()
def test_a_joined_model_computes_the_same(name: str) -> None:
    model = packed_model(name)
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))
    before = model(input_ids=ids).logits
    groups = fuse_linears(model, CPU)
    assert len(groups) == 3 * (1 if name == "opt" else 2)  # opt has no gate
    assert [part.rpartition(".")[2] for part in groups[0]] == ["q_proj", "k_proj", "v_proj"] or name == "opt"
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)
    layer = next(m for m in model.modules() if isinstance(m, FusedLinear))
    assert layer.fused._waiting.input is None  # nothing waits after a step
    assert layer.dequantize().shape == (layer.out_features, layer.in_features)


def test_schemes_that_differ_stay_apart() -> None:
    model = packed_model("llama", other="v_proj")
    groups = fuse_linears(model, CPU)
    assert all(len(group) == 2 for group in groups)
    assert not isinstance(model.model.layers[0].self_attn.q_proj, FusedLinear)


def test_a_sibling_called_with_another_tensor_or_a_changed_one_computes_again() -> None:
    model = packed_model("llama")
    attention = model.model.layers[0].self_attn
    single = {name: getattr(attention, name).dequantize() for name in ("q_proj", "k_proj")}
    fuse_linears(model, CPU)
    x, other = torch.randn(3, 32), torch.randn(3, 32)
    torch.testing.assert_close(attention.q_proj(x), x @ single["q_proj"].T)
    torch.testing.assert_close(attention.k_proj(other), other @ single["k_proj"].T)
    torch.testing.assert_close(attention.q_proj(x), x @ single["q_proj"].T)
    x.mul_(2)
    torch.testing.assert_close(attention.k_proj(x), x @ single["k_proj"].T)
    torch.testing.assert_close(attention.k_proj(x), x @ single["k_proj"].T)  # twice the same


def test_bricks_are_joined_where_rows_end_on_their_borders() -> None:
    def weight(rows: int, seed: int, *, symmetric: bool = False) -> TritonWeight:
        dense = torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed))
        return TritonWeight(quantized(dense, Scheme(4, 32, symmetric)))

    parts: list[PackedWeight] = [weight(128, 0), weight(64, 1), weight(70, 2)]
    together = fuse_weights(parts)
    assert together is not None
    assert torch.equal(together.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert fuse_weights([weight(70, 0), weight(64, 1)]) is None
    assert fuse_weights([weight(64, 0), weight(64, 1, symmetric=True)]) is None


def test_routed_experts_are_left_alone() -> None:
    model = packed_model("llama")
    model.model.layers[0].self_attn.k_proj = model.model.layers[1].self_attn.k_proj  # called twice in one run
    assert not any("layers.0.self_attn.q_proj" in group for group in find_fusable(model, CPU))
