"""y = W x for one token, on ordinary cores: for decoding alone, and where x is float32.

Per program: BLOCK_N rows, one token, one of ``parts`` ranges of K; sums stay apart per word position (``[BLOCK_N,
WIDTH]``) until the end, so the loop needs no exchange between threads. A 4-bit code becomes a float32 number where it
stands: bits 16..19 of 0x43000000 make 128 + code, bits 12..15 of 0x45000000 make 2048 + code, so four shifts serve
eight codes and each code costs one ``lop3`` and one FMA. What the carriers add, and the zero, leaves again with one
number per group and word position, ``sum x (carrier + zero)``, from which the sum starts (shared by all rows when
symmetric). With bf16 and fp16 inputs the float32 sum loses at most 8 of its 24 bits to the carriers, still 2^-16; for
float32 inputs ``EXACT`` takes the carrier off every number. Entries of a TABLE are fp16 numbers (``fp4_tables.py``),
for float32 inputs float32 ones.

Bytes: N K (held / 8 + (2 + zero) / group) + 2 K + 2 N a token. Operations: N K FMA, 1.5 N K integer instructions (4
bits), FLUSH^-1 N K scalings. Floor: bytes / copy bandwidth; integer units at half rate allow 2.1 instructions a 4-bit
weight at 80% of 4.3 TB/s.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import triton
import triton.language as tl

from quantkit.runtime.kernels.triton.gemm import add_up, finish
from quantkit.runtime.kernels.triton.unpack import entry, halves, looked_up, per_unit


@triton.jit
def carrier(words, PLANE: tl.constexpr):
    """Float32 128 + code (planes 1, 4, 5, 7) or 2048 + code (planes 0, 2, 3, 6)."""
    if PLANE == 0 or PLANE == 1:
        moved = words << 12
    elif PLANE == 2:
        moved = words << 4
    elif PLANE == 3 or PLANE == 4:
        moved = words
    elif PLANE == 5:
        moved = words >> 4
    else:
        moved = words >> 12
    if PLANE == 1 or PLANE == 4 or PLANE == 5 or PLANE == 7:
        bits = (moved & 0x000F0000) | 0x43000000
    else:
        bits = (moved & 0x0000F000) | 0x45000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def carrier_base(PLANE: tl.constexpr):
    """The number that ``carrier`` adds to the codes of a plane."""
    return 128.0 if PLANE == 1 or PLANE == 4 or PLANE == 5 or PLANE == 7 else 2048.0


@triton.jit
def zero_of(zeros, at, rows, HELD: tl.constexpr, RECORD: tl.constexpr, ASYM: tl.constexpr):
    """Load float32 zeros of rows in the records ``at``."""
    if not ASYM:
        zero = tl.full(rows.shape, 8.0 if HELD == 4 else 0.0, tl.float32)
    elif HELD == 4:
        zero = tl.load(zeros + at * RECORD + 128 + rows % 64).to(tl.float32)
    else:
        zero = tl.load(zeros + at * (RECORD // 2) + 64 + rows % 64).to(tl.float32)
    return zero


@triton.jit(do_not_specialize=["M", "N", "K", "bricks", "groups", "parts"])  # one compilation for all shapes
def gemv_kernel(
    x, words, scales, zeros, bias, y, work, lock, M, N, K, bricks, groups, parts, stride_x, stride_y,
    HELD: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, FLUSH: tl.constexpr,
    RECORD: tl.constexpr, ASYM: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, PAIR: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """See the top of the file. WIDTH: words (4 bits) or bytes (8 bits) of a brick's row."""
    half: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    tiles_n = tl.cdiv(PAIR if PAIR else N, half)
    tile_n, part, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, BLOCK_N)
    rows = tile_n * half + lane % half + (lane // half) * PAIR
    block = tl.minimum(rows // 64, tl.cdiv(N, 64) - 1)
    inner = tl.arange(0, WIDTH)
    per_part = tl.cdiv(bricks, parts)
    first = part * per_part
    w_at = words + block.to(tl.int64)[:, None] * (bricks * (64 * WIDTH)) + (rows % 64)[:, None] * WIDTH + inner[None, :]
    x_at = x + token.to(tl.int64) * stride_x
    record = block * groups
    acc = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    for brick in tl.range(first, tl.minimum(first + per_part, bricks), num_stages=STAGES):
        raw = tl.load(w_at + brick * (64 * WIDTH), eviction_policy="evict_first")
        if TABLE and not EXACT:
            low, high = halves(raw)
        for flush in tl.static_range(8 // FLUSH if HELD == 4 else 1):
            k0 = brick * (8 * WIDTH if HELD == 4 else WIDTH) + flush * FLUSH * WIDTH
            at = record + (tl.minimum(k0 // GROUP, groups - 1) if GROUP else 0)  # padding of K has no group of its own
            scale = tl.load(scales + at * (RECORD // (4 if TABLE else 2)) + rows % 64).to(tl.float32)[:, None]
            if TABLE and not EXACT:
                scale *= per_unit(TABLE, tl.float16)
            zero = zero_of(zeros, at, rows, HELD, RECORD, ASYM)[:, None]
            one = tl.zeros((BLOCK_N, WIDTH), tl.float32)
            plain = tl.zeros((WIDTH,), tl.float32)  # sum of x, which meets the zero
            carried = tl.zeros((WIDTH,), tl.float32)  # sum of x * carrier
            for index in tl.static_range(FLUSH):
                k = k0 + index * WIDTH + inner
                right = tl.load(x_at + k, mask=EVEN | (k < K), other=0.0).to(tl.float32)
                if TABLE:
                    if EXACT:
                        one += entry(raw >> (4 * (flush * FLUSH + index)), TABLE, tl.float32) * right[None, :]
                    else:
                        if (flush * FLUSH + index) % 4 == 0:
                            p0, p1, p2, p3 = looked_up(
                                low if flush * FLUSH + index < 4 else high, tl.float16, TABLE, ASM
                            )
                        one += p0.to(tl.float32) * right[None, :]
                        p0, p1, p2 = p1, p2, p3
                elif HELD == 8:
                    one += (raw.to(tl.float32) - (zero if EXACT else 0.0)) * right[None, :]
                    plain += right
                else:
                    value = carrier(raw, flush * FLUSH + index)
                    if EXACT:
                        value -= zero + carrier_base(flush * FLUSH + index)
                    else:
                        carried += carrier_base(flush * FLUSH + index) * right
                        plain += right
                    one += value * right[None, :]
            if not EXACT and not TABLE:
                one -= carried[None, :] + zero * plain[None, :]
            acc += one * scale
    total = tl.sum(acc, axis=1)[:, None]
    tokens = token + tl.arange(0, 1)
    if SPLIT:
        last, total = add_up(total, work, lock, token * tiles_n + tile_n, part, parts, BLOCK_N, 1)
        if last:
            finish(total, y, bias, rows, tokens, M, N, stride_y, PAIR, ACT, BIAS)
    else:
        finish(total, y, bias, rows, tokens, M, N, stride_y, PAIR, ACT, BIAS)
