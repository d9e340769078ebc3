"""Vector code of attention over pages, as LLVM IR: products with rows, weighted sums, exponentials, codes to floats.

Rows are float32 at ``stride`` bytes from each other: pages as they lie, or decoded ones. The same conventions as
``ir.py``: addresses are int64, vectors have 256 bits, sums have one fixed order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.runtime.kernels.numba.ir import (
    F16C,
    F32,
    I8,
    I16,
    I32,
    I64,
    V4F32,
    V8F32,
    V8I32,
    V16F32,
    V16I16,
    V16I32,
    _as_floats,
    _at,
    _fma,
    _lanes,
    _same,
    _splat,
    _total,
    _vector,
    float32,
    int64,
)

V8I8, V16F16 = ir.VectorType(I8, 8), ir.VectorType(ir.HalfType(), 16)


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


def _sums(b: Any, kind: Any, count: int) -> list[Any]:
    """Registers that add up, at zero."""
    slots = [cgutils.alloca_once(b, kind) for _ in range(count)]
    for slot in slots:
        b.store(ir.Constant(kind, None), slot)
    return slots


def _pairs(b: Any, x: Any, y: Any) -> Any:
    """Sums of neighbours of two float32 x 8, x's and y's taking turns in pairs (``vhaddps``)."""
    even, odd = ir.Constant(V8I32, [0, 2, 8, 10, 4, 6, 12, 14]), ir.Constant(V8I32, [1, 3, 9, 11, 5, 7, 13, 15])
    return b.fadd(b.shuffle_vector(x, y, even), b.shuffle_vector(x, y, odd))


def _four_totals(b: Any, x: list[Any]) -> Any:
    """Four float32 x 8 -> float32 x 4, the sum of each."""
    both = _pairs(b, _pairs(b, x[0], x[1]), _pairs(b, x[2], x[3]))
    return b.fadd(_lanes(b, both, [0, 1, 2, 3]), _lanes(b, both, [4, 5, 6, 7]))


def _dots(heads: int) -> Any:
    """Four rows and up to three heads at a time: twelve sums are what 16 registers hold."""
    chains = 2 if heads == 1 else 1  # four sums alone would wait for each other

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        rows, stride, fours, q, q_stride, sixteens, bias, out, out_stride = args
        with cgutils.for_range(b, fours) as loop:
            first = b.add(rows, b.mul(b.shl(loop.index, _int(2)), stride))
            row = [b.add(first, b.mul(stride, _int(t))) for t in range(4)]
            sums = _sums(b, V8F32, 4 * heads * chains)
            with cgutils.for_range(b, sixteens) as inner:
                for half in range(2):
                    at = b.add(b.shl(inner.index, _int(6)), _int(32 * half))
                    queries = [_vector(b, b.add(q, b.mul(q_stride, _int(h))), V8F32, at) for h in range(heads)]
                    for t in range(4):
                        x = _vector(b, row[t], V8F32, at)
                        for h in range(heads):
                            total = sums[4 * (h + half % chains * heads) + t]
                            b.store(_fma(b, x, queries[h], b.load(total)), total)
            for h in range(heads):
                totals = [b.load(slot) for slot in sums[4 * h : 4 * h + 4]]
                if chains == 2:
                    totals = [b.fadd(a, b.load(slot)) for a, slot in zip(totals, sums[4:], strict=True)]
                scores = b.fadd(_four_totals(b, totals), _splat(b, b.load(_at(b, bias, F32, 4 * h)), V4F32))
                to = b.add(b.add(out, b.mul(out_stride, _int(h))), b.shl(loop.index, _int(4)))
                b.store(scores, _at(b, to, V4F32), align=4)
        return context.get_dummy_value()

    return types.void(*[int64] * 9), generate


@intrinsic
def dots1(typing, rows, stride, fours, q, q_stride, sixteens, bias, out, out_stride):
    """``4 * fours`` rows of ``16 * sixteens`` floats times one head's query, plus its bias -> scores at ``out``."""
    return _dots(1)


@intrinsic
def dots2(typing, rows, stride, fours, q, q_stride, sixteens, bias, out, out_stride):
    """``dots1`` for two heads, queries and scores at their strides, biases side by side."""
    return _dots(2)


@intrinsic
def dots3(typing, rows, stride, fours, q, q_stride, sixteens, bias, out, out_stride):
    """``dots1`` for three heads."""
    return _dots(3)


def _mix(heads: int) -> Any:
    def block(b: Any, args: Any, column: Any, vectors: int) -> None:
        rows, stride, count, w, w_stride, out, out_stride = args
        place = [b.add(b.add(out, b.mul(out_stride, _int(h))), column) for h in range(heads)]
        sums = _sums(b, V8F32, heads * vectors)
        for h in range(heads):
            for v in range(vectors):
                b.store(_vector(b, place[h], V8F32, 32 * v), sums[h * vectors + v])
        first = b.add(rows, column)
        with cgutils.for_range(b, count) as loop:
            row, at = b.add(first, b.mul(loop.index, stride)), b.shl(loop.index, _int(2))
            weights = [b.load(_at(b, b.add(w, b.mul(w_stride, _int(h))), F32, at), align=4) for h in range(heads)]
            each = [_splat(b, weight, V8F32) for weight in weights]
            for v in range(vectors):
                x = _vector(b, row, V8F32, 32 * v)
                for h in range(heads):
                    total = sums[h * vectors + v]
                    b.store(_fma(b, x, each[h], b.load(total)), total)
        for h in range(heads):
            for v in range(vectors):
                b.store(b.load(sums[h * vectors + v]), _at(b, place[h], V8F32, 32 * v), align=4)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        *rest, eights = args
        quads = b.lshr(eights, _int(2))
        with cgutils.for_range(b, quads) as loop:
            block(b, rest, b.shl(loop.index, _int(7)), 4)
        with cgutils.for_range(b, eights, start=b.shl(quads, _int(2))) as loop:
            block(b, rest, b.shl(loop.index, _int(5)), 1)
        return context.get_dummy_value()

    return types.void(*[int64] * 8), generate


@intrinsic
def mix1(typing, rows, stride, count, w, w_stride, out, out_stride, eights):
    """``out[8 * eights] += sum of w[i] * row i`` over ``count`` rows, for one head."""
    return _mix(1)


@intrinsic
def mix2(typing, rows, stride, count, w, w_stride, out, out_stride, eights):
    """``mix1`` for two heads, weights and results at their strides."""
    return _mix(2)


@intrinsic
def mix3(typing, rows, stride, count, w, w_stride, out, out_stride, eights):
    """``mix1`` for three heads."""
    return _mix(3)


@intrinsic
def largest(typing, x, eights):
    """Largest of ``8 * eights`` floats; one that is not a number does not count."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address, eights = args
        most = cgutils.alloca_once_value(b, _vector(b, address, V8F32))
        with cgutils.for_range(b, eights) as loop:
            scores, before = _vector(b, address, V8F32, b.shl(loop.index, _int(5))), b.load(most)
            b.store(b.select(b.fcmp_ordered("<", before, scores), scores, before), most)
        for half in (4, 2, 1):
            before = b.load(most)
            other = _lanes(b, before, [(i + half) % 8 for i in range(8)])
            b.store(b.select(b.fcmp_ordered("<", before, other), other, before), most)
        return b.extract_element(b.load(most), ir.Constant(I32, 0))

    return float32(int64, int64), generate


def _exp(b: Any, x: Any) -> Any:
    """Float32 x 8: ``exponential`` of ``step_fields.py``."""

    def times(a: Any, c: float, d: Any) -> Any:
        return _fma(b, a, _same(V8F32, c), d)

    for limit, sign in ((-87.0, "<"), (88.0, ">")):
        x = b.select(b.fcmp_ordered(sign, x, _same(V8F32, limit)), _same(V8F32, limit), x)
    scaled = times(x, 1.44269504, _same(V8F32, 12582912.0))
    n = b.sub(b.bitcast(scaled, V8I32), _same(V8I32, 0x4B400000))
    whole = b.fsub(scaled, _same(V8F32, 12582912.0))
    r = times(whole, 2.12194440e-4, times(whole, -0.693359375, x))
    p = _same(V8F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(b, p, r, _same(V8F32, c))
    near = _fma(b, b.fmul(p, r), r, b.fadd(r, _same(V8F32, 1.0)))
    return b.fmul(near, b.bitcast(b.shl(b.add(n, _same(V8I32, 127)), _same(V8I32, 23)), V8F32))


@intrinsic
def exponentials(typing, x, eights, most):
    """Replace ``8 * eights`` floats by ``exp(x - most)``; returns their sum. 0 below -87, nan stays nan."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address, eights, most = args
        high, total = _splat(b, most, V8F32), _sums(b, V8F32, 1)[0]
        with cgutils.for_range(b, eights) as loop:
            at = b.shl(loop.index, _int(5))
            powers = _exp(b, b.fsub(_vector(b, address, V8F32, at), high))
            b.store(powers, _at(b, address, V8F32, at), align=4)
            b.store(b.fadd(powers, b.load(total)), total)
        return _total(b, b.load(total))

    return float32(int64, int64, float32), generate


@intrinsic
def fill(typing, x, eights, value):
    """``8 * eights`` floats become ``value``."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        address, eights, value = args
        each = _splat(b, value, V8F32)
        with cgutils.for_range(b, eights) as loop:
            b.store(each, _at(b, address, V8F32, b.shl(loop.index, _int(5))), align=4)
        return context.get_dummy_value()

    return types.void(int64, int64, float32), generate


@intrinsic
def fold(typing, x, scales, lows, out, eights):
    """``out = x * scale`` for ``8 * eights`` floats; returns the sum of ``x * low``."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, scales, lows, out, eights = args
        total = _sums(b, V8F32, 1)[0]
        with cgutils.for_range(b, eights) as loop:
            at = b.shl(loop.index, _int(5))
            given = _vector(b, x, V8F32, at)
            b.store(b.fmul(given, _vector(b, scales, V8F32, at)), _at(b, out, V8F32, at), align=4)
            b.store(_fma(b, given, _vector(b, lows, V8F32, at), b.load(total)), total)
        return _total(b, b.load(total))

    return float32(*[int64] * 5), generate


@intrinsic
def halves(typing, x, out, eights):
    """``8 * eights`` float16 -> float32."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, out, eights = args
        with cgutils.for_range(b, eights) as loop:
            floats = _as_floats("f16", b, x, b.shl(loop.index, _int(4)))
            b.store(floats, _at(b, out, V8F32, b.shl(loop.index, _int(5))), align=4)
        return context.get_dummy_value()

    return types.void(int64, int64, int64), generate


@intrinsic
def apart(typing, x, stride, scales, lows, eights):
    """Split ``8 * eights`` pairs of float16, ``stride`` bytes from each other, into float32 firsts and seconds."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, stride, scales, lows, eights = args
        with cgutils.for_range(b, eights) as loop:
            first = b.add(x, b.mul(b.shl(loop.index, _int(3)), stride))
            words = ir.Constant(V8I32, ir.Undefined)
            for i in range(8):
                word = b.load(_at(b, b.add(first, b.mul(stride, _int(i))), I32), align=4)
                words = b.insert_element(words, word, ir.Constant(I32, i))
            both = _float16(b, b.bitcast(words, V16I16))
            for out, lanes in ((scales, range(0, 16, 2)), (lows, range(1, 16, 2))):
                b.store(_lanes(b, both, list(lanes)), _at(b, out, V8F32, b.shl(loop.index, _int(5))), align=4)
        return context.get_dummy_value()

    return types.void(*[int64] * 5), generate


def _float16(b: Any, bits: Any) -> Any:
    """Float16 as int16 x 16 -> float32 x 16, exact (not for infinities)."""
    if F16C:
        return b.fpext(b.bitcast(bits, V16F16), V16F32)
    wide = b.zext(bits, V16I32)
    magnitude = b.shl(b.and_(wide, _same(V16I32, 0x7FFF)), _same(V16I32, 13))
    sign = b.shl(b.and_(wide, _same(V16I32, 0x8000)), _same(V16I32, 16))
    return b.fmul(b.bitcast(b.or_(magnitude, sign), V16F32), _same(V16F32, 2.0**112))


def _word(b: Any, address: Any, kind: Any = I32) -> Any:
    """A little-endian word in every lane."""
    word = b.load(_at(b, address, kind), align=1)
    return _splat(b, word if kind is I32 else b.zext(word, I32), V8I32)


def _fields(b: Any, word: Any, bits: int, start: int) -> Any:
    """int32 x 8: codes of ``bits`` bits from bit ``start`` on."""
    shifts = ir.Constant(V8I32, [start + bits * i for i in range(8)])
    return b.and_(b.lshr(word, shifts), _same(V8I32, (1 << bits) - 1))


def _sixteen(b: Any, bits: int, row: Any, index: Any, sixteens: Any) -> list[Any]:
    """Codes of 16 channels, two int32 x 8.

    The bits are spread over lanes by shifts of different width, so channels stay in order.
    """
    if bits == 8:
        first = b.add(row, b.shl(index, _int(4)))
        return [b.zext(_vector(b, first, V8I8, 8 * half), V8I32) for half in range(2)]
    if bits == 4:
        first = b.add(row, b.shl(index, _int(3)))
        return [_fields(b, _word(b, b.add(first, _int(4 * half))), 4, 0) for half in range(2)]
    word = _word(b, b.add(row, b.shl(index, _int(2))))
    low = [_fields(b, word, 2, 16 * half) for half in range(2)]
    if bits == 2:
        return low
    plane = b.add(row, b.shl(sixteens, _int(2)))
    high = _word(b, b.add(plane, b.shl(index, _int(1))), I16)
    return [b.or_(x, b.shl(_fields(b, high, 1, 8 * half), _same(V8I32, 2))) for half, x in enumerate(low)]


def _codes(bits: int) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, stride, rows, sixteens, out = args
        with cgutils.for_range(b, rows) as loop:
            row = b.add(codes, b.mul(loop.index, stride))
            to = b.add(out, b.mul(loop.index, b.shl(sixteens, _int(6))))
            with cgutils.for_range(b, sixteens) as inner:
                at = b.shl(inner.index, _int(6))
                for half, integers in enumerate(_sixteen(b, bits, row, inner.index, sixteens)):
                    b.store(b.sitofp(integers, V8F32), _at(b, b.add(to, _int(32 * half)), V8F32, at), align=4)
        return context.get_dummy_value()

    return types.void(*[int64] * 5), generate


@intrinsic
def codes8(typing, codes, stride, rows, sixteens, out):
    """Store rows of 8-bit codes as floats, ``16 * sixteens`` a row, side by side at ``out``."""
    return _codes(8)


@intrinsic
def codes4(typing, codes, stride, rows, sixteens, out):
    """``codes8`` for 4 bits."""
    return _codes(4)


@intrinsic
def codes3(typing, codes, stride, rows, sixteens, out):
    """``codes8`` for 3 bits."""
    return _codes(3)


@intrinsic
def codes2(typing, codes, stride, rows, sixteens, out):
    """``codes8`` for 2 bits."""
    return _codes(2)
