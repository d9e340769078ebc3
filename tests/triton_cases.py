"""Cases that the Triton kernels are held to: in the interpreter (tests/contract) and on a device (tests/gpu)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor, TableTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.triton.fp4_tables import VALUES
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.kernels.triton.tile_table import Tile

SCHEMES = [
    Scheme(4, 128),
    Scheme(4, 128, False),
    Scheme(4, 32, False),
    Scheme(3, 64),
    Scheme(4, None),
    Scheme(8, None),
    Scheme(8, 64, False),
    Scheme(6, 128, False, "bfloat16"),
]
SHAPES = [(64, 512), (130, 200), (70, 576)]  # odd numbers of rows, K that is no whole number of bricks or groups
TOKENS = [1, 3, 17]  # one, fewer than a tile, one more than a tile
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# the interpreter cuts off where a device rounds to bf16: twice the error
ROUNDING = {torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def passes_in_the_interpreter(file: str, *more: str) -> None:
    """Run a test file in a process of its own, where kernels are imported for Triton's interpreter."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", file, *more]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout[-2000:]


def quantized(scheme: Scheme, shape: tuple[int, int], seed: int = 0) -> QuantTensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + (0.0 if scheme.symmetric else 0.7)
    scales, zeros = affine.minmax_params(weight, scheme)
    if zeros is not None:
        zeros[0, 0], zeros[-1, -1] = scheme.levels, 0  # both ends of what is allowed
    return QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)


def looked_up(kind: str, shape: tuple[int, int], group: int | None, seed: int = 0) -> TableTensor:
    """Random codes of NF4 or FP4 with scales of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)
    scales = torch.randn(shape[0], shape[1] // (group or shape[1]), generator=generator).mul(3).exp() * 0.01
    return TableTensor(codes, scales, torch.tensor(VALUES[kind]), group)


def inputs(tokens: int, width: int, dtype: torch.dtype, device: str, seed: int = 1) -> Tensor:
    """Rows that are not contiguous: every second one, and a few inputs at the end are left out."""
    noise = torch.randn(2 * tokens, width + 24, generator=torch.Generator().manual_seed(seed))
    return noise.to(dtype).to(device)[::2, :width]


def allowed(x: Tensor, q: QuantTensor | TableTensor, expected: Tensor, tile: Tile) -> Tensor:
    """The tolerance that kernels/triton/launch.py derives; the reference ``expected`` was computed in float64."""
    u = ROUNDING[x.dtype]
    size, weight = x.double().abs().cpu(), q.dequantize().double().abs()
    if isinstance(q, TableTensor):
        exact = x.dtype == torch.float32
        r = 0.0 if exact else 1.9e-3 if tile.kernel == "gemm" and x.dtype == torch.bfloat16 else 2.1e-4
        r += 2 * u if tile.kernel == "dequantize" or tile.scale_w else 0.0
        return u * expected.abs() + (q.shape[1] * 2.0**-24 + r) * (size @ weight.T) + 1e-9
    step = affine.expand_groups(q.scales.float(), q.shape[1], q.scheme).double()
    carrier = 2056 if tile.kernel == "gemv" and x.dtype != torch.float32 and q.scheme.bits <= 4 else 0
    carrier += 0 if q.scheme.bits <= 4 else 256  # 8 bits: the zero is taken off the sum
    sums = size @ (weight + carrier * step).T
    bound = u * expected.abs() + q.shape[1] * 2.0**-24 * sums + 1e-9
    if tile.kernel == "dequantize" or tile.scale_w:
        bound += 2 * u * (size @ weight.T)
    return bound


def check(
    q: QuantTensor | TableTensor, packed: TritonWeight, x: Tensor, tile: Tile, bias: Tensor | None = None
) -> None:
    """One kernel against float64, within the derived tolerance."""
    from quantkit.runtime.kernels.triton.launch import run

    expected = x.double().cpu() @ q.dequantize().double().T
    if bias is not None:
        expected = expected + bias.double().cpu()
    y = run(x, packed, bias, tile)
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    error = (y.double().cpu() - expected).abs()
    worst = float((error / allowed(x, q, expected, tile)).max())
    assert worst <= 1, f"{tile}: {worst:.2f} times the tolerance"
