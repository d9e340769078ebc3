"""Attention of one new token over the pages of a cache, for the decode step of ``step.py``.

A unit of work is a chunk of 256 tokens (4 pages) of one sequence and one head of keys and values, for all the query
heads that share it: while a page is near, all of them use it. A unit leaves ``(most, total, sums)`` of its heads in
PARTIALS, float32 ``[sequences, heads, chunks, 16 + 2 dim]`` (most, total, 14 unused; sums of values; sums of rotated
values), and ``merge`` joins chunks in their order: the result does not depend on threads.
"""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.numba.gemv import ONE, ZERO, F, jit
from quantkit.runtime.kernels.numba.ir import as_float, dot_f32, load_f32, load_i64, store_f32
from quantkit.runtime.kernels.numba.page_ir import (
    apart,
    codes2,
    codes3,
    codes4,
    codes8,
    dots1,
    dots2,
    dots3,
    exponentials,
    fill,
    fold,
    halves,
    largest,
    mix1,
    mix2,
    mix3,
)  # fmt: skip
from quantkit.runtime.kernels.numba.step_fields import (
    CHUNK_PAGES,
    COS,
    EPS,
    FIRST_COUNT,
    FIRST_KEYS,
    FIRST_VALUES,
    GROUPS,
    HEAD_DIM,
    HEADER,
    HEADS,
    KEY_BITS,
    KEY_CODES,
    KEY_POOL,
    KEY_SCALES,
    KV_HEADS,
    LENGTHS,
    MIXED,
    NORM_K,
    NORM_Q,
    PACKED,
    PAGE,
    PARTIALS,
    QKV,
    ROTARY,
    ROWS_AT_ONCE,
    S_BIAS,
    S_FOLDED,
    S_KEY,
    S_QUERY,
    S_ROWS,
    S_SCALES,
    S_SCORES,
    S_WEIGHTS,
    SCALING,
    SIN,
    TABLE,
    TABLE_STRIDE,
    VALUE_BITS,
    VALUE_CODES,
    VALUE_POOL,
    VALUE_SCALES,
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
    most = np.int64(1)
    for b in range(sequences):
        most = max(most, chunks_of(layer, job[PAGE], load_i64(job[LENGTHS], b)))
    return most


@jit
def prepare(job, layer, source, norm, target, position):
    """Prepare a head of queries or keys: its norm if there is one, then rotary."""
    dim = job[HEAD_DIM]
    if norm != 0:
        normalize(source, norm, dim, as_float(np.int32(job[EPS])), target)
    else:
        for i in range(dim):
            store_f32(target, i, load_f32(source, i))
    rotate(target, layer[COS], layer[SIN], job[ROTARY] // 2, position, job[ROTARY])


@jit
def number(layer, sequence, page):
    """The index of a sequence's page in its pool."""
    return load_i64(layer[TABLE], sequence * layer[TABLE_STRIDE] + page)


@jit
def copy(source, target, n):
    """Copy n floats."""
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
    """Multiply ``count`` rows by each of ``heads`` queries ``[heads, dim]``, plus the head's bias.

    Scores go to ``out``, ``out_stride`` bytes a head.
    """
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
    """Add ``count`` weighted rows of ``width`` floats to each head's sums.

    Weights and sums lie at their strides in bytes.
    """
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
def decode(bits, codes, rows, dim, out):
    """Store rows of packed codes as floats ``[rows, dim]``."""
    if bits == 8:
        codes8(codes, dim, rows, dim // 16, out)
    elif bits == 4:
        codes4(codes, dim // 2, rows, dim // 16, out)
    elif bits == 3:
        codes3(codes, dim // 4 + dim // 8, rows, dim // 16, out)
    else:
        codes2(codes, dim // 4, rows, dim // 16, out)


@jit
def row_bytes(bits, dim):
    """Bytes of one token's codes."""
    return dim // 4 + dim // 8 if bits == 3 else dim * bits // 8


@jit
def attend(job, layer, own, sequence, kv, chunk, chunks, again):
    """Do one unit of work. again: the last one of this thread had another sequence or another head."""
    dim, kv_heads, page = job[HEAD_DIM], job[KV_HEADS], job[PAGE]
    sharing = job[HEADS] // kv_heads
    length = load_i64(job[LENGTHS], sequence)
    first = first_seen(layer, length)
    start = (first // page + chunk * CHUNK_PAGES) * page
    begin, end = max(first, start), min(length + 1, start + CHUNK_PAGES * page)
    space = HEADER + 2 * dim
    out = job[PARTIALS] + ((sequence * job[HEADS] + kv * sharing) * chunks + chunk) * space * 4
    for h in range(sharing):
        fill(out + h * chunks * space * 4, space // 8, ZERO)
        store_f32(out + h * chunks * space * 4, 0, LOWEST)
    if again:
        _queries(job, layer, own, sequence, kv * sharing, sharing, length)
    if begin >= end:  # other sequences are longer
        return
    if end == length + 1:
        keep(job, layer, own, sequence, kv, length)
    scores, stride = own + job[S_SCORES], CHUNK_PAGES * page * 4
    for g in range(begin // page, (end + page - 1) // page):
        low, high = max(begin, g * page), min(end, (g + 1) * page)
        at = scores + (low - begin) * 4
        score_page(job, layer, own, sequence, kv, g, low - g * page, high - g * page, at, stride)
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
        at = scores + (low - begin) * 4
        mix_page(job, layer, own, sequence, kv, g, low - g * page, high - g * page, at, stride, out, chunks * space * 4)


@jit
def _queries(job, layer, own, sequence, head, sharing, position):
    """Put the queries of some heads, scaled, into S_QUERY ``[sharing, dim]``."""
    dim, scaling = job[HEAD_DIM], as_float(np.int32(job[SCALING]))
    row = job[QKV] + (sequence * (job[HEADS] + 2 * job[KV_HEADS]) + head) * dim * 4
    for h in range(sharing):
        query = own + job[S_QUERY] + h * dim * 4
        prepare(job, layer, row + h * dim * 4, layer[NORM_Q], query, position)
        for i in range(dim):
            store_f32(query, i, load_f32(query, i) * scaling)


@jit
def score_page(job, layer, own, sequence, kv, g, low, high, out, out_stride):
    """Compute scores of tokens low to high of a sequence's page g."""
    dim, page, kv_heads, sharing = job[HEAD_DIM], job[PAGE], job[KV_HEADS], job[HEADS] // job[KV_HEADS]
    query, none, bias, scales = (
        own + job[S_QUERY],
        own + job[S_BIAS],
        own + job[S_BIAS] + sharing * 4,
        own + job[S_SCALES],
    )
    place, folded, width = (
        number(layer, sequence, g) * kv_heads + kv,
        own + job[S_FOLDED],
        row_bytes(layer[KEY_BITS], dim),
    )
    exact = g >= load_i64(layer[PACKED], sequence)
    first = layer[FIRST_COUNT] if g == 0 else np.int64(0)
    for h in range(sharing):
        store_f32(none, h, ZERO)
    if not exact:
        halves(layer[KEY_SCALES] + place * dim * 4, scales, dim // 4)
        for h in range(sharing):
            store_f32(bias, h, fold(query + h * dim * 4, scales, scales + dim * 4, folded + h * dim * 4, dim // 8))
    at = low
    while at < high:
        count, q, c = high - at, query, none
        if exact:
            rows = layer[KEY_POOL] + (place * page + at) * dim * 4
        elif at < first:
            count = min(count, first - at)
            rows = layer[FIRST_KEYS] + ((sequence * kv_heads + kv) * first + at) * dim * 4
        else:
            count, rows, q, c = min(count, ROWS_AT_ONCE), own + job[S_ROWS], folded, bias
            decode(layer[KEY_BITS], layer[KEY_CODES] + (place * page + at) * width, count, dim, rows)
        dots(rows, dim * 4, count, q, sharing, dim, c, out + (at - low) * 4, out_stride)
        at += count


@jit
def mix_page(job, layer, own, sequence, kv, g, low, high, w, w_stride, out, out_stride):
    """Add the values of tokens low to high of a sequence's page g, weighted, to partial results at ``out``."""
    dim, page, kv_heads, sharing = job[HEAD_DIM], job[PAGE], job[KV_HEADS], job[HEADS] // job[KV_HEADS]
    place, plain, row = number(layer, sequence, g) * kv_heads + kv, out + HEADER * 4, row_bytes(layer[VALUE_BITS], dim)
    exact = g >= load_i64(layer[PACKED], sequence)
    first = layer[FIRST_COUNT] if g == 0 else np.int64(0)
    start = max(low, first)
    if not exact and start < high:
        weigh(job, layer, own, place, start, high, w + (start - low) * 4, w_stride, out, out_stride)
    at = low
    while at < high:
        count, groups, x, stride, to = high - at, np.int64(1), w + (at - low) * 4, w_stride, plain
        if exact:
            rows = layer[VALUE_POOL] + (place * page + at) * dim * 4
        elif at < first:
            count = min(count, first - at)
            rows = layer[FIRST_VALUES] + ((sequence * kv_heads + kv) * first + at) * dim * 4
        else:
            count, groups, rows, to = min(count, ROWS_AT_ONCE), layer[GROUPS], own + job[S_ROWS], plain + dim * 4
            x, stride = own + job[S_WEIGHTS] + (at - start) * 4, page * 4
            decode(layer[VALUE_BITS], layer[VALUE_CODES] + (place * page + at) * row, count, dim, rows)
        width = dim // groups
        for group in range(groups):
            part, weights = group * width * 4, x + group * sharing * page * 4
            mix(rows + part, dim * 4, count, weights, stride, sharing, to + part, out_stride, width)
        at += count


@jit
def weigh(job, layer, own, place, low, high, w, w_stride, out, out_stride):
    """Multiply weights by the scales of the values, into S_WEIGHTS ``[groups, sharing, page]``.

    What the lows add goes into the headers at ``out``.
    """
    page, sharing, groups, count = job[PAGE], job[HEADS] // job[KV_HEADS], layer[GROUPS], high - low
    scales = own + job[S_SCALES]
    lows = scales + page * 4
    for group in range(groups):
        apart(layer[VALUE_SCALES] + (place * page * groups + group) * 4, groups * 4, scales, lows, page // 8)
        for h in range(sharing):
            x, to = w + h * w_stride, own + job[S_WEIGHTS] + (group * sharing + h) * page * 4
            added = fold(x, scales + low * 4, lows + low * 4, to, count // 8)
            for i in range(count // 8 * 8, count):
                store_f32(to, i, load_f32(x, i) * load_f32(scales, low + i))
                added += load_f32(x, i) * load_f32(lows, low + i)
            header = out + h * out_stride
            store_f32(header, 2 + group, load_f32(header, 2 + group) + added)


@jit
def merge(job, layer, own, sequence, head, chunks):
    """Join the chunks of one head into MIXED."""
    dim, groups = job[HEAD_DIM], layer[GROUPS]
    space = (HEADER + 2 * dim) * 4
    parts = job[PARTIALS] + (sequence * job[HEADS] + head) * chunks * space
    out, turned = job[MIXED] + (sequence * job[HEADS] + head) * dim * 4, own + job[S_KEY]
    most, total = LOWEST, ZERO
    for c in range(chunks):
        most = max(most, load_f32(parts + c * space, 0))
    fill(out, dim // 8, ZERO)
    fill(turned, dim // 8, ZERO)
    packed, lows = load_i64(layer[PACKED], sequence) > 0, own + job[S_SCALES]
    for group in range(groups):
        store_f32(lows, group, ZERO)
    for c in range(chunks):
        part, factor = parts + c * space, own + job[S_BIAS]
        store_f32(factor, 0, exponential(load_f32(part, 0) - most))
        total += load_f32(factor, 0) * load_f32(part, 1)
        mix1(part + HEADER * 4, 0, 1, factor, 0, out, 0, dim // 8)
        if packed:
            mix1(part + (HEADER + dim) * 4, 0, 1, factor, 0, turned, 0, dim // 8)
            for group in range(groups):
                store_f32(lows, group, load_f32(lows, group) + load_f32(factor, 0) * load_f32(part, 2 + group))
    for i in range(dim if packed else 0):
        store_f32(turned, i, load_f32(turned, i) + load_f32(lows, i * groups // dim))
    if packed:
        turn(turned, dim)
    for i in range(dim):
        store_f32(out, i, (load_f32(out, i) + load_f32(turned, i)) / total)


@jit
def turn(x, dim):
    """Apply the Hadamard rotation of ``core/kvpages.py`` in place.

    Its blocks have the size of the largest power of two that divides ``dim``.
    """
    size = dim & -dim
    span = np.int64(1)
    while span < size:
        for i in range(dim // 2):
            a = i // span * 2 * span + i % span
            p, q = load_f32(x, a), load_f32(x, a + span)
            store_f32(x, a, p + q)
            store_f32(x, a + span, p - q)
        span *= 2
    factor = ONE / np.sqrt(F(size))
    for i in range(dim):
        store_f32(x, i, load_f32(x, i) * factor)
