"""GPTQ's column kernel gives the codes of the loop in ``algorithms.gptq``.

In Triton's interpreter, as test_triton.py runs it.
"""

from __future__ import annotations

import pytest
import torch
from triton_cases import INTERPRETED, passes_in_the_interpreter

from quantkit.algorithms.gptq import GPTQOptions, Loops, gptq, round_columns
from quantkit.core.scheme import Scheme

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        pytest.importorskip("triton")
        passes_in_the_interpreter(__file__)

else:

    @pytest.mark.parametrize(
        ("scheme", "shape"),
        [
            (Scheme(4, 32, False), (33, 160)),  # a row beyond the tile, a last block of 32 columns
            (Scheme(4, 64, True), (70, 128)),
            (Scheme(8, 128, False), (5, 200)),  # a last group of 72, a last block of 72
            (Scheme(3, None, True), (64, 96)),
            (Scheme(2, None, False, "bfloat16"), (31, 130)),  # a last block of 2 columns
        ],
        ids=str,
    )
    def test_codes_are_those_of_the_loop(scheme: Scheme, shape: tuple[int, int]) -> None:
        from quantkit.runtime.kernels.triton import gptq as kernel

        generator = torch.Generator().manual_seed(shape[0])
        weight = torch.randn(shape, generator=generator)
        x = torch.randn(300, shape[1], generator=generator) @ torch.randn(shape[1], shape[1], generator=generator)
        options = GPTQOptions(scales="minmax")
        hessian = x.t() @ x / 300
        plain = gptq(weight, hessian, scheme, options).quantized
        assert gptq(weight, hessian, scheme, options, Loops(kernel.round_columns)).quantized.equal(plain)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_errors_are_those_of_the_loop_wherever_the_factor_lies(transposed: bool) -> None:
        from quantkit.runtime.kernels.triton import gptq as kernel

        generator = torch.Generator().manual_seed(0)
        rest = torch.randn(48, 40, generator=generator)
        # a block of a wider factor
        wide = torch.triu(0.1 * torch.rand(48, 70, generator=generator)) + torch.eye(48, 70)
        step, offset = torch.rand(48, 40, generator=generator) * 0.2 + 0.01, torch.full((48, 40), 8.0)
        wide = wide.t().contiguous().t() if transposed else wide
        codes, errors = kernel.round_columns(rest.clone(), wide[:, :48], step, offset, 15)
        expected = round_columns(rest.clone(), wide[:, :48], step, offset, 15)
        assert torch.equal(codes, expected[0])
        assert torch.equal(errors, expected[1])
        assert len(codes.unique()) > 8
