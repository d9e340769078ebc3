"""One decode step of the common decoder family in one compiled function: every thread runs all of it, five barriers a layer.

A thread owns output rows of each matrix and (sequence, head) pairs of the attention; norms and the rounding of activations are so cheap
that each thread does them for itself instead of waiting. What threads share::

    qkv    float32 [tokens, (heads + 2 kv_heads) * head_dim]     written by rows, read by heads
    mixed  float32 [tokens, heads * head_dim]                    attention's result
    sent   float32 [tokens, hidden]                              of o_proj, then of down_proj
    acted  float32 [tokens, intermediate]                        act(gate) * up

The residual stream is kept by each thread, in the same float32 operations, so all copies are equal.
"""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.cpu_numba import (
    FIELDS,
    KIND,
    NIBBLES,
    ONE,
    OUT,
    OUT_STRIDE,
    PARTS,
    ROWS,
    ZERO,
    F,
    barrier,
    jit,
    quantize_tokens,
    rows_of,
    share,
)  # fmt: skip
from quantkit.runtime.kernels.cpu_numba_ir import (
    as_bits,
    as_float,
    dot_f32,
    load_f32,
    load_i64,
    load_u8,
    store_f32,
    store_u8,
)  # fmt: skip

# A step job: int64 fields; floats as bits. Layers follow from FIRST_LAYER on.
(JOB, TOKENS, EMBEDDED, SCRATCH, SCRATCH_BYTES, LAYERS, RESULT, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ROTARY, ACT, LENGTH, PADS, QKV, MIXED,
 SENT, ACTED, INTERMEDIATE, EPS, SCALING, LAST_NORM, PAGE, S_HIDDEN, S_NORM, S_QUERY, S_KEY, S_VALUE, S_ENTRY, S_SCORES, S_QUANT) = range(32)  # fmt: skip
FIRST_LAYER = 32
# A layer: addresses and numbers, then its seven matrices.
(NORM_IN, NORM_MID, NORM_AFTER_ATTENTION, NORM_AFTER_MLP, NORM_Q, NORM_K, COS, SIN, KEY_POOL, VALUE_POOL, TABLE, TABLE_STRIDE, DROPPED,
 WINDOW, KV_BITS, KEY_SCALE, KEY_ZERO, VALUE_SCALE, VALUE_ZERO, KV_GROUPS) = range(20)  # fmt: skip
MATRICES = 20
Q, K, V, O, GATE, UP, DOWN = (MATRICES + i * FIELDS for i in range(7))  # noqa: E741
LAYER = MATRICES + 7 * FIELDS
JOB_STEP = 3
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
    found = dot_f32(x, x, n // 16)
    for i in range(n // 16 * 16, n):
        found += load_f32(x, i) * load_f32(x, i)
    return found


@jit
def normalize(x, weight, n, eps, out):
    """RMS norm of n floats: ``x / sqrt(mean(x**2) + eps) * weight``."""
    factor = ONE / np.sqrt(total_of_squares(x, n) / F(n) + eps)
    for i in range(n):
        store_f32(out, i, load_f32(x, i) * factor * load_f32(weight, i))


@jit
def add(x, y, n):
    """x += y."""
    for i in range(n):
        store_f32(x, i, load_f32(x, i) + load_f32(y, i))


@jit
def rotate(x, cos, sin, half, position, width):
    """Rotary embedding in place: pairs (i, i + half) of the first ``width`` channels; cos and sin ``[positions, width]``."""
    c, s = cos + position * width * 4, sin + position * width * 4
    for i in range(half):
        a, b = load_f32(x, i), load_f32(x, i + half)
        store_f32(x, i, a * load_f32(c, i) - b * load_f32(s, i))
        store_f32(x, i + half, b * load_f32(c, i + half) + a * load_f32(s, i + half))


@jit
def slot(layer, page, heads, sequence, head, position, width):
    """Offset in elements of a token's entry in a pool ``[pages, heads, page, width]``."""
    number = load_i64(layer[TABLE], sequence * layer[TABLE_STRIDE] + position // page - layer[DROPPED])
    return ((number * heads + head) * page + position % page) * width


@jit
def keep(x, dim, bits, scales, zeros, groups, pool, at, owner):
    """Make x (``[dim]``, one head's key or value) what the pool will give back; the owner of the head stores it there.

    bits 16: as it is. 8 and 4: ``kv_quantize``, then ``kv_dequantize``. scales, zeros: float32 ``[groups]`` of this head.
    """
    if bits == 16:
        if owner:
            for i in range(dim):
                store_f32(pool, at + i, load_f32(x, i))
        return
    size, most = dim // groups, F(255.0) if bits == 8 else F(15.0)
    low = np.int32(0)
    for i in range(dim):
        scale, zero = load_f32(scales, i // size), load_f32(zeros, i // size)
        steps = min(max(load_f32(x, i) / scale, F(-1e6)), F(1e6))
        code = min(max((steps + SHIFTER) - SHIFTER + zero, ZERO), most)  # rounds to even, as torch.round does
        store_f32(x, i, (code - zero) * scale)
        if owner and bits == 8:
            store_u8(pool, at + i, np.int32(code))
        elif owner and i % 2 == 0:
            low = np.int32(code)
        elif owner:
            store_u8(pool, at + i // 2, np.int32(low | np.int32(code) << 4))


@jit
def entry(pool, at, dim, bits, scales, zeros, groups, buffer):
    """Address of a cached key or value as floats: in the pool, or decoded into the buffer."""
    if bits == 16:
        return pool + at * 4
    size = dim // groups
    for g in range(groups):
        scale, zero = load_f32(scales, g), load_f32(zeros, g)
        for i in range(g * size, (g + 1) * size):
            code = load_u8(pool, at + i) if bits == 8 else (load_u8(pool, at + i // 2) >> (i % 2 * 4)) & 15
            store_f32(buffer, i, (F(code) - zero) * scale)
    return buffer


@jit
def attend(job, layer, sequence, head, own, cached):
    """One head of one sequence over the cached tokens and the new one. cached: the kv head whose key and value of the new
    token lie in S_KEY and S_VALUE already. Returns it for the next call."""
    dim, heads, kv_heads, page, bits = job[HEAD_DIM], job[HEADS], job[KV_HEADS], job[PAGE], layer[KV_BITS]
    kv = head // (heads // kv_heads)
    query, key, value, buffer = own + job[S_QUERY], own + job[S_KEY], own + job[S_VALUE], own + job[S_ENTRY]
    row = job[QKV] + sequence * (heads + 2 * kv_heads) * dim * 4
    length, pad = job[LENGTH], load_i64(job[PADS], sequence)
    width, groups = dim // 2 if bits == 4 else dim, layer[KV_GROUPS]
    k_scale, k_zero = layer[KEY_SCALE] + kv * groups * 4, layer[KEY_ZERO] + kv * groups * 4
    v_scale, v_zero = layer[VALUE_SCALE] + kv * groups * 4, layer[VALUE_ZERO] + kv * groups * 4
    _prepare(job, layer, row + head * dim * 4, layer[NORM_Q], query, length - pad)
    owner = head % (heads // kv_heads) == 0
    if cached != kv or owner:
        _prepare(job, layer, row + (heads + kv) * dim * 4, layer[NORM_K], key, length - pad)
        for i in range(dim):
            store_f32(value, i, load_f32(row, (heads + kv_heads + kv) * dim + i))
        at = slot(layer, page, kv_heads, sequence, kv, length, width)
        keep(key, dim, bits, k_scale, k_zero, groups, layer[KEY_POOL], at, owner)
        keep(value, dim, bits, v_scale, v_zero, groups, layer[VALUE_POOL], at, owner)
    first = pad if layer[WINDOW] == 0 else max(pad, length + 1 - layer[WINDOW])
    scores, count = own + job[S_SCORES], length - first
    scaling = as_float(np.int32(job[SCALING]))
    most = dot_f32(query, key, dim // 16) * scaling
    store_f32(scores, count, most)
    at = np.int64(0)
    for i in range(count):
        if i == 0 or (first + i) % page == 0:
            at = slot(layer, page, kv_heads, sequence, kv, first + i, width)
        past = entry(layer[KEY_POOL], at, dim, bits, k_scale, k_zero, groups, buffer)
        score = dot_f32(query, past, dim // 16) * scaling
        store_f32(scores, i, score)
        most = max(most, score)
        at += width
    for i in range(count + 1):
        store_f32(scores, i, exponential(load_f32(scores, i) - most))
    out = job[MIXED] + (sequence * heads + head) * dim * 4
    total = load_f32(scores, count)
    for i in range(dim):
        store_f32(out, i, total * load_f32(value, i))
    for i in range(count):
        if i == 0 or (first + i) % page == 0:
            at = slot(layer, page, kv_heads, sequence, kv, first + i, width)
        past = entry(layer[VALUE_POOL], at, dim, bits, v_scale, v_zero, groups, buffer)
        weight = load_f32(scores, i)
        total += weight
        for d in range(dim):
            store_f32(out, d, load_f32(out, d) + weight * load_f32(past, d))
        at += width
    for i in range(dim):
        store_f32(out, i, load_f32(out, i) / total)
    return kv


@jit
def _prepare(job, layer, source, norm, target, position):
    """A head of queries or keys: its norm if there is one, then rotary."""
    dim = job[HEAD_DIM]
    if norm != 0:
        normalize(source, norm, dim, as_float(np.int32(job[EPS])), target)
    else:
        for i in range(dim):
            store_f32(target, i, load_f32(source, i))
    rotate(target, layer[COS], layer[SIN], job[ROTARY] // 2, position, job[ROTARY])


@jit
def multiply(job, m, x, columns, quantized, part, parts, again):
    """This thread's rows of one matrix, for all tokens; ``again``: x is not what the last matrix read."""
    if again:
        quantize_tokens(m, job[TOKENS], x, columns * 4, quantized)
    rows_of(m, job[TOKENS], x, columns * 4, quantized, share(m[ROWS], part, parts), share(m[ROWS], part + 1, parts))


@jit
def differs(a, b):
    """Whether two matrices take their activations in different forms."""
    integers = a[KIND] >= NIBBLES and b[KIND] >= NIBBLES
    return not integers or a[PARTS] != b[PARTS]


@jit
def activate(job, layer, part, parts):
    """``act(gate) * up`` of this thread's rows, into what gate_proj wrote."""
    gate, up = layer[GATE:], layer[UP:]
    first, last = share(gate[ROWS], part, parts), share(gate[ROWS], part + 1, parts)
    for t in range(job[TOKENS]):
        g, u = gate[OUT] + t * gate[OUT_STRIDE], up[OUT] + t * up[OUT_STRIDE]
        for i in range(first, last):
            x = load_f32(g, i)
            if job[ACT] == SILU:
                x = x / (ONE + exponential(-x))
            else:
                inner = F(0.7978845608028654) * (x + F(0.044715) * x * x * x)
                x = x / (ONE + exponential(F(-2.0) * inner))  # x * (1 + tanh(z)) / 2 = x / (1 + exp(-2 z))
            store_f32(g, i, x * load_f32(u, i))


@jit
def receive(job, norm, hidden, normed):
    """hidden += what the last matrix sent, through its norm where the family has one."""
    width = job[HIDDEN]
    for t in range(job[TOKENS]):
        sent = job[SENT] + t * width * 4
        if norm != 0:
            normalize(sent, norm, width, as_float(np.int32(job[EPS])), normed)
            sent = normed
        add(hidden + t * width * 4, sent, width)


@jit
def normalize_all(job, norm, hidden, normed):
    """The norm before a matrix, for all tokens."""
    width = job[HIDDEN]
    for t in range(job[TOKENS]):
        normalize(hidden + t * width * 4, norm, width, as_float(np.int32(job[EPS])), normed + t * width * 4)


@jit
def attention_block(job, layer, control, own, part, parts):
    """From the norm before q_proj to o_proj; ends behind a barrier."""
    hidden, normed, quantized = own + job[S_HIDDEN], own + job[S_NORM], own + job[S_QUANT]
    width, tokens, heads = job[HIDDEN], job[TOKENS], job[HEADS]
    q, k, v, o = layer[Q:], layer[K:], layer[V:], layer[O:]
    normalize_all(job, layer[NORM_IN], hidden, normed)
    multiply(job, q, normed, width, quantized, part, parts, True)
    multiply(job, k, normed, width, quantized, part, parts, differs(q, k))
    multiply(job, v, normed, width, quantized, part, parts, differs(k, v))
    barrier(control, parts)
    units, before, cached = tokens * heads, np.int64(-1), np.int64(-1)
    for unit in range(units * part // parts, units * (part + 1) // parts):
        sequence = unit // heads
        cached = attend(job, layer, sequence, unit % heads, own, cached if sequence == before else np.int64(-1))
        before = sequence
    barrier(control, parts)
    multiply(job, o, job[MIXED], heads * job[HEAD_DIM], quantized, part, parts, True)
    barrier(control, parts)


@jit
def step(job, control, part, parts):
    """A token for every sequence: EMBEDDED ``[tokens, hidden]`` -> RESULT, after the last norm; keys and values into the pools."""
    own = job[SCRATCH] + part * job[SCRATCH_BYTES]
    hidden, normed, quantized = own + job[S_HIDDEN], own + job[S_NORM], own + job[S_QUANT]
    width = job[HIDDEN]
    for i in range(job[TOKENS] * width):
        store_f32(hidden, i, load_f32(job[EMBEDDED], i))
    for index in range(job[LAYERS]):
        layer = job[FIRST_LAYER + index * LAYER :]
        attention_block(job, layer, control, own, part, parts)
        receive(job, layer[NORM_AFTER_ATTENTION], hidden, normed)
        normalize_all(job, layer[NORM_MID], hidden, normed)
        gate, up, down = layer[GATE:], layer[UP:], layer[DOWN:]
        multiply(job, gate, normed, width, quantized, part, parts, True)
        multiply(job, up, normed, width, quantized, part, parts, differs(gate, up))
        activate(job, layer, part, parts)
        barrier(control, parts)
        multiply(job, down, job[ACTED], job[INTERMEDIATE], quantized, part, parts, True)
        barrier(control, parts)
        receive(job, layer[NORM_AFTER_MLP], hidden, normed)
    if part == 0:
        normalize_all(job, job[LAST_NORM], hidden, job[RESULT])
