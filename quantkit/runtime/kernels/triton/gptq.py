"""GPTQ's column loop (``algorithms.gptq.round_columns``) in one kernel per block of columns.

A program is one warp and owns 32 rows of the weight, one a lane, with all of the block's columns in its registers:
nothing is exchanged between lanes, and the columns are visited one after the other as on a CPU. The operations and
their order are the CPU's: rounding to even, IEEE division, a product and then a difference (no fused multiply-add), so
the same inputs give the same codes.

Floor: per row and column, ``columns`` x (select, add, multiply, subtract), half of them on columns that are done: 512
operations a weight at 128 columns, 0.5 ms for a matrix of 4096 x 4096 at 60% of an H200's float32 rate without fusion.
Bytes: the weights once in, codes and errors once out, 9 a weight.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 32
COLUMNS = 128  # more would not stay in registers


@triton.jit(do_not_specialize=["columns", "out", "top", "stride_upper"])
def columns_kernel(
    rest, upper, step, offset, codes, errors, columns, out, top, stride_upper, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr
):  # fmt: skip
    """Round the columns of a block one after another, 32 rows a program.

    rest, step, offset, errors: float32 ``[columns, out]``; codes: uint8; upper: float32, rows ``stride_upper`` apart.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = rows < out
    here = tl.arange(0, BLOCK_C)
    tile = tl.load(
        rest + here[:, None] * out.to(tl.int64) + rows[None, :], mask=(here[:, None] < columns) & inside[None, :],
        other=0.0
    )  # fmt: skip
    for j in tl.range(columns):
        at = out.to(tl.int64) * j + rows
        column = tl.sum(tl.where(here[:, None] == j, tile, 0.0), axis=0)  # one of them is not zero: exact
        scale = tl.load(step + at, mask=inside, other=1.0)
        zero = tl.load(offset + at, mask=inside, other=0.0)
        place = tl.minimum(tl.maximum(tl.math.div_rn(column, scale) + zero, 0.0), top.to(tl.float32))
        code = (place + 8388608.0) - 8388608.0  # 2**23: rounds to even
        along = upper + stride_upper.to(tl.int64) * j
        error = tl.math.div_rn(column - (code - zero) * scale, tl.load(along + j))
        tl.store(codes + at, code.to(tl.uint8), mask=inside)
        tl.store(errors + at, error, mask=inside)
        weight = tl.load(along + here, mask=(here > j) & (here < columns), other=0.0)
        tile = tile - weight[:, None] * error[None, :]


def round_columns(rest: Tensor, upper: Tensor, step: Tensor, offset: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Round a block of columns, like ``algorithms.gptq.round_columns``.

    ``rest`` is left as it is (nobody reads it again).

    rest, step, offset: float32 ``[columns, out]``, contiguous; at most COLUMNS columns.
    """
    columns, out = rest.shape
    codes = torch.empty(columns, out, dtype=torch.uint8, device=rest.device)
    errors = torch.empty_like(rest)
    if upper.stride(1) != 1:  # LAPACK's factors lie column by column
        upper = upper.contiguous()
    size = max(16, triton.next_power_of_2(columns))
    with torch.cuda.device_of(rest):
        columns_kernel[(triton.cdiv(out, LANES),)](
            rest, upper, step, offset, codes, errors, columns, out, top, upper.stride(0),
            BLOCK_C=size, BLOCK_R=LANES, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, errors
