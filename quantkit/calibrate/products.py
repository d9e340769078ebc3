"""float32 products out of bf16 ones: a GPU multiplies bf16 some 13 times faster than float32, and three products are enough.

``x = hi + lo + rest`` with ``hi = bf16(x)``, ``lo = bf16(x - hi)`` and ``|rest| <= 2^-18 |x|``. Then
``x y = lo hi' + hi lo' + hi hi'`` but for at most ``3 * 2^-18 |x y|`` (1.1e-5, usually 10 times less; errors of many products have
different signs). Products of bf16 numbers are exact in float32, where they are summed, the small ones first: the three are one matrix
product over three times the inner width. (Henry, Tang, Heinecke, 1904.06376: "bf16x3".)

TF32 would keep 10 bits of every factor, 100 times the error, and a GPTQ Hessian is inverted.

On a device without bf16 matrix units the same three products are computed in float32: the same numbers but for the order of
sums, for tests; slower than the plain product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MODES = ("float32", "bf16x3")
FEW = 64  # rows: below, splitting the other factor costs more than is won
_active = ["float32"]


def choose_products(mode: str, device: torch.device) -> str:
    """``auto``: bf16x3 on a GPU with bf16 matrix units (sm_80 and later), float32 elsewhere. Other modes as they are."""
    if mode != "auto":
        return mode
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return "bf16x3" if fast else "float32"


def split_product(left: Tensor, right: Tensor) -> Tensor:
    """float32 ``left [m, k] @ right [k, n]`` as three products, whatever the mode. A factor that is not finite gives NaN."""
    high, low = _halves(left)
    other_high, other_low = _halves(right)
    wide = torch.cat([low, high, high], dim=1)
    tall = torch.cat([other_high, other_low, other_high], dim=0)
    return multiply(wide, tall)


def gram_factors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 ``rows [n, k]`` -> L, R with ``L.T @ R = rows.T @ rows`` (by ``multiply``, any columns of both), in the mode that is active."""
    if _active[-1] == "float32":
        return rows, rows
    high, low = _halves(rows)
    return torch.cat([low, high, high]), torch.cat([high, low, high])


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two bf16 or two float32 matrices, in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.to(torch.bfloat16)
    return high, (x - high.float()).to(torch.bfloat16)


class _Linears(TorchFunctionMode):
    """``nn.functional.linear`` of float32 tensors by ``split_product``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            found = _linear(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """None where the plain product should run: other dtypes, few rows."""
    rows = input.numel() // max(input.shape[-1], 1)
    if input.dtype != torch.float32 or weight.dtype != torch.float32 or weight.dim() != 2 or rows < FEW:
        return None
    y = split_product(input.reshape(rows, -1), weight.t()).view(*input.shape[:-1], weight.shape[0])
    return y if bias is None else y.add_(bias)


@contextlib.contextmanager
def products(mode: str) -> Iterator[None]:
    """Inside: ``gram_factors`` and the linears of float32 models multiply in this way, one of ``MODES``."""
    _active.append(mode)
    try:
        with _Linears() if mode == "bf16x3" else contextlib.nullcontext():
            yield
    finally:
        _active.pop()
