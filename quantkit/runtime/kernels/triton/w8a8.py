"""Int8 weights times int8 activations on integer matrix units.

The definition: ``core.rounding.activations``; the reference: ``kernels/w8a8.py``. Two kernels. ``round_kernel``: one
program per token reads it twice (the second time from the cache), finds ``max|x| / 127`` and writes codes; divisions
are IEEE, halves go to even, so codes and scales equal the reference's bit for bit. A NaN or an infinite entry makes
the scale NaN. ``product_kernel``: tiles of ``codes @ weights.T`` in int32, exact, then both scales and the bias in
float32.

Tolerance against the reference: sums are the same integers; the epilogue may fuse the bias into the last product, one
rounding in float32: ``|error| <= u |y| + 2^-23 |bias|``, u the rounding of ``x.dtype``.

Bytes: N K + 2 N for the weights, 3 M K + M K N / BLOCK_N for activations (the second part from the cache), 2 M N.
Operations: 2 M N K on int8 units, twice the rate of bf16. Floor: the larger of both; on an H100 they meet at about 300
tokens. Tiles were chosen by what compiles without spills, not yet measured.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.kernels.w8a8 import W8A8Weight

# 1.5 * 2**23: adding and taking it off rounds a float32 below 2**22, halves to even
HALF_EVEN = tl.constexpr(12582912.0)
TILES = ((16, 32, 128, 4, 4), (64, 64, 128, 4, 3), (128, 128, 128, 8, 3))  # tokens, rows, inputs, warps, stages


@triton.jit
def round_kernel(x, codes, x_scales, K, stride_x, BLOCK: tl.constexpr):
    """Round x ``[tokens, K]`` to int8 codes ``[tokens, K]`` with float32 scales ``[tokens]``. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    poison = tl.zeros((BLOCK,), tl.float32)
    for k in range(0, K, BLOCK):
        value = tl.load(x + token * stride_x + k + inner, mask=k + inner < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        poison += value * 0.0  # NaN for what is not finite, which maxima pass over
    scale = tl.div_rn(tl.max(largest, 0), 127.0) + tl.sum(poison, 0)
    tl.store(x_scales + token, scale)
    step = tl.where(scale > 0.0, scale, 1.0)
    for k in range(0, K, BLOCK):
        value = tl.load(x + token * stride_x + k + inner, mask=k + inner < K, other=0.0).to(tl.float32)
        code = (tl.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * step) + HALF_EVEN) - HALF_EVEN
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        tl.store(codes + token * K + k + inner, code.to(tl.int8), mask=k + inner < K)


@triton.jit
def product_kernel(
    codes, x_scales, weights, w_scales, bias, y, M, N, K, stride_y,
    BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply codes int8 ``[M, K]`` by weights int8 ``[N, K]`` -> y ``[M, N]``.

    Grid: (tiles of M * tiles of N,), tokens innermost.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tokens = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    live_m, live_n = tokens < M, rows < N
    x_at = codes + tl.where(live_m, tokens, 0).to(tl.int64)[:, None] * K + inner[None, :]
    w_at = weights + tl.where(live_n, rows, 0).to(tl.int64)[None, :] * K + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            left, right = tl.load(x_at + k), tl.load(w_at + k)
        else:
            left = tl.load(x_at + k, mask=(k + inner < K)[None, :], other=0)
            right = tl.load(w_at + k, mask=(k + inner < K)[:, None], other=0)
        total = tl.dot(left, right, acc=total, out_dtype=tl.int32)
    scale_x = tl.load(x_scales + tokens, mask=live_m, other=0.0)
    scale_w = tl.load(w_scales + rows, mask=live_n, other=0.0).to(tl.float32)
    out = total.to(tl.float32) * scale_x[:, None] * scale_w[None, :]
    if BIAS:
        out += tl.load(bias + rows, mask=live_n, other=0.0).to(tl.float32)[None, :]
    at = y + tokens.to(tl.int64)[:, None] * stride_y + rows[None, :]
    tl.store(at, out.to(y.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round tokens to int8 on the device: ``core.rounding.activations.quantize_tokens``.

    x ``[tokens, in]`` -> int8 ``[tokens, in]``, float32 ``[tokens]``. Raises RequestError for a dtype that is not
    taken.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise RequestError(f"activations of {x.dtype}: the Triton kernels take bfloat16, float16 and float32.")
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    block = min(2048, triton.next_power_of_2(x.shape[1]))
    with torch.cuda.device_of(x):
        round_kernel[(x.shape[0],)](x, codes, scales, x.shape[1], x.stride(0), BLOCK=block, num_warps=4)
    return codes, scales


def linear_w8a8_triton(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply int8 weights by x, rounded to int8. x: ``[tokens, in]`` -> ``[tokens, out]`` in ``x.dtype``.

    Raises RequestError for a dtype that is not taken.
    """
    assert isinstance(weight, W8A8Weight)
    codes, scales = round_tokens(x)
    tokens, rows = x.shape[0], weight.out_features
    y = x.new_empty(tokens, rows)
    block_m, block_n, block_k, warps, stages = next((t for t in TILES if tokens <= t[0]), TILES[-1])
    with torch.cuda.device_of(x):
        product_kernel[(triton.cdiv(tokens, block_m) * triton.cdiv(rows, block_n),)](
            codes, scales, weight.codes, weight.scales, x if bias is None else bias, y,
            tokens, rows, weight.in_features, y.stride(0),
            BIAS=bias is not None, EVEN=weight.in_features % block_k == 0,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y
