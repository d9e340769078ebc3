"""A model's own code reads ``layer.weight`` of a packed layer: its dtype, a row, or all of its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear, pack
from quantkit.runtime.layers.weight_view import WeightView


@pytest.fixture(scope="module")
def packed() -> PackedWeight:
    scheme = Scheme(4, 32, False)
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    scales, zeros = affine.minmax_params(weight, scheme)
    q = QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)
    return pack(q, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_looks_like_the_weight_that_it_stands_for(packed: PackedWeight, dtype: torch.dtype) -> None:
    for layer in (QuantLinear(packed, dtype=dtype), QuantEmbedding(packed, nn.Embedding(48, 64), dtype)):
        weight, expected = layer.weight, packed.dequantize().to(dtype)
        assert (weight.dtype, weight.device, weight.shape, len(weight)) == (dtype, expected.device, expected.shape, 48)
        assert torch.equal(weight[5, :], expected[5])
        assert torch.equal(weight[-1], expected[-1])
        assert torch.equal(weight[2:4], expected[2:4])
        assert torch.equal(weight.T, expected.T)
        assert torch.equal(torch.stack([expected, weight])[1], expected)  # type: ignore[list-item]
        assert [torch.equal(row, other) for row, other in zip(weight, expected, strict=True)] == [True] * 48
        with pytest.raises(IndexError):
            _ = weight[48]
        part = WeightView(packed, dtype, range(16, 32))
        assert torch.equal(part[1], expected[17])
        assert torch.equal(part[:], expected[16:32])


def test_products_with_it_are_those_of_the_dequantized_weight(packed: PackedWeight) -> None:
    x = torch.randn(3, 64)
    weight: torch.Tensor = QuantLinear(packed).weight  # type: ignore[assignment]
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, packed.dequantize()))
    assert torch.equal(torch.matmul(x, weight.T), x @ packed.dequantize().T)


def test_it_is_not_written_to_a_checkpoint(packed: PackedWeight) -> None:
    assert not [name for name in QuantLinear(packed).state_dict() if name == "weight"]
