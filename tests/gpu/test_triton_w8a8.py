"""Int8 weights times int8 activations on a real device, against the reference on the CPU."""

from __future__ import annotations

import pytest
import torch
from triton_cases import ROUNDING, inputs, quantized

from quantkit.core.rounding.activations import quantize_tokens
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.w8a8 import W8A8Weight, linear_w8a8
from quantkit.runtime.layers.linear import linear, pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
W8A8, CUDA = Scheme(8, None, activations="int8"), torch.device("cuda")


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 65, 300])
@pytest.mark.parametrize("shape", [(64, 256), (131, 200), (33, 577), (1536, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_agree_with_the_reference(tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = quantized(W8A8, shape)
    x = inputs(tokens, shape[1], dtype, "cuda")
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2)).to(dtype)
    packed = pack(q, device=CUDA)
    assert packed.layout == "w8a8-triton"
    y = linear(x, packed, bias.to(CUDA)).cpu().double()
    # the bias is added before y is rounded: two results may lie on both sides of a halfway point
    expected = linear_w8a8(x.cpu().float(), W8A8Weight(q), bias.float()).double()
    assert bool(((y - expected).abs() <= ROUNDING[dtype] * expected.abs() + 2.0**-22 * (expected.abs() + 1)).all())


def test_codes_and_scales_are_the_definitions_bit_for_bit() -> None:
    from quantkit.runtime.kernels.triton.w8a8 import round_tokens

    x = inputs(64, 3000, torch.float32, "cuda")
    codes, scales = round_tokens(x)
    expected, wanted = quantize_tokens(x.cpu())
    assert torch.equal(codes.cpu(), expected)
    assert torch.equal(scales.cpu(), wanted[:, 0])
