"""What the parts of a compiled decode step share: fields of its job, the exponential, norms, rotary embedding."""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.numba.gemv import FIELDS, ONE, F, jit
from quantkit.runtime.kernels.numba.ir import as_bits, as_float, dot_f32, load_f32, store_f32

# A step job: int64 fields; floats as bits. Layers follow from FIRST_LAYER on. LENGTHS: tokens that each sequence has
# already.
(
    JOB, TOKENS, EMBEDDED, SCRATCH, SCRATCH_BYTES, LAYERS, RESULT, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ROTARY,
    ACT, LENGTHS, PARTIALS, QKV, MIXED, SENT, ACTED, INTERMEDIATE, EPS, SCALING, LAST_NORM, PAGE, S_HIDDEN,
    S_NORM, S_QUERY, S_KEY, S_BIAS, S_ROWS, S_SCORES, S_WEIGHTS, S_SCALES, S_FOLDED, S_QUANT,
) = range(35)  # fmt: skip
FIRST_LAYER = 35
# A layer: addresses and numbers, then its seven matrices. TABLE: int64 ``[batch, TABLE_STRIDE]``, where each page of a
# sequence is: the first ``PACKED[b]`` in the packed pool, the others in the exact one. FIRST_COUNT: exact first tokens,
# ``[batch, kv_heads, count, dim]``.
(
    NORM_IN, NORM_MID, NORM_AFTER_ATTENTION, NORM_AFTER_MLP, NORM_Q, NORM_K, COS, SIN, KEY_POOL, VALUE_POOL,
    TABLE, TABLE_STRIDE, PACKED, WINDOW, KEY_BITS, KEY_CODES, KEY_SCALES, VALUE_BITS, VALUE_CODES,
    VALUE_SCALES, GROUPS, FIRST_COUNT, FIRST_KEYS, FIRST_VALUES,
) = range(24)  # fmt: skip
MATRICES = 24
Q, K, V, O, GATE, UP, DOWN = (MATRICES + i * FIELDS for i in range(7))  # noqa: E741
LAYER = MATRICES + 7 * FIELDS
JOB_STEP = 3
CHUNK_PAGES = 4  # of a unit of attention
# floats before the sums of a partial result: largest score, sum of exponentials, what the lows of each group of values
# add
HEADER = 16
MOST_GROUPS = HEADER - 2
ROWS_AT_ONCE = 16  # packed rows that are decoded before they are used, so that they stay in the first cache
SILU, GELU_TANH = 0, 1
LOG2E, LN2_HIGH, LN2_LOW, SHIFTER = F(1.44269504), F(0.693359375), F(-2.12194440e-4), F(12582912.0)


@jit
def exponential(x):
    """float32 exp to about 1e-7 (the polynomial of Cephes' expf); 0 below -87, exp(88) above 88."""
    x = min(max(x, F(-87.0)), F(88.0)) if x == x else x
    scaled = x * LOG2E + SHIFTER
    n = np.int32(as_bits(scaled) - np.int32(0x4B400000))
    whole = scaled - SHIFTER
    r = x - whole * LN2_HIGH - whole * LN2_LOW
    p = F(1.9875691500e-4) * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    return (p * r * r + r + ONE) * as_float(np.int32((n + 127) << 23))


@jit
def total_of_squares(x, n):
    """Sum of x * x over n floats at an address."""
    total = dot_f32(x, x, n // 16)
    for i in range(n // 16 * 16, n):
        total += load_f32(x, i) * load_f32(x, i)
    return total


@jit
def normalize(x, weight, n, eps, out):
    """Apply the RMS norm to n floats: ``x / sqrt(mean(x**2) + eps) * weight``."""
    factor = ONE / np.sqrt(total_of_squares(x, n) / F(n) + eps)
    for i in range(n):
        store_f32(out, i, load_f32(x, i) * factor * load_f32(weight, i))


@jit
def rotate(x, cos, sin, half, position, width):
    """Apply the rotary embedding in place: pairs (i, i + half) of the first ``width`` channels.

    cos and sin: ``[positions, width]``.
    """
    c, s = cos + position * width * 4, sin + position * width * 4
    for i in range(half):
        a, b = load_f32(x, i), load_f32(x, i + half)
        store_f32(x, i, a * load_f32(c, i) - b * load_f32(s, i))
        store_f32(x, i + half, b * load_f32(c, i + half) + a * load_f32(s, i + half))
