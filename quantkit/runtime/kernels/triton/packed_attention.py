"""Attention over packed pages: codes become numbers where the matrix units want them, and nothing else is done to them.

A page's keys are ``code * scale[c] + low[c]`` by channel, its values ``code * scale[t, g] + low[t, g]`` by token and
group of channels (``core/kvpages.py``). Neither scale touches a code::

    scores[q, t] = (query[q, c] * scale[c]) . code[t, c]  +  query[q] . low    both by channel, once a page
    acc[q, c]   += (weight[q, t] * scale[t, g]) . code[t, c]     by token
    lows[q, g]  += weight[q, t] * low[t, g]

A row of the tile is a query and one group of a value's channels: with 8 queries a key head and 2 groups, 16 rows, the
least a matrix unit takes, which half empty would cost as much. ``query . low`` is one small product for 64 pages
together, kept in memory meanwhile.

Codes are loaded as 16-bit words, which ``ldmatrix`` hands out in the order of an operand (values transposed): of
neighbouring words of 4-bit codes, ``& 0x000f000f`` is the pair of channels 0 of each as float16 numbers below the
normal ones, ``code * 2**-24``, which matrix units multiply exactly (Fasi et al. 2021, doi 10.7717/peerj-cs.330, section
4). ``& 0x00f000f0`` is the second channel, times 16; after a shift by 8, the third and fourth. So a code costs 0.6
integer instructions and no conversion; channels of each place in a word are a small product of their own. Three bits
are read as their plane of two, and the plane of one that belongs to it is put above it. Values whose products would be
16 columns wide (2 and 3 bits; 4 bits of 64 channels) are put in the order of their channels first, through shared
memory.

The weights of a page are brought below 1 after their scale, not before (the running maximum is one of ``score +
log2(scale)``): in float16 what is 2**-24 of the greatest contribution is lost, not what is 2**-24 of the greatest
weight.

Bytes, of 64 tokens and one head: ``KVScheme.page_bytes``, 9216 at 4 bits, 128 channels and 2 groups, against 32768 in
16 bits. Instructions, by the machine code for sm_90: 2000 a page and 4 warps; on 528 schedulers of 1.75 GHz 16384 pages
(16 sequences of 16k, 4 heads) take 35 us of issue, and their bytes 35 us at 4.3 TB/s. Not yet measured on a GPU.
float32 models take ``code`` as float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, no-redef, assignment, misc"
# ruff: noqa: RUF005, SIM300
# (functions under triton.jit are not Python: they cannot unpack tuples)
from __future__ import annotations

import os

import triton
import triton.language as tl

from quantkit.runtime.kernels.decode_reference import PAGE

SLOTS = tl.constexpr(PAGE)
CHUNK = tl.constexpr(64)  # pages whose ``query . low`` are computed together
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def _take(bits: int, place: int) -> tl.constexpr:
    """PTX that takes the codes at ``place`` out of a pair of 16-bit words $1.

    They come as a pair $0 of float16 numbers below the normal ones.
    """
    per = 8 // bits
    mask = ((1 << bits) - 1) << (bits * (place % per))
    both = f"0x{mask << 16 | mask:08x}"
    if place < per:
        return tl.constexpr(f"and.b32 $0, $1, {both};")
    return tl.constexpr(f"{{ .reg .b32 t; shr.u32 t, $1, 8; and.b32 $0, t, {both}; }}")


_EIGHT = tl.constexpr(tuple(_take(8, place) for place in range(2)))
_FOUR = tl.constexpr(tuple(_take(4, place) for place in range(4)))
_TWO = tl.constexpr(tuple(_take(2, place) for place in range(8)))


@triton.jit
def product(left, right, acc, PRECISION: tl.constexpr):
    """Compute ``left @ right + acc`` in float32.

    PRECISION "": on matrix units as they come; else float32 by that name of tl.dot.
    """
    if PRECISION == "":
        acc = tl.dot(left, right, acc)
    else:
        acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit
def pool_at(address, base, dtype: tl.constexpr):
    """A pointer to elements of ``dtype`` at an address out of memory (a multiple of 16 bytes).

    Counted from ``base``, an argument, because a number that becomes a pointer says nothing about its alignment: every
    element would be loaded by itself, in place of 16 bytes at a time.
    """
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    moved = tl.multiple_of(address - base.to(tl.int64), 16)
    if SIZE > 1:  # a division says nothing either
        moved = tl.multiple_of(moved // SIZE, 16 // SIZE)
    return base.to(tl.pointer_type(dtype), bitcast=True) + moved


@triton.jit
def tile(place, rows, stride, at, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Load ``[rows, at]`` of a page with rows ``stride`` elements apart; 0 from column ``COUNT`` on."""
    if COUNT == WIDE:
        value = tl.load(place + rows[:, None] * stride + at[None, :])
    else:
        value = tl.load(place + rows[:, None] * stride + at[None, :], mask=(at < COUNT)[None, :], other=0)
    return value


@triton.jit
def codes_at(words, above, PLACE: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Take the codes at ``PLACE`` of 16-bit words: float16 ``code * 2**-24``, or with FLOAT float32 ``code``.

    The float16 numbers come times ``2**(BITS * PLACE % 8)``, as they lie in their byte (3 bits: they come plain).
    above: with 3 bits their highest ones, a bit for each place.
    """
    bits: tl.constexpr = 2 if BITS == 3 else BITS
    most: tl.constexpr = (1 << bits) - 1
    per: tl.constexpr = 8 // bits
    if FLOAT or BITS == 3:
        code = (words.to(tl.int32) >> (bits * PLACE)) & most
        if BITS == 3:
            code = code | ((above >> PLACE) & 1) << 2
        value = code.to(tl.float32) if FLOAT else code.to(tl.int16).to(tl.float16, bitcast=True)
    elif INTERPRETED:
        moved = words >> 8 if PLACE >= per else words
        value = (moved & (most << (bits * (PLACE % per)))).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        text: tl.constexpr = _EIGHT[PLACE] if bits == 8 else (_FOUR[PLACE] if bits == 4 else _TWO[PLACE])
        value = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    return value


@triton.jit
def channels(words, above, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Turn words ``[64, n]`` of 2, 3 or 4 bits into numbers ``[64, 8 n]`` (4 n), channels in their order."""
    if BITS == 4:
        a = tl.join(even_code(words, above, 0, BITS, FLOAT), even_code(words, above, 2, BITS, FLOAT))
        b = tl.join(even_code(words, above, 1, BITS, FLOAT), even_code(words, above, 3, BITS, FLOAT))
        each: tl.constexpr = 4
    else:
        a = tl.join(even_code(words, above, 0, BITS, FLOAT), even_code(words, above, 4, BITS, FLOAT))
        a = tl.join(a, tl.join(even_code(words, above, 2, BITS, FLOAT), even_code(words, above, 6, BITS, FLOAT)))
        b = tl.join(even_code(words, above, 1, BITS, FLOAT), even_code(words, above, 5, BITS, FLOAT))
        b = tl.join(b, tl.join(even_code(words, above, 3, BITS, FLOAT), even_code(words, above, 7, BITS, FLOAT)))
        each: tl.constexpr = 8
    return tl.reshape(tl.join(a, b), (words.shape[0], each * words.shape[1]))


@triton.jit
def even_code(words, above, PLACE: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """``codes_at``, alike at all places."""
    if BITS != 3 and PLACE > 0:
        words = (words >> (BITS * PLACE)) & ((1 << BITS) - 1)
    return codes_at(words, above, PLACE if BITS == 3 else 0, BITS, FLOAT)


@triton.jit
def whole_numbers(value, PLACE: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Turn sums over ``codes_at`` (PLACE 0 where they were alike) into sums over codes."""
    if not FLOAT and BITS < 16:
        undo: tl.constexpr = 16777216.0 / (1 << (BITS * PLACE % 8))
        value *= undo
    return value


@triton.jit
def query_at(q, size, query, real, at, PLACE: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, FLOAT: tl.constexpr):
    """Load the channels of queries that meet one place of words ``at``, divided by ``size``.

    What ``codes_at`` multiplies there is taken off.
    """
    bits: tl.constexpr = 2 if BITS == 3 else BITS
    times: tl.constexpr = 1.0 if FLOAT or BITS == 3 else 1.0 / (1 << (bits * PLACE % 8))
    channel = at * (16 // bits) + PLACE
    value = tl.load(
        q + query[:, None] * DIM + channel[None, :], mask=real[:, None] & (channel < DIM)[None, :], other=0.0
    )
    value = value.to(tl.float32) * (times / size)[:, None]
    return value if FLOAT else value.to(tl.float16)


@triton.jit
def high_bits(place, rows, at, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Load the plane of one of a page of three bits, as int32.

    Bit p of element ``u`` belongs to channel 8 u + p. place: of its bytes.
    """
    row: tl.constexpr = 3 * DIM // 8
    bits = tl.load(place + rows[:, None] * row + DIM // 4 + at[None, :], mask=(at < DIM // 8)[None, :], other=0)
    return bits.to(tl.int32)


@triton.jit
def log_scales(place, slots, group, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """Load a page's value scales and lows ``[BLOCK_M, 64]``, and log2 of each token's greatest scale.

    Scales and lows are those of the group of each row. place: of pairs.
    """
    pair = tl.load(place + slots * GROUPS)
    scale = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    low = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    most = scale
    scale, low = tl.broadcast_to(scale[None, :], (BLOCK_M, SLOTS)), tl.broadcast_to(low[None, :], (BLOCK_M, SLOTS))
    for g in tl.static_range(1, GROUPS):
        pair = tl.load(place + slots * GROUPS + g)
        other = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        most = tl.maximum(most, other)
        scale = tl.where((group == g)[:, None], other[None, :], scale)
        other = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        low = tl.where((group == g)[:, None], other[None, :], low)
    return scale, low, tl.log2(most)


@triton.jit
def lows_of(q, numbers, scales, at, held, head, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Compute ``q . low`` of CHUNK pages: ``[rows, CHUNK]``. scales: of keys, float16."""
    place = (numbers * KV_HEADS + head) * (2 * DIM) + DIM
    low = tl.load(scales + place[:, None] + at[None, :], mask=held[:, None] & (at < DIM)[None, :], other=0.0)
    nothing = tl.zeros((q.shape[0], CHUNK), tl.float32)
    return product(q, tl.trans(low), nothing, PRECISION)


@triton.jit
def chunk_lows(
    q, size, scratch, pages_at, scales, chunk, hi, head, scaling,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``query . low`` of the pages from ``chunk`` on to ``scratch`` ``[CHUNK, rows]``.

    q: queries divided by ``size``.
    """
    rows, at, many = tl.arange(0, q.shape[0]), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    held = chunk + many < hi
    numbers = tl.load(pages_at + chunk + many, mask=held, other=0)
    tl.debug_barrier()  # the chunk before has been read
    lows = lows_of(q, numbers, scales, at, held, head, KV_HEADS, DIM, WIDE, PRECISION)
    tl.store(scratch + many[None, :] * q.shape[0] + rows[:, None], lows * (size * scaling)[:, None])
    tl.debug_barrier()


@triton.jit
def key_scores(
    q, parts, size, lows, keys, base, words, scales, place, scaling,
    DIM: tl.constexpr, WIDE: tl.constexpr, KB: tl.constexpr, KP: tl.constexpr, KW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores ``[rows, 64]`` of the page at ``place``.

    q: whole queries; parts: by ``query_at``, for the KP places of a word; lows: where ``query . low`` of the page lies.
    """
    dtype: tl.constexpr = q.dtype
    FLOAT: tl.constexpr = dtype == tl.float32
    number: tl.constexpr = tl.float32 if FLOAT else tl.float16
    unit: tl.constexpr = 1.0 if FLOAT else 16777216.0  # 2**24
    ROW: tl.constexpr = DIM * KB // 16  # 16-bit words of a token
    slots, at = tl.arange(0, SLOTS), tl.arange(0, KW)
    scores = tl.zeros((q.shape[0], SLOTS), tl.float32)
    if KB == 16:
        stored = tile(pool_at(keys, base, dtype) + place * (SLOTS * DIM), slots, DIM, tl.arange(0, WIDE), DIM, WIDE)
        scores = product(q, tl.trans(stored), scores, PRECISION) * scaling
    else:
        stored = tile(words + place * (SLOTS * ROW), slots, ROW, at, DIM // KP, KW)
        above = stored
        if KB == 3:
            above = high_bits(pool_at(keys, base, tl.uint8) + place * (SLOTS * 2 * ROW), slots, at, DIM, KW)
        for p in tl.static_range(KP):
            scale = tl.load(scales + place * (2 * DIM) + at * KP + p, mask=at < DIM // KP, other=0.0)
            code = tl.trans(codes_at(stored, above, p, KB, FLOAT))
            scores = product(parts[p] * scale.to(number)[None, :], code, scores, PRECISION)
        scores = scores * (size * (scaling * unit))[:, None] + tl.load(lows)[:, None]
    return scores


@triton.jit
def weigh(scores, best, total, lows, pairs, group, dtype: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr):
    """Compute weights of a page's tokens, times the scale of each.

    Returned with them: what older results are multiplied by, and the new maximum, sum of weights and sum of weighted
    lows. pairs: where the page's scales and lows lie.
    """
    if VB == 16:
        new = tl.maximum(best, tl.max(scores, 1))
        factor, weights = tl.exp2(best - new), tl.exp2(scores - new[:, None])
        scaled = weights.to(dtype)
    else:
        scale, low, log = log_scales(pairs, tl.arange(0, SLOTS), group, scores.shape[0], GROUPS)
        new = tl.maximum(best, tl.max(scores + log[None, :], 1))
        factor, weights = tl.exp2(best - new), tl.exp2(scores - new[:, None])
        scaled = (weights * scale).to(tl.float32 if dtype == tl.float32 else tl.float16)
        lows = lows * factor[:, None] + weights * low
    return scaled, factor, new, total * factor[:, None] + weights, lows


@triton.jit
def value_sums(
    scaled, factor, acc, values, base, words, place,
    DIM: tl.constexpr, WIDE: tl.constexpr, VB: tl.constexpr, VP: tl.constexpr, VW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply ``acc`` by ``factor`` and add the codes of the page at ``place`` times ``scaled``.

    A sum ``[rows, VW]`` for each of VP places of a word.
    """
    FLOAT: tl.constexpr = scaled.dtype == tl.float32
    slots, more = tl.arange(0, SLOTS), ()
    if VB == 16:
        dtype: tl.constexpr = scaled.dtype
        stored = tile(pool_at(values, base, dtype) + place * (SLOTS * DIM), slots, DIM, tl.arange(0, WIDE), DIM, WIDE)
        more = more + (product(scaled, stored, acc[0] * factor[:, None], PRECISION),)
    else:
        IN_ORDER: tl.constexpr = VP == 1
        PER: tl.constexpr = 16 // (2 if VB == 3 else VB)  # channels of a word
        WORDS: tl.constexpr = WIDE // PER if IN_ORDER else VW
        ROW: tl.constexpr = DIM * VB // 16
        word = tl.arange(0, WORDS)
        stored = tile(words + place * (SLOTS * ROW), slots, ROW, word, DIM // PER, WORDS)
        above = stored
        if VB == 3:
            above = high_bits(pool_at(values, base, tl.uint8) + place * (SLOTS * 2 * ROW), slots, word, DIM, WORDS)
        for p in tl.static_range(VP):
            code = channels(stored, above, VB, FLOAT) if IN_ORDER else codes_at(stored, above, p, VB, FLOAT)
            more = more + (product(scaled, code, acc[p] * factor[:, None], PRECISION),)
    return more


@triton.jit
def store_sums(
    work, sums, acc, best, total, lows,
    DIM: tl.constexpr, SHARED: tl.constexpr, GQ: tl.constexpr, BLOCK_G: tl.constexpr, WIDE: tl.constexpr,
    VB: tl.constexpr,
    VP: tl.constexpr, VW: tl.constexpr, GROUPS: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store the results of ``packed_part``. A row is written for its own query and group of channels."""
    rows, at = tl.arange(0, best.shape[0]), tl.arange(0, VW)
    query, group = rows % GQ, rows // GQ
    real = (query < SHARED) & (group < GROUPS)
    low = tl.sum(lows, 1)
    for p in tl.static_range(VP):
        channel = at * VP + p
        own = real[:, None] & (channel < DIM)[None, :] & ((channel // (DIM // GROUPS))[None, :] == group[:, None])
        value = whole_numbers(acc[p], p, VB, FLOAT) + low[:, None]
        tl.store(work + query[:, None] * WIDE + channel[None, :], value, mask=own)
    tl.store(sums + query, best, mask=real & (group == 0))
    tl.store(sums + BLOCK_G + query, tl.sum(total, 1), mask=real & (group == 0))


@triton.jit
def packed_part(
    q, base, pages_at, fields, scratch, work, sums, lo, hi, begin, head, scaling,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SHARED: tl.constexpr, GQ: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WIDE: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to packed pages ``lo .. hi`` of a sequence, tokens from ``begin`` on.

    Results (rotated) go to ``work`` ``[BLOCK_G, WIDE]``, the maximum and the sum to ``sums``. q: the first query of the
    head. Keys and values of 16 bits in such pages are read as they are.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    FLOAT: tl.constexpr = dtype == tl.float32
    KP: tl.constexpr = 1 if KB == 16 else 16 // (2 if KB == 3 else KB)
    # values in the order of their channels, unless places are 32 columns wide or more
    VP: tl.constexpr = 1 if VB == 16 or VB < 4 or (VB == 4 and WIDE <= 64) else 16 // VB
    KW: tl.constexpr = WIDE // KP if WIDE // KP > 16 else 16
    VW: tl.constexpr = WIDE // VP if WIDE // VP > 16 else 16
    rows, slots, at, k_at = tl.arange(0, BLOCK_M), tl.arange(0, SLOTS), tl.arange(0, WIDE), tl.arange(0, KW)
    query, group = rows % GQ, rows // GQ
    real = (query < SHARED) & (group < GROUPS)
    whole = tl.load(q + query[:, None] * DIM + at[None, :], mask=real[:, None] & (at < DIM)[None, :], other=0.0)
    size = tl.maximum(tl.max(tl.abs(whole.to(tl.float32)), 1), 1e-30)  # float16 holds what is divided by it
    plain = (whole.to(tl.float32) / size[:, None]).to(tl.float32 if FLOAT else tl.float16)
    parts, acc = (), ()
    for p in tl.static_range(KP if KB < 16 else 0):
        parts = parts + (query_at(q, size, query, real, k_at, p, KB, DIM, FLOAT),)
    for _ in tl.static_range(VP):
        acc = acc + (tl.zeros((BLOCK_M, VW), tl.float32),)
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total, lows = tl.zeros((BLOCK_M, SLOTS), tl.float32), tl.zeros((BLOCK_M, SLOTS), tl.float32)
    keys, values = tl.load(fields), tl.load(fields + 2)
    words, pairs = pool_at(values, base, tl.int16), pool_at(tl.load(fields + 3), base, tl.int32)
    key_words, key_scales = pool_at(keys, base, tl.int16), pool_at(tl.load(fields + 1), base, tl.float16)
    for chunk in range(lo, hi, CHUNK):
        if KB < 16:
            chunk_lows(
                plain, size, scratch, pages_at, key_scales, chunk, hi, head, scaling, KV_HEADS, DIM, WIDE, PRECISION
            )
        for page in tl.range(chunk, tl.minimum(chunk + CHUNK, hi), num_stages=STAGES):
            place = tl.load(pages_at + page).to(tl.int64) * KV_HEADS + head
            scores = key_scores(
                whole, parts, size, scratch + (page - chunk) * BLOCK_M + rows, keys, base, key_words, key_scales,
                place, scaling,
                DIM, WIDE, KB, KP, KW, PRECISION,
            )  # fmt: skip
            scores = tl.where((slots + page * SLOTS >= begin)[None, :], scores, -float("inf"))
            scaled, factor, best, total, lows = weigh(
                scores, best, total, lows, pairs + place * (SLOTS * GROUPS), group, dtype, VB, GROUPS
            )
            acc = value_sums(scaled, factor, acc, values, base, words, place, DIM, WIDE, VB, VP, VW, PRECISION)
    store_sums(work, sums, acc, best, total, lows, DIM, SHARED, GQ, BLOCK_G, WIDE, VB, VP, VW, GROUPS, FLOAT)
