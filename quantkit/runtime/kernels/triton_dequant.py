"""Bricks -> dense rows: for many tokens (dequantize once, then the vendor's matmul), and for rows that an embedding looks up.

Per program: BLOCK_R rows of one brick. Each number is ``(code - zero) * scale`` in float32, rounded once: the bits of
``QuantTensor.dequantize().to(dtype)``. Entries of a TABLE are fp16 numbers (``tables.py``, 2.1e-4 off in NF4, rounded once more in the end);
EXACT takes float32 ones, which the output dtype float32 does.

Bytes: (held / 8 + (2 + zero) / group) + 2 a weight read and written; 3 instructions a weight. Floor: bytes / copy bandwidth, 0.6 ps
a 4-bit weight on an H200, where the product of 512 tokens takes 1.3 ps a weight; less while the scratch stays in the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import triton
import triton.language as tl

from quantkit.runtime.kernels.triton_bits import entry, halves, looked_up, plane, signed_bytes
from quantkit.runtime.kernels.triton_gemm import group_numbers


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
    places = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = places < count
    rows = tl.load(index + places, mask=live, other=0) if LOOKUP else tl.minimum(start + places, start + count - 1)
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
        target = out + places.to(tl.int64)[:, None] * stride_out + k[None, :]
        tl.store(target, (value.to(tl.float32) * scale).to(out.dtype.element_ty), mask=mask)
