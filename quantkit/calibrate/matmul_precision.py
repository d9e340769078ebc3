"""Compute float32 matrix products out of bf16 ones, as exactly and several times faster.

Where there are matrix units (GPUs, AMX) bf16 is multiplied 4 to 13 times faster than float32, and six products are as
exact.

A float32 number is the sum of three bf16 numbers, ``x = a + b + c``: ``a = bf16(x)``, ``b = bf16(x - a)``,
``c = bf16(x - a - b)``, but for 2^-26 |x|. Products of bf16 numbers are exact in float32, where they are summed, the
small ones first: all are one matrix product over a longer inner width (Henry, Tang, Heinecke, 1904.06376).

    bf16x6    c a' + b b' + a c' + b a' + a b' + a a'    error 3 * 2^-26 |x y|, less than that of float32 sums
    bf16x3    b a' + a b' + a a'                         error 3 * 2^-18 |x y|, usually some 3e-6
    bf16      a a'                                       error 2^-8 |x y|: what every 16-bit engine computes with

These are the products of running the model over a text and of its statistics; rounding itself is float32 and float64 in
every mode. ``bf16`` on a CPU is oneDNN's own, which rounds both factors on the way into the units, and holds for
attention and for gradients too (``model_runs``).

Codes are not those of float32 where a model is converted block after block: a code that falls otherwise changes what
the next block sees. TF32, which keeps 10 bits of every factor, would be 100 times further off than bf16x3.

On a device without bf16 matrix units bf16x6 and bf16x3 are computed in float32: the same numbers but for the order of
sums, for tests; slower than the plain product. ``bf16`` on a CPU without them may be float32 and gains nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quantkit.core.precision import cpu_has_amx

# order of the left factor's parts and of the right one's
ORDERS = {"bf16x6": ("cbabaa", "abcaba"), "bf16x3": ("baa", "aba"), "bf16": ("a", "a")}
MODES = ("float32", *ORDERS)
WORDS = {
    "float32": "float32",
    "bf16x6": "float32 (matrices by six bf16 products)",
    "bf16x3": "nearly float32 (matrices by three bf16 products)",
    "bf16": "matrix products of bf16 factors with float32 sums",
}
FEW = 64  # rows: below, splitting the other factor costs more than is won
_active = ["float32"]


def choose_precision(mode: str, device: torch.device) -> str:
    """Resolve ``auto``: bf16x6 on a GPU with bf16 matrix units, bf16 on a CPU with AMX, float32 elsewhere.

    GPUs have these units from sm_80 on. Other modes are returned as they are.
    """
    if mode != "auto":
        return mode
    if device.type == "cpu":
        return "bf16" if cpu_has_amx() and torch.backends.mkldnn.is_available() else "float32"
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return "bf16x6" if fast else "float32"


@contextlib.contextmanager
def model_runs(device: torch.device) -> Iterator[None]:
    """Multiply the matrices of a model that runs inside, with or without gradients, in the active mode.

    ``bf16`` on a CPU is oneDNN's. The other modes are ``split_product`` in the place of ``nn.functional.linear``; what
    replaces it sees every operation of torch, so nothing that consists of many small ones, as rounding does, should run
    inside.
    """
    mode = _active[-1]
    if mode == "float32":
        yield
    elif mode == "bf16" and device.type == "cpu":
        with _onednn_in_bf16():
            yield
    else:
        with _Linears(mode):
            yield


@contextlib.contextmanager
def _onednn_in_bf16() -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn
    matmul = mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def split_product(left: Tensor, right: Tensor, mode: str) -> Tensor:
    """Multiply float32 ``left [m, k] @ right [k, n]`` by a bf16 mode. A factor that is not finite gives NaN."""
    lefts = torch.cat(_factor(left, ORDERS[mode][0]), dim=1)
    if right.stride(0) == 1:  # a weight's transpose: joined as it lies, or joining would turn it round in memory
        return multiply(lefts, torch.cat(_factor(right.t(), ORDERS[mode][1]), dim=1).t())
    return multiply(lefts, torch.cat(_factor(right, ORDERS[mode][1]), dim=0))


def gram_factors(rows: Tensor, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Factor for a Gram matrix in the active mode: L, R with ``L.T @ R = rows.T @ others`` (by ``multiply``).

    Any columns of both may be multiplied.

    rows: float32 ``[n, k]``.
    others: float32 ``[n, m]``; ``rows`` if None.
    """
    mode, others = _active[-1], rows if others is None else others
    if not _splits(mode, rows):
        return rows, others
    left, right = ORDERS[mode]
    return torch.cat(_factor(rows, left)), torch.cat(_factor(others, right))


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply two bf16 or two float32 matrices, in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _factor(x: Tensor, order: str) -> list[Tensor]:
    """The parts of ``x`` in this order: a is its rounding to bf16, b that of the rest, c that of the rest then."""
    parts, rest = [x.to(torch.bfloat16)], x
    for _ in range(len(set(order)) - 1):
        rest = rest - parts[-1].float()
        parts.append(rest.to(torch.bfloat16))
    return [parts["abc".index(letter)] for letter in order]


def _splits(mode: str, x: Tensor) -> bool:
    """Whether products of ``x`` are made of parts; ``bf16`` on a CPU is oneDNN's, see ``model_runs``."""
    return mode != "float32" and (mode != "bf16" or x.is_cuda)


class _Linears(TorchFunctionMode):
    """``nn.functional.linear`` of float32 tensors by ``split_product``."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            product = _linear(self.mode, *args, **kwargs)
            if product is not None:
                return product
        return func(*args, **kwargs)


def _linear(mode: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """None where the plain product should run: other dtypes, few rows, gradients (rounding to parts has none)."""
    if not _splits(mode, input):
        return None
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
        return None
    rows = input.numel() // max(input.shape[-1], 1)
    if input.dtype != torch.float32 or weight.dtype != torch.float32 or weight.dim() != 2 or rows < FEW:
        return None
    y = split_product(input.reshape(rows, -1), weight.t(), mode).view(*input.shape[:-1], weight.shape[0])
    return y if bias is None else y.add_(bias)


@contextlib.contextmanager
def matmul_precision(mode: str) -> Iterator[None]:
    """Multiply in this mode inside: ``gram_factors`` and, in ``model_runs``, linears of float32 models.

    mode: one of ``MODES``.
    """
    _active.append(mode)
    try:
        yield
    finally:
        _active.pop()
