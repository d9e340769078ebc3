"""Int8 weights times int8 activations in torch: the reference of the Triton kernel, and the kernel of a CPU.

``linear_w8a8(x, w, bias)[t, n] = scale_x[t] * scale_w[n] * sum_k code_x[t, k] code_w[n, k] + bias[n]``, with
``core.rounding.activations`` for x. The sum is exact; both scales and the bias are applied in float32; the result is
cast to ``x.dtype`` at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.activations import quantize_tokens
from quantkit.runtime.kernels.reference import PackedWeight

# products of codes, at most 127 * 128 each, add up to less than 2**24: exact in float32, in any order
EXACT_INPUTS = 1024
# Measured by hand on one thread of an AVX2 machine, torch 2.13: _int_mm, which is not blocked there, takes a third of
# the time for one token and 30 times as long for 128.
FEW_TOKENS = 4


class W8A8Weight(PackedWeight):
    """Signed bytes and one scale per row. codes: int8 ``[out, in]``; scales: fp16/bf16 ``[out]``.

    triton: whether the kernels of ``triton/w8a8.py`` read it (the same bytes) or this file's.
    """

    layout = "w8a8"
    codes: Tensor
    scales: Tensor

    def __init__(self, q: QuantTensor, *, triton: bool = False) -> None:
        super().__init__(*q.shape)
        self.layout = "w8a8-triton" if triton else "w8a8"
        assert q.scheme.activations == "int8"
        self.scheme = q.scheme
        self.register_buffer("codes", (q.codes.to(torch.int16) - q.scheme.midpoint).to(torch.int8))
        self.register_buffer("scales", q.scales[:, 0].contiguous())

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows = self.codes[start:stop].float() * self.scales[start:stop, None].float()
        return rows.to(dtype).T


def linear_w8a8(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply int8 weights by x, rounded to int8.

    x: ``[tokens, in]``, any float dtype -> ``[tokens, out]`` in ``x.dtype``.
    """
    assert isinstance(weight, W8A8Weight)
    codes, scale = quantize_tokens(x)
    if x.shape[0] <= FEW_TOKENS and not x.is_cuda:
        total = torch._int_mm(codes, weight.codes.T).float()
    else:
        total = _exact(codes, weight)
    y = total.mul_(scale).mul_(weight.scales.float())
    return (y if bias is None else y.add_(bias.float())).to(x.dtype)


def _exact(codes: Tensor, weight: W8A8Weight) -> Tensor:
    """The integer product by float32 matmuls over few enough inputs that each is exact, added up in float64."""
    y = codes.new_empty(codes.shape[0], weight.out_features, dtype=torch.float32)
    pieces = [codes[:, k : k + EXACT_INPUTS].float() for k in range(0, weight.in_features, EXACT_INPUTS)]
    for start, stop in weight.slices():
        total = codes.new_zeros(codes.shape[0], stop - start, dtype=torch.float64)
        for index, piece in enumerate(pieces):
            columns = slice(index * EXACT_INPUTS, (index + 1) * EXACT_INPUTS)
            total += piece @ weight.codes[start:stop, columns].float().T
        y[:, start:stop] = total
    return y
