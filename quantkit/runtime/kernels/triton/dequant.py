"""Bricks to dense rows: for many tokens (dequantize once, then the vendor's matmul), and for an embedding's lookups.

Per program: BLOCK_R rows of one brick. Each number is ``(code - zero) * scale`` in float32, rounded once: the bits of
``QuantTensor.dequantize().to(dtype)``. Entries of a TABLE are fp16 numbers (``fp4_tables.py``, 2.1e-4 off in NF4,
rounded once more in the end); EXACT takes float32 ones, which the output dtype float32 does.

Bytes: (held / 8 + (2 + zero) / group) + 2 a weight read and written; 3 instructions a weight. Floor: bytes / copy
bandwidth, 0.6 ps a 4-bit weight on an H200, where the product of 512 tokens takes 1.3 ps a weight; less while the
scratch stays in the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import os
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.triton.fp4_tables import NUMBERS
from quantkit.runtime.kernels.triton.gemm import group_numbers
from quantkit.runtime.kernels.triton.unpack import entry, halves, looked_up, plane, signed_bytes

# as Triton itself read it when the kernels were imported
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Bricks(Protocol):
    """What the kernels read of a weight laid out in bricks; ``layout.TritonWeight`` explains each name."""

    in_features: int
    scheme: Scheme
    span: int
    held: int
    groups: int
    group: int
    table: str
    meta: Tensor

    @property
    def k_bricks(self) -> int: ...
    @property
    def words(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def zeros(self) -> Tensor: ...


def layout_constants(weight: Bricks) -> dict[str, object]:
    """The constexpr arguments by which every kernel is told how a weight is laid out."""
    return {
        "HELD": weight.held,
        "WIDTH": weight.words.shape[-1],
        "GROUP": weight.group,
        "RECORD": weight.meta.shape[-1],
        "ASYM": not weight.scheme.symmetric,
        "TABLE": NUMBERS[weight.table],
        "EVEN": weight.in_features % weight.span == 0,
    }


def dequantize_rows(weight: Bricks, out: Tensor, *, start: int = 0, index: Tensor | None = None) -> Tensor:
    """Write rows of a weight, dequantized, into ``out [n, in_features]``; returns ``out``.

    The rows are ``start : start + n``, or those of an int64 ``index [n]``.
    """
    lookup = index is not None
    block = 16 if not lookup else min(16, 1 << max(len(out) - 1, 0).bit_length())
    with torch.cuda.device_of(out):
        dequantize_kernel[(weight.k_bricks, -(-len(out) // block))](
            weight.words,
            weight.scales,
            weight.zeros,
            index if index is not None else weight.meta,
            out,
            start,
            len(out),
            weight.in_features,
            weight.k_bricks,
            weight.groups,
            out.stride(0),
            **layout_constants(weight),
            LOOKUP=lookup,
            BLOCK_R=block,
            BF16=out.dtype == torch.bfloat16 and not weight.table,
            EXACT=bool(weight.table) and out.dtype == torch.float32,
            ASM=not INTERPRETED,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@triton.jit(do_not_specialize=["start", "count", "K", "bricks", "groups"])
def dequantize_kernel(
    words, scales, zeros, index, out, start, count, K, bricks, groups, stride_out,
    HELD: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, RECORD: tl.constexpr,
    ASYM: tl.constexpr, LOOKUP: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BF16: tl.constexpr,
    TABLE: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows ``index[0:count]`` (LOOKUP) or ``start : start + count`` of W into ``out [count, K]``."""
    carrier: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    brick = tl.program_id(0)
    positions = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = positions < count
    rows = (
        tl.load(index + positions, mask=live, other=0) if LOOKUP else tl.minimum(start + positions, start + count - 1)
    )
    block = rows // 64
    inner = tl.arange(0, WIDTH)
    at = words + (block.to(tl.int64) * bricks + brick)[:, None] * (64 * WIDTH) + (rows % 64)[:, None] * WIDTH
    raw = tl.load(at + inner[None, :])
    if HELD == 4:
        low, high = halves(raw)
    for number in tl.static_range(8 if HELD == 4 else 1):
        k0 = brick * (8 * WIDTH if HELD == 4 else WIDTH) + number * WIDTH
        scale, minus = group_numbers(
            scales, zeros, block * groups, rows, k0, groups, carrier, HELD, GROUP, RECORD, ASYM, TABLE, EXACT
        )
        if TABLE:
            if EXACT:
                value = entry(raw >> (4 * number), TABLE, tl.float32)
            else:
                if number % 4 == 0:
                    p0, p1, p2, p3 = looked_up(low if number < 4 else high, carrier, TABLE, ASM)
                value = p0
                p0, p1, p2 = p1, p2, p3
        elif HELD == 4:
            value = plane(low if number < 4 else high, minus, number % 4, ASM)
        else:
            value = signed_bytes(raw, minus, ASYM, ASM)
        k = k0 + inner
        mask = live[:, None] if EVEN else live[:, None] & (k < K)[None, :]
        target = out + positions.to(tl.int64)[:, None] * stride_out + k[None, :]
        tl.store(target, (value.to(tl.float32) * scale).to(out.dtype.element_ty), mask=mask)
