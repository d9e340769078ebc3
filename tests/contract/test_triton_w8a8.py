"""The int8 kernels agree with the reference, in Triton's interpreter on the CPU.

In a process of its own, as in test_triton.py.
"""

from __future__ import annotations

import pytest
import torch
from triton_cases import INTERPRETED, inputs, passes_in_the_interpreter, quantized

from quantkit.core.rounding.activations import quantize_tokens
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.w8a8 import W8A8Weight, linear_w8a8

W8A8 = Scheme(8, None, activations="int8")

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        passes_in_the_interpreter(__file__)

else:

    @pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33])
    @pytest.mark.parametrize("shape", [(64, 256), (131, 200), (33, 577)], ids=str)
    def test_kernels_agree_over_tokens_and_shapes(tokens: int, shape: tuple[int, int]) -> None:
        from quantkit.runtime.kernels.triton.w8a8 import linear_w8a8_triton

        weight = W8A8Weight(quantized(W8A8, shape))
        bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2))
        x = inputs(tokens, shape[1], torch.float32, "cpu")
        for own in (None, bias):
            expected = linear_w8a8(x, weight, own)
            allowed = 2.0**-23 * (expected.abs() + bias.abs() * (own is not None))
            assert bool(((linear_w8a8_triton(x, weight, own) - expected).abs() <= allowed).all())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_results_come_in_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
        from quantkit.runtime.kernels.triton.w8a8 import linear_w8a8_triton

        weight, x = W8A8Weight(quantized(W8A8, (70, 192))), inputs(5, 192, dtype, "cpu")
        y, expected = linear_w8a8_triton(x, weight, None), linear_w8a8(x, weight, None)
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected, rtol=2.0**-6, atol=0)  # the interpreter cuts off where torch rounds

    def test_codes_and_scales_are_the_definitions_bit_for_bit() -> None:
        from quantkit.runtime.kernels.triton.w8a8 import round_tokens

        x = inputs(9, 3000, torch.float32, "cpu")
        x[0] = torch.arange(3000).float() % 255 - 127  # whole numbers
        x[1] = (torch.arange(3000) % 254 - 127).float() + 0.5  # halves, on both sides of even
        x[1, 0] = 127.0
        x[2] = 0.0
        x[3] *= 1e-30
        codes, scales = round_tokens(x)
        expected, wanted = quantize_tokens(x)
        assert torch.equal(codes, expected)
        assert torch.equal(scales, wanted[:, 0])

    @pytest.mark.filterwarnings("ignore:invalid value")  # numpy says it, a device does not
    def test_a_token_that_is_not_finite_spoils_itself_only() -> None:
        from quantkit.runtime.kernels.triton.w8a8 import linear_w8a8_triton

        weight, x = W8A8Weight(quantized(W8A8, (40, 128))), inputs(3, 128, torch.float32, "cpu")
        x[0, 5], x[2, 7] = float("nan"), float("inf")
        for kernel in (linear_w8a8_triton, linear_w8a8):
            finite = kernel(x, weight, None).isfinite()
            assert finite.all(1).tolist() == [False, True, False]
            assert not finite[[0, 2]].any()
