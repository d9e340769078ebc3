"""Attention of one new token over the pages of a cache, for the decode step of ``cpu_numba_step.py``.

A unit of work is a chunk of 256 tokens (4 pages) of one sequence and one head of keys and values, for all the query heads that share it: while
a page is near, all of them use it. A unit leaves ``(most, total, sums)`` of its heads in PARTIALS, float32 ``[sequences, heads, chunks, 16 + 2 dim]``
(most, total, 14 unused; sums of values; sums of rotated values), and ``merge`` joins chunks in their order: the result does not depend on threads.
"""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.cpu_numba import ONE, ZERO, F, jit
from quantkit.runtime.kernels.cpu_numba_ir import as_float, dot_f32, load_f32, load_i64, store_f32
from quantkit.runtime.kernels.cpu_numba_pages import dots1, dots2, dots3, exponentials, largest, mix1, mix2, mix3
from quantkit.runtime.kernels.cpu_numba_parts import (
    CHUNK_PAGES,
    COS,
    EPS,
    FIRST_COUNT,
    FIRST_KEYS,
    FIRST_VALUES,
    HEAD_DIM,
    HEADER,
    HEADS,
    KEY_POOL,
    KV_HEADS,
    LENGTHS,
    MIXED,
    NORM_K,
    NORM_Q,
    PAGE,
    PARTIALS,
    QKV,
    ROTARY,
    S_BIAS,
    S_KEY,
    S_QUERY,
    S_SCORES,
    SCALING,
    SIN,
    TABLE,
    TABLE_STRIDE,
    VALUE_POOL,
    WINDOW,
    exponential,
    normalize,
    rotate,
)  # fmt: skip

LOWEST = F(-3e38)


@jit
def first_seen(layer, length):
    """The first token that a query at position ``length`` sees."""
    return np.int64(0) if layer[WINDOW] == 0 else max(np.int64(0), length + 1 - layer[WINDOW])


@jit
def chunks_of(layer, page, length):
    """Chunks that a query at position ``length`` reads; they begin at the page of the first token that it sees."""
    pages = length // page - first_seen(layer, length) // page + 1
    return (pages + CHUNK_PAGES - 1) // CHUNK_PAGES


@jit
def most_chunks(job, layer, sequences):
    """Chunks of the longest sequence."""
    found = np.int64(1)
    for b in range(sequences):
        found = max(found, chunks_of(layer, job[PAGE], load_i64(job[LENGTHS], b)))
    return found


@jit
def prepare(job, layer, source, norm, target, position):
    """A head of queries or keys: its norm if there is one, then rotary."""
    dim = job[HEAD_DIM]
    if norm != 0:
        normalize(source, norm, dim, as_float(np.int32(job[EPS])), target)
    else:
        for i in range(dim):
            store_f32(target, i, load_f32(source, i))
    rotate(target, layer[COS], layer[SIN], job[ROTARY] // 2, position, job[ROTARY])


@jit
def number(layer, sequence, page):
    """Where a page of a sequence is in its pool."""
    return load_i64(layer[TABLE], sequence * layer[TABLE_STRIDE] + page)


@jit
def copy(source, target, n):
    """n floats."""
    for i in range(n):
        store_f32(target, i, load_f32(source, i))


@jit
def keep(job, layer, own, sequence, kv, position):
    """Store the new token's key and value of one head where attention and the cache look for them."""
    dim, heads, kv_heads, page, first = job[HEAD_DIM], job[HEADS], job[KV_HEADS], job[PAGE], layer[FIRST_COUNT]
    row = job[QKV] + sequence * (heads + 2 * kv_heads) * dim * 4
    key, value = own + job[S_KEY], row + (heads + kv_heads + kv) * dim * 4
    prepare(job, layer, row + (heads + kv) * dim * 4, layer[NORM_K], key, position)
    at = ((number(layer, sequence, position // page) * kv_heads + kv) * page + position % page) * dim * 4
    copy(key, layer[KEY_POOL] + at, dim)
    copy(value, layer[VALUE_POOL] + at, dim)
    if position < first:
        at = ((sequence * kv_heads + kv) * first + position) * dim * 4
        copy(key, layer[FIRST_KEYS] + at, dim)
        copy(value, layer[FIRST_VALUES] + at, dim)


@jit
def dots(rows, stride, count, q, heads, dim, bias, out, out_stride):
    """``count`` rows times each of ``heads`` queries ``[heads, dim]``, plus the head's bias -> scores, ``out_stride`` bytes a head."""
    fours, h = count // 4, 0
    while h < heads:
        left = heads - h
        together = 1 if left == 1 else (3 if left % 3 == 0 or left > 4 else 2)
        x, c, to = q + h * dim * 4, bias + h * 4, out + h * out_stride
        if together == 3:
            dots3(rows, stride, fours, x, dim * 4, dim // 16, c, to, out_stride)
        elif together == 2:
            dots2(rows, stride, fours, x, dim * 4, dim // 16, c, to, out_stride)
        else:
            dots1(rows, stride, fours, x, dim * 4, dim // 16, c, to, out_stride)
        for i in range(fours * 4, count):
            for j in range(together):
                score = dot_f32(x + j * dim * 4, rows + i * stride, dim // 16) + load_f32(c, j)
                store_f32(to + j * out_stride, i, score)
        h += together


@jit
def mix(rows, stride, count, w, w_stride, heads, out, out_stride, width):
    """Add ``count`` weighted rows of ``width`` floats to each head's sums; weights and sums at their strides in bytes."""
    h = 0
    while h < heads:
        left = heads - h
        together = 1 if left == 1 else (3 if left % 3 == 0 or left > 4 else 2)
        x, to = w + h * w_stride, out + h * out_stride
        if together == 3:
            mix3(rows, stride, count, x, w_stride, to, out_stride, width // 8)
        elif together == 2:
            mix2(rows, stride, count, x, w_stride, to, out_stride, width // 8)
        else:
            mix1(rows, stride, count, x, w_stride, to, out_stride, width // 8)
        h += together


@jit
def attend(job, layer, own, sequence, kv, chunk, chunks):
    """One unit of work."""
    dim, kv_heads, page = job[HEAD_DIM], job[KV_HEADS], job[PAGE]
    sharing = job[HEADS] // kv_heads
    length = load_i64(job[LENGTHS], sequence)
    first = first_seen(layer, length)
    start = (first // page + chunk * CHUNK_PAGES) * page
    begin, end = max(first, start), min(length + 1, start + CHUNK_PAGES * page)
    space = HEADER + 2 * dim
    out = job[PARTIALS] + ((sequence * job[HEADS] + kv * sharing) * chunks + chunk) * space * 4
    for h in range(sharing):
        for i in range(space):
            store_f32(out + h * chunks * space * 4, i, ZERO)
    if begin >= end:  # other sequences are longer
        for h in range(sharing):
            store_f32(out + h * chunks * space * 4, 0, LOWEST)
        return
    if end == length + 1:
        keep(job, layer, own, sequence, kv, length)
    _queries(job, layer, own, sequence, kv * sharing, sharing, length)
    scores, stride = own + job[S_SCORES], CHUNK_PAGES * page * 4
    for g in range(begin // page, (end + page - 1) // page):
        low, high = max(begin, g * page), min(end, (g + 1) * page)
        _score_page(
            job, layer, own, sequence, kv, g, low - g * page, high - g * page, scores + (low - begin) * 4, stride
        )
    count = end - begin
    for h in range(sharing):
        row, to = scores + h * stride, out + h * chunks * space * 4
        for i in range(count, (count + 7) // 8 * 8):
            store_f32(row, i, LOWEST)
        most = largest(row, (count + 7) // 8)
        store_f32(to, 0, most)
        store_f32(to, 1, exponentials(row, (count + 7) // 8, most))
    for g in range(begin // page, (end + page - 1) // page):
        low, high = max(begin, g * page), min(end, (g + 1) * page)
        _mix_page(
            job, layer, own, sequence, kv, g, low - g * page, high - g * page, scores + (low - begin) * 4, stride,
            out + HEADER * 4, chunks * space * 4,
        )  # fmt: skip


@jit
def _queries(job, layer, own, sequence, head, sharing, position):
    """The queries of some heads, scaled, into S_QUERY ``[sharing, dim]``."""
    dim, scaling = job[HEAD_DIM], as_float(np.int32(job[SCALING]))
    row = job[QKV] + (sequence * (job[HEADS] + 2 * job[KV_HEADS]) + head) * dim * 4
    for h in range(sharing):
        query = own + job[S_QUERY] + h * dim * 4
        prepare(job, layer, row + h * dim * 4, layer[NORM_Q], query, position)
        for i in range(dim):
            store_f32(query, i, load_f32(query, i) * scaling)
        store_f32(own + job[S_BIAS], h, ZERO)


@jit
def _score_page(job, layer, own, sequence, kv, g, low, high, out, out_stride):
    """Scores of tokens low to high of a sequence's page g."""
    dim, page, sharing = job[HEAD_DIM], job[PAGE], job[HEADS] // job[KV_HEADS]
    rows = layer[KEY_POOL] + ((number(layer, sequence, g) * job[KV_HEADS] + kv) * page + low) * dim * 4
    dots(rows, dim * 4, high - low, own + job[S_QUERY], sharing, dim, own + job[S_BIAS], out, out_stride)


@jit
def _mix_page(job, layer, own, sequence, kv, g, low, high, w, w_stride, out, out_stride):
    """Add the values of tokens low to high of a sequence's page g, weighted."""
    dim, page, sharing = job[HEAD_DIM], job[PAGE], job[HEADS] // job[KV_HEADS]
    rows = layer[VALUE_POOL] + ((number(layer, sequence, g) * job[KV_HEADS] + kv) * page + low) * dim * 4
    mix(rows, dim * 4, high - low, w, w_stride, sharing, out, out_stride, dim)


@jit
def merge(job, sequence, head, chunks):
    """Join the chunks of one head into MIXED."""
    dim = job[HEAD_DIM]
    space = (HEADER + 2 * dim) * 4
    parts = job[PARTIALS] + (sequence * job[HEADS] + head) * chunks * space
    out = job[MIXED] + (sequence * job[HEADS] + head) * dim * 4
    most, total = LOWEST, ZERO
    for c in range(chunks):
        most = max(most, load_f32(parts + c * space, 0))
    for i in range(dim):
        store_f32(out, i, ZERO)
    for c in range(chunks):
        part = parts + c * space
        factor = exponential(load_f32(part, 0) - most)
        total += factor * load_f32(part, 1)
        for i in range(dim):
            store_f32(out, i, load_f32(out, i) + factor * load_f32(part, HEADER + i))
    for i in range(dim):
        store_f32(out, i, load_f32(out, i) * (ONE / total))
