"""Round activations to floating-point numbers, at run time, as engines do. Computed in float32 whatever the dtype of x.

``fp8``: with m the largest magnitude of a token (beside weights in blocks: of 128 inputs of it), ``scale = m / 448``
and ``x ~ e4m3(x / scale) * scale``. A token of zeros has the smallest scale, ``1 / (448 * 512)``, as in vLLM
(csrc/quantization/w8a8/fp8/common.cu, dynamic_per_token_scaled_fp8_quant_kernel).

``nvfp4``: for 16 inputs of a token ``scale = e4m3(m / 6 * input_global_scale)`` and
``x ~ e2m1(x * input_global_scale / scale) * scale / input_global_scale``, where the global scale is the model's, fixed
by calibration (vLLM: csrc/quantization/fp4/nvfp4_quant_kernels.cu).

``mxfp4``: for 32 inputs of a token ``x ~ e2m1(x / scale) * scale``, ``scale = 2**(floor(log2 p) - 2)``, where p is m
rounded to two bits of mantissa: m from 1.75 of a power of two on belongs to the next one, which cuts nothing
(compressed-tensors 0.20, quantization/utils/mxfp_utils.py, round_to_power_2 and generate_mx_scales).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.core.rounding.numbers import LARGEST_E2M1, LARGEST_E4M3, power_of_two, round_e2m1, round_e4m3
from quantkit.core.rounding.scales import LEAST_E4M3
from quantkit.core.scheme import Scheme

SMALLEST_FP8 = 1.0 / (LARGEST_E4M3 * 512.0)


def round_fp8(x: Tensor, group: int | None = None) -> Tensor:
    """Round x ``[..., in]`` to E4M3 numbers, and return it in ``x.dtype``.

    group: inputs that share a scale; None for all of a token's.
    """
    parts = _groups(x, group)
    scale = (parts.abs().amax(-1, keepdim=True) / LARGEST_E4M3).clamp_(min=SMALLEST_FP8)
    return _whole(round_e4m3(parts / scale).mul_(scale), x)


def round_nvfp4(x: Tensor, global_scale: float) -> Tensor:
    """Round x ``[..., in]`` to E2M1 numbers with an E4M3 scale for 16 inputs, and return it in ``x.dtype``."""
    parts = _groups(x, 16)
    scale = round_e4m3(parts.abs().amax(-1, keepdim=True) * (global_scale / LARGEST_E2M1)).clamp_(min=LEAST_E4M3)
    scale /= global_scale
    return _whole(round_e2m1(parts / scale).mul_(scale), x)


def round_mxfp4(x: Tensor) -> Tensor:
    """Round x ``[..., in]`` to E2M1 numbers with a power of two for 32 inputs, and return it in ``x.dtype``."""
    parts = _groups(x, 32)
    most = parts.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(most)  # most = mantissa * 2**exponent, mantissa from 0.5 on
    scale = power_of_two(exponent - 3 + (mantissa >= 0.875).to(torch.int32))
    return _whole(round_e2m1(parts / scale).mul_(scale), x)


def round_for(x: Tensor, scheme: Scheme) -> Tensor:
    """Round x ``[..., in]`` as a weight of this scheme wants its inputs; x itself where they stay as they are."""
    if scheme.activations == "fp8":
        return round_fp8(x, scheme.group_size if scheme.rows not in (1, None) else None)
    if scheme.activations == "nvfp4":
        assert scheme.input_global_scale is not None
        return round_nvfp4(x, scheme.input_global_scale)
    if scheme.activations == "mxfp4":
        return round_mxfp4(x)
    return x


def _groups(x: Tensor, group: int | None) -> Tensor:
    """Split float32 x into groups of inputs ``[..., groups, group]``; a short last one is filled with zeros."""
    width = x.shape[-1]
    size = group or width
    padded = torch.nn.functional.pad(x.float(), (0, -width % size))
    return padded.reshape(*padded.shape[:-1], -1, size)


def _whole(parts: Tensor, x: Tensor) -> Tensor:
    return parts.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
