"""One decode step of the common decoder family in one compiled function.

Every thread runs all of it, with five barriers a layer. A thread owns output rows of each matrix and (sequence, head)
pairs of the attention; norms and the rounding of activations are so cheap that each thread does them for itself instead
of waiting. What threads share::

    qkv    float32 [tokens, (heads + 2 kv_heads) * head_dim]     written by rows, read by heads
    mixed  float32 [tokens, heads * head_dim]                    attention's result
    sent   float32 [tokens, hidden]                              of o_proj, then of down_proj
    acted  float32 [tokens, intermediate]                        act(gate) * up

The residual stream is kept by each thread, in the same float32 operations, so all copies are equal.
"""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.numba.attention import attend, merge, most_chunks
from quantkit.runtime.kernels.numba.gemv import (
    KIND,
    NIBBLES,
    ONE,
    OUT,
    OUT_STRIDE,
    PARTS,
    ROWS,
    F,
    barrier,
    jit,
    quantize_tokens,
    rows_of,
    share,
)  # fmt: skip
from quantkit.runtime.kernels.numba.ir import as_float, load_f32, store_f32
from quantkit.runtime.kernels.numba.step_fields import (
    ACT,
    ACTED,
    DOWN,
    EMBEDDED,
    EPS,
    FIRST_LAYER,
    GATE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAST_NORM,
    LAYER,
    LAYERS,
    MIXED,
    NORM_AFTER_ATTENTION,
    NORM_AFTER_MLP,
    NORM_IN,
    NORM_MID,
    RESULT,
    S_HIDDEN,
    S_NORM,
    S_QUANT,
    SCRATCH,
    SCRATCH_BYTES,
    SENT,
    SILU,
    TOKENS,
    UP,
    K,
    O,
    Q,
    V,
    exponential,
    normalize,
)  # fmt: skip


@jit
def add(x, y, n):
    """x += y."""
    for i in range(n):
        store_f32(x, i, load_f32(x, i) + load_f32(y, i))


@jit
def multiply(job, m, x, columns, quantized, part, parts, again):
    """Compute this thread's rows of one matrix, for all tokens. again: x is not what the last matrix read."""
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
    """Compute ``act(gate) * up`` of this thread's rows, into what gate_proj wrote."""
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
    """Add what the last matrix sent to ``hidden``, through its norm where the family has one."""
    width = job[HIDDEN]
    for t in range(job[TOKENS]):
        sent = job[SENT] + t * width * 4
        if norm != 0:
            normalize(sent, norm, width, as_float(np.int32(job[EPS])), normed)
            sent = normed
        add(hidden + t * width * 4, sent, width)


@jit
def normalize_all(job, norm, hidden, normed):
    """Apply the norm before a matrix, for all tokens."""
    width = job[HIDDEN]
    for t in range(job[TOKENS]):
        normalize(hidden + t * width * 4, norm, width, as_float(np.int32(job[EPS])), normed + t * width * 4)


@jit
def attention_block(job, layer, control, own, part, parts):
    """Run a layer from the norm before q_proj to o_proj; ends behind a barrier."""
    hidden, normed, quantized = own + job[S_HIDDEN], own + job[S_NORM], own + job[S_QUANT]
    width, tokens, heads = job[HIDDEN], job[TOKENS], job[HEADS]
    q, k, v, o = layer[Q:], layer[K:], layer[V:], layer[O:]
    normalize_all(job, layer[NORM_IN], hidden, normed)
    multiply(job, q, normed, width, quantized, part, parts, True)
    multiply(job, k, normed, width, quantized, part, parts, differs(q, k))
    multiply(job, v, normed, width, quantized, part, parts, differs(k, v))
    barrier(control, parts)
    chunks, kv_heads = most_chunks(job, layer, tokens), job[KV_HEADS]
    units, sharing = tokens * kv_heads * chunks, heads // kv_heads
    before = np.int64(-1)
    for unit in range(units * part // parts, units * (part + 1) // parts):
        sequence, kv, chunk = unit // (kv_heads * chunks), unit // chunks % kv_heads, unit % chunks
        attend(job, layer, own, sequence, kv, chunk, chunks, unit // chunks != before)
        before = unit // chunks
        if chunks == 1:
            for head in range(kv * sharing, (kv + 1) * sharing):
                merge(job, layer, own, sequence, head, chunks)
    if chunks > 1:
        barrier(control, parts)
        for unit in range(tokens * heads * part // parts, tokens * heads * (part + 1) // parts):
            merge(job, layer, own, unit // heads, unit % heads, chunks)
    barrier(control, parts)
    multiply(job, o, job[MIXED], heads * job[HEAD_DIM], quantized, part, parts, True)
    barrier(control, parts)


@jit
def step(job, control, part, parts):
    """Decode a token for every sequence: EMBEDDED ``[tokens, hidden]`` -> RESULT, after the last norm.

    Keys and values go into the pools.
    """
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
