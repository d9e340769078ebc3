"""A packed matrix times many tokens: what reads a prompt. Activations as in ``gemv.py``, and the same error bound.

Threads round the tokens to int16, each its share, and then take tiles of PANEL_ROWS rows from a common counter, so that
a thread whose core is busy with something else takes fewer. Of a tile, each block of columns is unpacked once per
CHUNK tokens into a panel in the first cache (``gemm_ir.py``) and multiplied by all of them; a token's sums stay in the
first cache, too. So no float copy of the weight exists, not even of a slice: the scratch memory is a panel a thread,
and the tokens' integers.

A result does not depend on threads, nor on the other tokens.

Operations of a block of 64 columns, 16 rows and 128 tokens (AVX2): 8,192 products and as many sums of vectors, 1,024
loads that broadcast; 500 to unpack, 1,100 to scale. A processor with two products a cycle multiplies 32 pairs in it:
twice its float32 rate, at no loss but the rounding to int16.
"""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.numba.gemm_ir import PANEL_ROWS, TILE_TOKENS, panel4, panel8, tile
from quantkit.runtime.kernels.numba.gemv import (
    BIAS,
    BLOCKS,
    CODES,
    COLUMNS,
    COUNT,
    FIELDS,
    FIRST,
    INPUT,
    KIND,
    NIBBLES,
    ONE,
    OUT,
    OUT_STRIDE,
    PARTS,
    ROW_BYTES,
    ROWS,
    SCALE_SHIFT,
    SCALE_STRIDE,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    TOKENS,
    ZERO,
    ZERO_MASK,
    ZERO_STRIDE,
    ZEROS,
    F,
    barrier,
    jit,
    quantize_block,
)  # fmt: skip
from quantkit.runtime.kernels.numba.ir import (
    as_float,
    atomic_add,
    load_f32,
    load_i8,
    load_i16,
    load_u16,
    store_f32,
    store_i16,
)  # fmt: skip

JOB_GEMM = 4
SHARED = 7  # field of the job: the counter of tiles, then the rounded tokens
COUNTER_BYTES = 64
CHUNK = 128  # tokens at a time: their columns of a block (64: 16 KB), their sums and a panel fit the first cache
S_SCALES, S_ZEROS, S_PANEL = 0, 4 * PANEL_ROWS, 8 * PANEL_ROWS  # a thread's scratch: scales, zeros, panel, sums
S_SUMS = S_PANEL + 128 * PANEL_ROWS * 2
OWN_BYTES = S_SUMS + CHUNK * PANEL_ROWS * 4  # of a thread


@jit
def padded(tokens):
    """Tokens of a chunk with those that fill its last tile."""
    return (tokens + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS


@jit
def quantize_share(m, job, part, parts):
    """Round this thread's tokens to int16: ``[chunk][block][token][column]``, and behind them their scales.

    Tokens that fill the last tile are zeros.
    """
    size, blocks, tokens, columns = 32 * m[PARTS], m[BLOCKS], job[TOKENS], m[COLUMNS]
    every = tokens // CHUNK * CHUNK + padded(tokens % CHUNK)
    values = job[SHARED] + COUNTER_BYTES
    scales = values + every * blocks * size * 2
    for t in range(every * part // parts, every * (part + 1) // parts):
        chunk = t // CHUNK * CHUNK
        rows = min(CHUNK, every - chunk)
        x = job[INPUT] + t * columns * 4
        for b in range(blocks):
            place = chunk * blocks + b * rows + t - chunk
            count = min(size, columns - b * size) if t < tokens else np.int64(0)
            scale, _ = quantize_block(x + b * size * 4, count, size, values + place * size * 2)
            store_f32(scales, place, scale)


@jit
def unpack_block(m, first, left, b, own):
    """Unpack block ``b`` of rows ``first:first + PANEL_ROWS`` (``left`` of them exist) into a thread's panel."""
    factor = F(2.0**112) if m[SCALE_SHIFT] == 13 else ONE
    for r in range(PANEL_ROWS):
        row = first + min(r, left - 1)
        bits = load_u16(m[SCALES] + row * m[SCALE_STRIDE], b)
        store_f32(own + S_SCALES, r, as_float(np.int32(bits << m[SCALE_SHIFT])) * factor)
        zeros, at = m[ZEROS] + row * m[ZERO_STRIDE], b & m[ZERO_MASK]
        store_i16(own + S_ZEROS, r, load_i8(zeros, at) if m[KIND] == NIBBLES else load_i16(zeros, at))
    wide = 16 if m[KIND] == NIBBLES else 32
    for p in range(m[PARTS]):
        codes = m[CODES] + first * m[ROW_BYTES] + (b * m[PARTS] + p) * wide
        to = own + S_PANEL + p * 16 * PANEL_ROWS * 4
        if m[KIND] == NIBBLES:
            panel4(codes, m[ROW_BYTES], left, own + S_ZEROS, to)
        else:
            panel8(codes, m[ROW_BYTES], left, own + S_ZEROS, to)


@jit
def rows_of_tile(m, job, first, own):
    """Compute rows ``first:first + PANEL_ROWS`` of one matrix for all tokens."""
    size, blocks, tokens = 32 * m[PARTS], m[BLOCKS], job[TOKENS]
    left = min(PANEL_ROWS, m[ROWS] - first)
    every = tokens // CHUNK * CHUNK + padded(tokens % CHUNK)
    values = job[SHARED] + COUNTER_BYTES
    scales = values + every * blocks * size * 2
    sums = own + S_SUMS
    for chunk in range(0, tokens, CHUNK):
        rows = min(CHUNK, every - chunk)
        for i in range(rows * PANEL_ROWS):
            store_f32(sums, i, ZERO)
        for b in range(blocks):
            unpack_block(m, first, left, b, own)
            place = chunk * blocks + b * rows
            for t in range(0, rows, TILE_TOKENS):
                tile(
                    own + S_PANEL, values + (place + t) * size * 2, size * 2, size // 2, own + S_SCALES,
                    scales + (place + t) * 4, sums + t * PANEL_ROWS * 4,
                )  # fmt: skip
        for t in range(min(CHUNK, tokens - chunk)):
            out = m[OUT] + (chunk + t) * m[OUT_STRIDE]
            for r in range(left):
                bias = load_f32(m[BIAS], first + r) if m[BIAS] != 0 else ZERO
                store_f32(out, first + r, load_f32(sums, t * PANEL_ROWS + r) + bias)


@jit
def gemm(job, control, part, parts):
    """Multiply many tokens by the matrices of a job, which have blocks of one size."""
    own = job[SCRATCH] + part * job[SCRATCH_BYTES]
    quantize_share(job[FIRST:], job, part, parts)
    barrier(control, parts)
    for index in range(job[COUNT]):
        m = job[FIRST + index * FIELDS :]
        while True:
            first = atomic_add(job[SHARED] + 8 * index, 1) * PANEL_ROWS
            if first >= m[ROWS]:
                break
            rows_of_tile(m, job, first, own)
