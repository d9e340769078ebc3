"""y = x @ W.T for few to middle numbers of tokens, on matrix units.

Weights are dequantized in registers, never written.

The product is turned round, ``y.T = W x.T``: the weights are the left operand, which may come from registers on every
generation (sm_90's wgmma wants the right one in shared memory), and tokens are the narrow side, so that 1 to 16 tokens
fill it.

Per program: BLOCK_N rows of W, BLOCK_M tokens, one of ``parts`` ranges of K. A step reads one brick of 4-bit words (or
of signed bytes), and for each plane the tile of x that meets it. Products of one group are summed apart in float32,
then scaled into the sum: scales keep their full precision and cost 1/group of an operation a weight. ``SCALE_W`` scales
the weights instead, in x's dtype (two more roundings of 2^-8 in bf16, 2^-11 in fp16): for many tokens, where a second
accumulator would not fit into registers.

PAIR: W holds two matrices (gate above up); a program takes BLOCK_N / 2 rows of each and writes ``act(gate) * up``.

SPLIT: partial sums go to a workspace in float32; the program that finishes last (a counter per tile says so) adds them
in the order of K, so results do not depend on timing. It leaves the counter at 0.

Bytes: N K (held / 8 + (2 + zero) / group) + 2 M (K + N), and 8 parts M N when split (those stay in the cache).
Operations: 2 M N K on matrix units, 1.1 integer instructions a 4-bit weight, BLOCK_M / group multiplications a weight.
Floor: the larger of bytes over copy bandwidth and operations over matrix rate; on an H200 they meet at about 50 tokens
for 4 bits, 97 for 8.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import triton
import triton.language as tl

from quantkit.runtime.kernels.triton.unpack import halves, looked_up, per_unit, plane, product, scaled, signed_bytes


@triton.jit
def tile_of(pid, tiles_m, tiles_n):
    """Order programs in stripes of 8 token tiles.

    Those that run together share weights and inputs in the cache.
    """
    stripe = 8 * tiles_n
    first = pid // stripe * 8
    height = min(tiles_m - first, 8)
    return first + pid % stripe % height, pid % stripe // height


@triton.jit
def group_numbers(scales, zeros, record, rows, k, groups, dtype: tl.constexpr, HELD: tl.constexpr, GROUP: tl.constexpr,
                  RECORD: tl.constexpr, ASYM: tl.constexpr, TABLE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Load the scale of the group at input k, and what ``plane`` / ``signed_bytes`` must add.

    Both are ``[rows, 1]``; the scale is float32, what is added is in ``dtype``, exact. record: ``row block * groups``
    of each row. RECORD: bytes of a record.
    """
    at = record + (tl.minimum(k // GROUP, groups - 1) if GROUP else 0)  # padding of K has no group of its own
    if TABLE:
        scale = tl.load(scales + at * (RECORD // 4) + rows % 64)
        if not EXACT:
            scale *= per_unit(TABLE, dtype)
    else:
        scale = tl.load(scales + at * (RECORD // 2) + rows % 64).to(tl.float32)
    base: tl.constexpr = (128.0 if dtype == tl.bfloat16 else 1024.0) if HELD == 4 else 0.0
    if ASYM:
        if HELD == 4:
            zero = tl.load(zeros + at * RECORD + 128 + rows % 64).to(tl.float32)
        else:
            zero = tl.load(zeros + at * (RECORD // 2) + 64 + rows % 64).to(tl.float32)
    else:
        zero = tl.full(rows.shape, 8.0 if HELD == 4 else 0.0, tl.float32)
    return scale[:, None], (-base - zero).to(dtype)[:, None]


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    """``act(gate) * up`` in float32."""
    # -80: below, a sigmoid is less than 2e-35 and its exp would soon overflow; a NaN comes back by the product with
    # gate
    if ACT == "silu":
        value = gate * tl.sigmoid(tl.maximum(gate, -80.0))
    elif ACT == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_tanh: tanh(a) = 2 sigmoid(2 a) - 1
        tl.static_assert(ACT == "gelu_tanh")
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        value = gate * tl.sigmoid(tl.maximum(argument, -80.0))
    return value * up


@triton.jit
def add_up(acc, work, lock, tile, part, parts, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Leave a partial sum; returns (is this the last program of its tile, the whole sum in the order of K)."""
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    pointers = work + tile.to(tl.int64) * parts * (BLOCK_N * BLOCK_M) + inside
    tl.store(pointers + part * (BLOCK_N * BLOCK_M), acc)
    tl.debug_barrier()  # every thread's share is written before the counter says so
    last = tl.atomic_add(lock + tile, 1, sem="acq_rel") == parts - 1
    if last:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for other in range(parts):
            acc += tl.load(pointers + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
        tl.store(lock + tile, 0)
    return last, acc


@triton.jit
def finish(acc, y, bias, rows, tokens, M, N, stride_y, PAIR: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr):
    """Apply bias and activation, and store a tile ``[BLOCK_N, BLOCK_M]`` into ``y [M, N]``."""
    if BIAS:
        acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    if PAIR:
        half: tl.constexpr = acc.shape[0] // 2
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, acc.shape[1])), (1, 2, 0)))
        acc = activate(gate, up, ACT)
        # the first half of the rows are those of the gate, and of the result
        rows = tl.min(rows, axis=0) + tl.arange(0, half)
    width = PAIR if PAIR else N
    tl.store(
        y + tokens.to(tl.int64)[None, :] * stride_y + rows[:, None],
        acc.to(y.dtype.element_ty),
        mask=(tokens < M)[None, :] & (rows < width)[:, None],
    )


@triton.jit(do_not_specialize=["M", "N", "K", "bricks", "groups", "parts"])  # one compilation for all shapes
def gemm_kernel(
    x, words, scales, zeros, bias, y, work, lock, M, N, K, bricks, groups, parts, stride_x, stride_y,
    HELD: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, FLUSH: tl.constexpr,
    RECORD: tl.constexpr, ASYM: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, PAIR: tl.constexpr,
    ACT: tl.constexpr,
    EVEN: tl.constexpr, SPLIT: tl.constexpr, SCALE_W: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """See the top of the file. WIDTH: words (4 bits) or bytes (8 bits) of a brick's row."""
    dtype: tl.constexpr = x.dtype.element_ty
    half: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    tiles_n = tl.cdiv(PAIR if PAIR else N, half)
    part = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tiles_n)
    lane = tl.arange(0, BLOCK_N)
    rows = tile_n * half + lane % half + (lane // half) * PAIR
    block = tl.minimum(rows // 64, tl.cdiv(N, 64) - 1)  # rows past the end read some block; they are never stored
    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, WIDTH)
    per_part = tl.cdiv(bricks, parts)
    first = part * per_part
    w_at = words + block.to(tl.int64)[:, None] * (bricks * (64 * WIDTH)) + (rows % 64)[:, None] * WIDTH + inner[None, :]
    x_at = x + tokens.to(tl.int64)[None, :] * stride_x
    live_m = (tokens < M)[None, :]
    record = block * groups
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for brick in tl.range(first, tl.minimum(first + per_part, bricks), num_stages=STAGES):
        raw = tl.load(w_at + brick * (64 * WIDTH), eviction_policy="evict_first")
        if HELD == 4:
            low, high = halves(raw)
        for flush in tl.static_range(8 // FLUSH if HELD == 4 else 1):
            k0 = brick * (8 * WIDTH if HELD == 4 else WIDTH) + flush * FLUSH * WIDTH
            scale, minus = group_numbers(
                scales, zeros, record, rows, k0, groups, dtype, HELD, GROUP, RECORD, ASYM, TABLE, False
            )
            one = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for index in tl.static_range(FLUSH):
                k = k0 + index * WIDTH + inner
                live = live_m if EVEN else live_m & (k < K)[:, None]
                right = tl.load(x_at + k[:, None], mask=live, other=0.0)
                if TABLE:
                    if (flush * FLUSH + index) % 4 == 0:
                        p0, p1, p2, p3 = looked_up(low if flush * FLUSH + index < 4 else high, dtype, TABLE, ASM)
                    left = p0
                    p0, p1, p2 = p1, p2, p3
                elif HELD == 4:
                    left = plane(low if flush * FLUSH + index < 4 else high, minus, (flush * FLUSH + index) % 4, ASM)
                else:
                    left = signed_bytes(raw, minus, ASYM, ASM)
                if SCALE_W:
                    acc = product(scaled(left, scale, ASM), right, acc, ASM)
                else:
                    one = product(left, right, one, ASM)
            if not SCALE_W:
                acc += one * scale
    if SPLIT:
        last, acc = add_up(acc, work, lock, tile_m * tiles_n + tile_n, part, parts, BLOCK_N, BLOCK_M)
        if last:
            finish(acc, y, bias, rows, tokens, M, N, stride_y, PAIR, ACT, BIAS)
    else:
        finish(acc, y, bias, rows, tokens, M, N, stride_y, PAIR, ACT, BIAS)
