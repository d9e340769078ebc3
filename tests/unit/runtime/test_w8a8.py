"""The reference of int8 weights times int8 activations: exact sums, one layout, no way around the rounding."""

from __future__ import annotations

import pytest
import torch
from triton_cases import quantized

from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.activations import quantize_tokens
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.kernels.w8a8 import FEW_TOKENS, W8A8Weight
from quantkit.runtime.layers.linear import QuantLinear, linear, pack

W8A8, CPU = Scheme(8, None, activations="int8"), torch.device("cpu")


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, 33])
@pytest.mark.parametrize("shape", [(7, 50), (33, 1025), (600, 577)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_is_the_integers_times_both_scales(tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = quantized(W8A8, shape)
    x = torch.randn(tokens, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    codes, scale = quantize_tokens(x)
    total = codes.long() @ (q.codes.long() - 128).T
    expected = (total.float() * scale * q.scales[:, 0].float() + bias.float()).to(dtype)
    assert torch.equal(linear(x, pack(q, device=CPU), bias), expected)


def test_the_largest_possible_sums_are_exact() -> None:
    """4096 products of 127 * -128: beyond what float32 counts one by one."""
    codes = torch.zeros(2, 4096, dtype=torch.uint8)
    codes[1, ::2] = 1
    q = QuantTensor(codes, torch.ones(2, 1, dtype=torch.float16), None, W8A8)
    x = torch.full((1, 4096), 127.0)
    for tokens in (1, FEW_TOKENS + 1):
        y = linear(x.expand(tokens, -1), pack(q, device=CPU))
        assert y[0].tolist() == [-127 * 128 * 4096, -127 * (128 * 2048 + 127 * 2048)]


def test_bytes_are_those_of_int8_codes_and_16_bit_scales() -> None:
    packed = pack(quantized(W8A8, (64, 96)), device=CPU)
    assert isinstance(packed, W8A8Weight)
    assert packed.nbytes() == 64 * 96 + 64 * 2


@pytest.mark.parametrize("kernel", ["reference", "dequantize", "int8", "numba", "triton", "triton-w8a8"])
def test_a_kernel_that_cannot_round_activations_is_refused(kernel: str) -> None:
    with pytest.raises(RequestError, match=kernel):
        pack(quantized(W8A8, (64, 96)), device=CPU, kernel=kernel)


def test_floats_are_not_kept_beside_it() -> None:
    layer = QuantLinear(pack(quantized(W8A8, (64, 96)), device=CPU))
    with pytest.raises(RequestError, match="activations are int8"):
        layer.keep_dense(torch.float32)
