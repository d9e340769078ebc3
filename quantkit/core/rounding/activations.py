"""Round int8 activations, dynamic, symmetric per token: THE definition. Every kernel is tested against it.

For a token x ``[in]``: ``scale = max|x| / 127``, ``code = round(x / scale)`` (half to even), an integer -127 .. 127; a
token of zeros has scale 0 and codes 0. Computed in float32 whatever the dtype of x; the scale stays in float32. With a
weight's codes ``q`` and scales ``s``: ``y[n] = s[n] * scale * sum_k code[k] q[n, k]``, the sum exact in integers.

vLLM's kernel for these models computes the same (csrc/quantization/w8a8/int8/scaled_quant.cu,
dynamic_scaled_int8_quant_kernel); compressed-tensors, which transformers runs, divides by 127.5 and clamps
(utils/helpers.py, calculate_qparams).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.core.rounding.float_activations import round_for
from quantkit.core.scheme import Scheme

LEVELS = 127


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x ``[..., in]`` to int8 codes of its shape and float32 scales ``[..., 1]``, one per token.

    A token with a NaN or an infinite entry has a scale that is not finite, and so has everything computed from it.

    >>> codes, scale = quantize_tokens(torch.tensor([[1.0, -2.54, 0.03]]))
    >>> codes.tolist(), round(scale.item(), 4)
    ([[50, -127, 2]], 0.02)
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / LEVELS
    codes = (x / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-LEVELS, LEVELS)
    return codes.nan_to_num_(0.0).to(torch.int8), scale


def round_tokens(x: Tensor) -> Tensor:
    """Round x ``[..., in]`` to its int8 grid and return it in ``x.dtype``: what an int8 weight is multiplied by."""
    codes, scale = quantize_tokens(x)
    return (codes.float() * scale).to(x.dtype)


def round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a float linear the inputs that its packed twin computes with (a forward pre-hook)."""
    return (round_tokens(args[0]), *args[1:])


def straight_through(scheme: Scheme) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return what ``input_hook`` does, for learning: gradients pass the rounding as if it were not there."""
    usual = input_hook(scheme)

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        with torch.no_grad():
            change = usual(module, args)[0] - args[0]
        return (args[0] + change, *args[1:])

    return hook


def input_hook(scheme: Scheme) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """Return the forward pre-hook that gives a float linear the inputs of its packed twin, of this scheme.

    scheme: of the weight; its activations are quantized.
    """
    if scheme.activations == "int8":
        return round_input

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_for(args[0], scheme), *args[1:])

    return hook
