"""Row products compiled by numba: a packed matrix times one token (or a few), at the speed of the memory.

Extra ``[cpu]``. Imported only where it is used; compiled code is kept on disk by numba (``NUMBA_CACHE_DIR``, else
beside this file).

Activations become int16 for every block of 32 to 128 inputs (``x ~ q * scale``, ``scale = max |x| / 32767``), the
integer product is exact, scale and zero point are applied per block in float32. So a block's rounding is at most
``2**-16 max |x|`` an input: finer than the bf16 that torch's kernels need, for all but the smallest inputs beside a
large one. Weights of 16 or 32 bits meet float32 activations.

Bytes and operations of a row of 4 bits in blocks of 64: 34 to 35 bytes a block; two times (1 load, 1 widening, 1 and, 1
shift, 2 ``pmaddwd``, 2 adds) and about 6 instructions for sums, zero point and scale, which four blocks share, for 128
operations. Floor: the bytes over the memory's bandwidth.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from quantkit.runtime.kernels.numba.ir import (
    as_bits,
    as_float,
    atomic_add,
    atomic_load,
    atomic_swap,
    dot4,
    dot8,
    dot_bf16,
    dot_f16,
    dot_f32,
    load_bits,
    load_f32,
    load_i8,
    load_i16,
    load_u8,
    load_u16,
    relax,
    store_f32,
    store_i16,
    store_i32,
    widen4,
    widen8,
)  # fmt: skip


def jit(function):
    """Compile at first use; keep the code on disk where any place is writable."""
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no place for a cache
        return njit(nogil=True, error_model="numpy")(function)


sched_yield = types.ExternalFunction("sched_yield", types.int32())

F = np.float32
LARGEST, MAGIC, MAGIC_BITS, INFINITE = F(32767.0), F(12582912.0), np.int32(0x4B400000), np.int32(0x7F800000)
NAN, ZERO, ONE, HALF = F(np.nan), F(0.0), F(1.0), F(0.5)
MANTISSA = np.int32(0x7FFFFFFF)
# A matrix in a job: int64 fields.
KIND, ROWS, COLUMNS, ROW_BYTES, CODES, SCALES, SCALE_STRIDE, ZEROS, ZERO_MASK, ZERO_STRIDE = range(10)
BLOCKS, PARTS, SCALE_SHIFT, BIAS, OUT, OUT_STRIDE, FIELDS = 10, 11, 12, 13, 14, 15, 16
FLOAT32, BFLOAT16, FLOAT16, NIBBLES, BYTES = 0, 1, 2, 4, 8
# A job: int64 fields; matrices follow from FIRST on.
JOB, TOKENS, INPUT, SCRATCH, SCRATCH_BYTES, COUNT, FIRST = 0, 1, 2, 3, 4, 5, 8
JOB_LINEAR, JOB_FLOATS = 1, 2
# The control block: int64 fields, each on a cache line of its own.
SEQUENCE, DONE, ARRIVED, GENERATION, JOB_AT, ASLEEP = 0, 64, 128, 192, 256, 320
YIELD_AFTER = 2000


@jit
def quantize_block(x, count, size, q):
    """Round ``count`` float32 at ``x`` to int16 ``[size]`` at ``q``, zeros behind them; return their scale and sum.

    An input that is not finite gives a scale of nan, and so nan in every result.
    """
    most = np.int32(0)
    for i in range(count):
        most = max(most, np.int32(load_bits(x, i) & MANTISSA))
    peak = as_float(most)
    inverse = LARGEST / peak if peak > ZERO else ZERO
    if inverse > F(1e38):  # a block of values so small that their inverse overflows
        inverse = F(1e38)
    total = np.int32(0)
    for i in range(count):
        value = np.int32(as_bits(load_f32(x, i) * inverse + MAGIC) - MAGIC_BITS)
        store_i16(q, i, value)
        total = np.int32(total + value)
    for i in range(count, size):
        store_i16(q, i, np.int32(0))
    scale = ONE / inverse if inverse > ZERO else ZERO
    return scale if most < INFINITE else NAN, total


@jit
def quantize(x, columns, size, blocks, q, scales, sums):
    """Round float32 ``[columns]`` to int16 ``[blocks * size]``, with float32 scales and int32 sums of each block."""
    for block in range(blocks):
        first = block * size
        scale, total = quantize_block(x + first * 4, min(size, columns - first), size, q + first * 2)
        store_f32(scales, block, scale)
        store_i32(sums, block, total)


@jit
def rows_of(m, tokens, x, stride, scratch, start, stop):
    """Compute output rows ``start:stop`` of one matrix for all tokens.

    m: its int64 fields. x: float32, ``stride`` bytes a token. scratch: what ``quantize_tokens`` filled for this matrix.
    """
    kind = m[KIND]
    if kind >= NIBBLES:
        _integer_rows(m, tokens, scratch, start, stop)
    else:
        _float_rows(m, tokens, x, stride, start, stop)


@jit
def quantize_tokens(m, tokens, x, stride, scratch):
    """Quantize activations as a packed matrix takes them; nothing for a matrix of floats."""
    if m[KIND] < NIBBLES:
        return
    size, blocks = 32 * m[PARTS], m[BLOCKS]
    for t in range(tokens):
        scales = scratch + tokens * blocks * size * 2 + t * blocks * 4
        sums = scales + tokens * blocks * 4
        quantize(x + t * stride, m[COLUMNS], size, blocks, scratch + t * blocks * size * 2, scales, sums)


@jit
def _integer_rows(m, tokens, scratch, start, stop):
    blocks, parts, shift = m[BLOCKS], m[PARTS], m[SCALE_SHIFT]
    factor = F(2.0**112) if shift == 13 else ONE
    width = blocks * parts * 64
    x_scales = scratch + tokens * width
    x_sums = x_scales + tokens * blocks * 4
    for row in range(start, stop):
        codes = m[CODES] + row * m[ROW_BYTES]
        scales = m[SCALES] + row * m[SCALE_STRIDE]
        zeros = m[ZEROS] + row * m[ZERO_STRIDE]
        bias = load_f32(m[BIAS], row) if m[BIAS] != 0 else ZERO
        for t in range(tokens):
            q, s, z = scratch + t * width, x_scales + t * blocks * 4, x_sums + t * blocks * 4
            if m[KIND] == NIBBLES:
                value = dot4(codes, scales, zeros, m[ZERO_MASK], q, s, z, blocks, parts, shift, factor)
            else:
                value = dot8(codes, scales, zeros, m[ZERO_MASK], q, s, z, blocks, parts, shift, factor)
            store_f32(m[OUT] + t * m[OUT_STRIDE], row, value + bias)


@jit
def _float_rows(m, tokens, x, stride, start, stop):
    columns = m[COLUMNS]
    sixteens = columns // 16
    for row in range(start, stop):
        weights = m[CODES] + row * m[ROW_BYTES]
        bias = load_f32(m[BIAS], row) if m[BIAS] != 0 else ZERO
        for t in range(tokens):
            at = x + t * stride
            if m[KIND] == BFLOAT16:
                value = dot_bf16(weights, at, sixteens)
            elif m[KIND] == FLOAT16:
                value = dot_f16(weights, at, sixteens)
            else:
                value = dot_f32(weights, at, sixteens)
            for i in range(16 * sixteens, columns):
                value += one_weight(m[KIND], weights, i) * load_f32(at, i)
            store_f32(m[OUT] + t * m[OUT_STRIDE], row, value + bias)


@jit
def one_weight(kind, weights, i):
    """Load a weight of a row of floats, as float32."""
    if kind == FLOAT32:
        return load_f32(weights, i)
    bits = load_u16(weights, i)
    if kind == BFLOAT16:
        return as_float(np.int32(bits << 16))
    magnitude = as_float(np.int32((bits & 0x7FFF) << 13)) * F(2.0**112)
    return -magnitude if bits & 0x8000 else magnitude


@jit
def share(rows, part, parts):
    """The first row of a part.

    Parts are contiguous ranges, multiples of 16, so that two threads never write into one cache line.
    """
    return min(rows, (rows * part // parts + 15) // 16 * 16) if part < parts else rows


@jit
def linear(job, part, parts):
    """Multiply the input by one or more matrices that read it."""
    tokens, x = job[TOKENS], job[INPUT]
    scratch = job[SCRATCH] + part * job[SCRATCH_BYTES]
    for index in range(job[COUNT]):
        m = job[FIRST + index * FIELDS :]
        stride = m[COLUMNS] * 4
        before = job[FIRST + (index - 1) * FIELDS :] if index else m
        if index == 0 or m[PARTS] != before[PARTS] or m[KIND] < NIBBLES or before[KIND] < NIBBLES:
            quantize_tokens(m, tokens, x, stride, scratch)
        rows_of(m, tokens, x, stride, scratch, share(m[ROWS], part, parts), share(m[ROWS], part + 1, parts))


@jit
def floats(job, part, parts):
    """Dequantize rows of one packed matrix, ``(code - zero) * scale``: COUNT rows from row TOKENS on, to INPUT."""
    m = job[FIRST:]
    first, count, out, columns = job[TOKENS], job[COUNT], job[INPUT], m[COLUMNS]
    group = 32 * m[PARTS]
    factor = F(2.0**112) if m[SCALE_SHIFT] == 13 else ONE
    for row in range(count * part // parts, count * (part + 1) // parts):
        codes = m[CODES] + (first + row) * m[ROW_BYTES]
        scales, zeros = m[SCALES] + (first + row) * m[SCALE_STRIDE], m[ZEROS] + (first + row) * m[ZERO_STRIDE]
        to = out + row * columns * 4
        for g in range(m[BLOCKS]):
            first_column = g * group
            scale = as_float(np.int32(load_u16(scales, g) << m[SCALE_SHIFT])) * factor
            at = g & m[ZERO_MASK]
            whole = min(group, columns - first_column) // 32
            start = first_column + 32 * whole  # behind it: less than 32 columns at the end of a row
            if m[KIND] == NIBBLES:
                zero = load_i8(zeros, at)
                widen4(codes + first_column // 2, to + first_column * 4, whole, zero, scale)
                for j in range(min(first_column + group, columns) - start):
                    byte = load_u8(codes, start // 2 + j % 16)
                    store_f32(to, start + j, F((byte & 15 if j < 16 else byte >> 4) - zero) * scale)
            else:
                zero = load_i16(zeros, at)
                widen8(codes + first_column, to + first_column * 4, whole, zero, scale)
                for j in range(start, min(first_column + group, columns)):
                    store_f32(to, j, F(load_i8(codes, j) - zero) * scale)


@jit
def barrier(control, parts):
    """Wait until all parts are here."""
    if parts == 1:
        return
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == parts - 1:
        atomic_swap(control + ARRIVED, 0)
        atomic_add(control + GENERATION, 1)
        return
    spins = 0
    while atomic_load(control + GENERATION) == generation:
        spins += 1
        relax()
        if spins > YIELD_AFTER:  # somebody else has the core of the one we wait for
            sched_yield()
