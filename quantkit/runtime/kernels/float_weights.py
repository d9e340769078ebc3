"""Weights whose codes are floating-point numbers (FP8, NVFP4, MXFP4) in torch, any device: dequantized where used.

``linear_float(x, w, bias) = round(x) @ dequantize(w).T + bias`` with ``core.rounding.float_activations`` for x, where
the weight's activations are quantized: what an engine's own kernel computes, up to the order of its sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.packing import PackedCodes, pack_rows, unpack_rows
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.float_activations import round_for
from quantkit.runtime.kernels.reference import PackedWeight, linear_dequantize


class FloatWeight(PackedWeight):
    """Codes as they are stored, one or two a byte, and scales.

    bytes: uint8 ``[out, in]`` (fp8), or int32 words of 4-bit codes ``[out, ceil(in / 8)]``. scales: ``[out, groups]``,
    float32: what ``core.rounding.scales`` says.
    """

    layout = "float"
    stored: Tensor
    scales: Tensor

    def __init__(self, q: QuantTensor) -> None:
        super().__init__(*q.shape)
        self.scheme = q.scheme
        whole = q.scheme.bits == 8
        words = q.stored.words if isinstance(q.stored, PackedCodes) and not whole else None
        self.register_buffer("stored", q.codes if whole else words if words is not None else pack_rows(q.codes, 4))
        self.register_buffer("scales", q.scales)

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self._numbers(slice(start, stop)).to(dtype).T

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return self._numbers(index).to(dtype)

    def _numbers(self, rows: slice | Tensor) -> Tensor:
        codes = self.stored[rows]
        if self.scheme.bits == 4:
            codes = unpack_rows(codes, 4, self.in_features)
        return affine.dequantize(codes, self.scales[rows], None, self.scheme)


def linear_float(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply float codes by x, rounded first where the scheme says so.

    x: ``[tokens, in]``, any float dtype -> ``[tokens, out]`` in ``x.dtype``.
    """
    assert isinstance(weight, FloatWeight)
    return linear_dequantize(round_for(x, weight.scheme), weight, bias)
