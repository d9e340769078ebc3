"""Vector code that numba cannot express: a row times a vector, as LLVM IR built by numba ``@intrinsic`` functions.

Addresses are int64. Vectors have 256 bits; LLVM splits or joins them for other processors. ``pmadd`` is one AVX2
instruction behind the switch ``AVX2``, with a twin of plain IR. Sums have one fixed order, so a result does not depend
on threads.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
AVX2 = bool(_FEATURES.get("avx2"))
F16C = bool(_FEATURES.get("f16c"))
X86 = "x86" in llvm.get_default_triple() or "amd64" in llvm.get_default_triple()

I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)
V16I8, V16I16, V8I16, V8I32, V16I32 = (
    ir.VectorType(I8, 16), ir.VectorType(I16, 16), ir.VectorType(I16, 8), ir.VectorType(I32, 8), ir.VectorType(I32, 16),
)  # fmt: skip
V4F32, V8F32, V8F16 = ir.VectorType(F32, 4), ir.VectorType(F32, 8), ir.VectorType(F16, 8)
V16F32 = ir.VectorType(F32, 16)
# Bytes. Codes are asked for a page before they are read: there a processor's own prefetching stops.
CACHE_LINE, AHEAD = 64, 4096
int64, int32, float32 = types.int64, types.int32, types.float32


def _at(b: Any, address: Any, kind: Any, offset: Any = 0) -> Any:
    """Pointer to ``kind`` at address + offset bytes."""
    if not isinstance(offset, int):
        address = b.add(address, offset)
    elif offset:
        address = b.add(address, ir.Constant(I64, offset))
    return b.inttoptr(address, ir.PointerType(kind))


def _vector(b: Any, address: Any, kind: Any, offset: Any = 0) -> Any:
    return b.load(_at(b, address, kind, offset), align=1)


def _same(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _splat(b: Any, value: Any, kind: Any) -> Any:
    single = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, kind.count), None))


def _lanes(b: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _pmadd(b: Any, x: Any, y: Any) -> Any:
    """int16 x 16 times int16 x 16, neighbours added: int32 x 8."""
    if AVX2:
        name = "llvm.x86.avx2.pmadd.wd"
        return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(V8I32, [V16I16, V16I16]), name), [x, y])
    product = b.mul(b.sext(x, V16I32), b.sext(y, V16I32))
    return b.add(_lanes(b, product, list(range(0, 16, 2))), _lanes(b, product, list(range(1, 16, 2))))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(V8F32, [V8F32] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.fma.v8f32"), [x, y, z])


def _total(b: Any, vector: Any) -> Any:
    """Sum of 8 floats, halves first."""
    four = b.fadd(_lanes(b, vector, [0, 1, 2, 3]), _lanes(b, vector, [4, 5, 6, 7]))
    two = b.fadd(_lanes(b, four, [0, 1]), _lanes(b, four, [2, 3]))
    return b.fadd(b.extract_element(two, ir.Constant(I32, 0)), b.extract_element(two, ir.Constant(I32, 1)))


def _scales(b: Any, address: Any, count: int, shift: Any, factor: Any) -> Any:
    """Load 16-bit scales as floats: ``bits(u16 << shift) * factor``.

    fp16: 13 and 2**112, for positive values; bf16: 16 and 1.
    """
    wide, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
    bits = b.zext(_vector(b, address, ir.VectorType(I16, count)), wide)
    return b.fmul(b.bitcast(b.shl(bits, _splat(b, b.trunc(shift, I32), wide)), floats), _splat(b, factor, floats))


def _neighbours(b: Any, x: Any, y: Any) -> Any:
    """int32 x 8 twice: sums of neighbours, x's and y's taking turns in pairs (``vphaddd``)."""
    even = ir.Constant(V8I32, [0, 2, 8, 10, 4, 6, 12, 14])
    odd = ir.Constant(V8I32, [1, 3, 9, 11, 5, 7, 13, 15])
    return b.add(b.shuffle_vector(x, y, even), b.shuffle_vector(x, y, odd))


def _sums_of_four(b: Any, vectors: list[Any]) -> Any:
    """Four int32 x 8 -> int32 x 4, the sum of each."""
    pairs = [_neighbours(b, vectors[0], vectors[1]), _neighbours(b, vectors[2], vectors[3])]
    both = _neighbours(b, *pairs)
    return b.add(_lanes(b, both, [0, 1, 2, 3]), _lanes(b, both, [4, 5, 6, 7]))


def _prefetch(b: Any, address: Any, size: int) -> None:
    """Ask for the ``size`` bytes that lie AHEAD bytes behind an address; no fault where there is no memory."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
    ask = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    to_read, to_all_caches, data = (ir.Constant(I32, word) for word in (0, 3, 1))
    for line in range(0, size, CACHE_LINE):
        b.call(ask, [_at(b, address, I8, AHEAD + line), to_read, to_all_caches, data])


def _blocks(b: Any, row: Any, at: Any, count: int, parts: int, kind: Any) -> Any:
    """``count`` (4 or 1) blocks of ``32 * parts`` columns from block ``at`` on: float32 x count, scaled.

    The zero point meets the sum of the block's activations in integers, before anything is rounded.
    """
    codes_of, wide, zero_type = kind
    codes, scales, zeros, zero_mask, x, x_scales, x_sums, shift, factor = row
    first, to = (
        b.add(codes, b.mul(at, ir.Constant(I64, parts * wide))),
        b.add(x, b.mul(at, ir.Constant(I64, parts * 64))),
    )
    if count == 4:
        _prefetch(b, first, 4 * parts * wide)
    vectors: list[Any] = []
    for part in range(count * parts):
        c0, c1 = codes_of(b, b.add(first, ir.Constant(I64, part * wide)))
        low, high = _vector(b, to, V16I16, part * 64), _vector(b, to, V16I16, part * 64 + 32)
        dots = b.add(_pmadd(b, c0, low), _pmadd(b, c1, high))
        if part % parts:
            vectors[-1] = b.add(vectors[-1], dots)
        else:
            vectors.append(dots)
    four = [*vectors, *[ir.Constant(V8I32, None)] * (4 - count)]
    sums = _lanes(b, _sums_of_four(b, four), list(range(count)))
    words = ir.VectorType(I32, count)
    zero = _vector(
        b, zeros, ir.VectorType(zero_type, count), b.mul(b.and_(at, zero_mask), ir.Constant(I64, zero_type.width // 8))
    )
    by_four = b.shl(at, ir.Constant(I64, 2))
    shifted = b.mul(b.sext(zero, words), _vector(b, x_sums, words, by_four))
    scale = _scales(b, b.add(scales, b.shl(at, ir.Constant(I64, 1))), count, shift, factor)
    floats = ir.VectorType(F32, count)
    return b.fmul(b.sitofp(b.sub(sums, shifted), floats), b.fmul(scale, _vector(b, x_scales, floats, by_four)))


def _row_dot(codes_of: Any, wide: int, zero_type: Any) -> Any:
    """Build the generator of a row product.

    codes_of(b, address) gives the two int16 x 16 vectors of a 32-block, in the order in which the activations lie; it
    has ``wide`` bytes. Four blocks at a time, then one by one.
    """
    kind = (codes_of, wide, zero_type)

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, scales, zeros, zero_mask, x, x_scales, x_sums, blocks, parts, shift, factor = args
        row = (codes, scales, zeros, zero_mask, x, x_scales, x_sums, shift, factor)
        result = cgutils.alloca_once_value(b, ir.Constant(F32, 0.0))
        quads = b.lshr(blocks, ir.Constant(I64, 2))
        for size in (1, 2, 4):
            with b.if_then(b.icmp_signed("==", parts, ir.Constant(I64, size))):
                acc = cgutils.alloca_once_value(b, ir.Constant(V4F32, None))
                b.store(ir.Constant(V4F32, None), acc)
                with cgutils.for_range(b, quads) as loop:
                    at = b.shl(loop.index, ir.Constant(I64, 2))
                    b.store(b.fadd(b.load(acc), _blocks(b, row, at, 4, size, kind)), acc)
                two = b.fadd(_lanes(b, b.load(acc), [0, 1]), _lanes(b, b.load(acc), [2, 3]))
                b.store(b.fadd(*(b.extract_element(two, ir.Constant(I32, i)) for i in range(2))), result)
                with cgutils.for_range(b, blocks, start=b.shl(quads, ir.Constant(I64, 2))) as loop:
                    sums = _blocks(b, row, loop.index, 1, size, kind)
                    b.store(b.fadd(b.load(result), b.extract_element(sums, ir.Constant(I32, 0))), result)
        return b.load(result)

    return generate


def _nibbles(b: Any, address: Any) -> tuple[Any, Any]:
    both = b.zext(_vector(b, address, V16I8), V16I16)
    return b.and_(both, _same(V16I16, 15)), b.lshr(both, _same(V16I16, 4))


def _bytes(b: Any, address: Any) -> tuple[Any, Any]:
    return b.sext(_vector(b, address, V16I8), V16I16), b.sext(_vector(b, address, V16I8, 16), V16I16)


_ROW = float32(*[int64] * 10, float32)


@intrinsic
def dot4(typing, codes, scales, zeros, zero_mask, x, x_scales, x_sums, blocks, parts, shift, factor):
    """Multiply a row of nibbles (planar in 32: byte j = code j | code j + 16 << 4) by int16 activations -> float32.

    blocks: of ``32 * parts`` columns, each with a scale of its own. zeros: int8, one for each block where zero_mask is
    -1, else four equal ones.
    """
    return _ROW, _row_dot(_nibbles, 16, I8)


@intrinsic
def dot8(typing, codes, scales, zeros, zero_mask, x, x_scales, x_sums, blocks, parts, shift, factor):
    """``dot4`` for a row of signed bytes. zeros: int16."""
    return _ROW, _row_dot(_bytes, 32, I16)


def _widen(nibbles: bool) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, out, blocks, zero, scale = args
        zeros = _splat(b, b.sitofp(zero, F32), V16F32)
        scales = _splat(b, scale, V16F32)
        with cgutils.for_range(b, blocks) as loop:
            first = b.add(codes, b.mul(loop.index, ir.Constant(I64, 16 if nibbles else 32)))
            halves = [_vector(b, first, V16I8)]
            if nibbles:
                halves = [b.and_(halves[0], _same(V16I8, 15)), b.lshr(halves[0], _same(V16I8, 4))]
            else:
                halves.append(_vector(b, first, V16I8, 16))
            for index, half in enumerate(halves):
                wide = b.zext(half, V16I32) if nibbles else b.sext(half, V16I32)
                value = b.fmul(b.fsub(b.sitofp(wide, V16F32), zeros), scales)
                to = b.add(out, b.add(b.shl(loop.index, ir.Constant(I64, 7)), ir.Constant(I64, 64 * index)))
                b.store(value, _at(b, to, V16F32), align=4)
        return context.get_dummy_value()

    return generate


@intrinsic
def widen4(typing, codes, out, blocks, zero, scale):
    """Dequantize ``32 * blocks`` planar nibbles of one group: float32 ``(code - zero) * scale`` at ``out``."""
    return types.void(int64, int64, int64, int32, float32), _widen(True)


@intrinsic
def widen8(typing, codes, out, blocks, zero, scale):
    """``widen4`` for signed bytes."""
    return types.void(int64, int64, int64, int32, float32), _widen(False)


def _as_floats(kind: str, b: Any, address: Any, byte_offset: Any) -> Any:
    """Eight stored weights as float32, exact (not for infinities in fp16)."""
    if kind == "f32":
        return _vector(b, address, V8F32, byte_offset)
    if kind == "f16" and F16C:
        return b.fpext(_vector(b, address, V8F16, byte_offset), V8F32)
    bits = b.zext(_vector(b, address, V8I16, byte_offset), V8I32)
    if kind == "bf16":
        return b.bitcast(b.shl(bits, _same(V8I32, 16)), V8F32)
    magnitude = b.shl(b.and_(bits, _same(V8I32, 0x7FFF)), _same(V8I32, 13))
    sign = b.shl(b.and_(bits, _same(V8I32, 0x8000)), _same(V8I32, 16))
    return b.fmul(b.bitcast(b.or_(magnitude, sign), V8F32), _same(V8F32, 2.0**112))


def _float_dot(kind: str) -> Any:
    size = 4 if kind == "f32" else 2

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        row, x, sixteens = args
        acc0 = cgutils.alloca_once_value(b, ir.Constant(V8F32, None))
        acc1 = cgutils.alloca_once_value(b, ir.Constant(V8F32, None))
        with cgutils.for_range(b, sixteens) as loop:
            at, to = b.mul(loop.index, ir.Constant(I64, 16 * size)), b.shl(loop.index, ir.Constant(I64, 6))
            w0, x0 = _as_floats(kind, b, row, at), _vector(b, x, V8F32, to)
            w1 = _as_floats(kind, b, b.add(row, ir.Constant(I64, 8 * size)), at)
            x1 = _vector(b, b.add(x, ir.Constant(I64, 32)), V8F32, to)
            b.store(_fma(b, w0, x0, b.load(acc0)), acc0)
            b.store(_fma(b, w1, x1, b.load(acc1)), acc1)
        return _total(b, b.fadd(b.load(acc0), b.load(acc1)))

    return generate


@intrinsic
def dot_f32(typing, row, x, sixteens):
    """Multiply ``16 * sixteens`` float32 weights by float32 activations."""
    return float32(int64, int64, int64), _float_dot("f32")


@intrinsic
def dot_bf16(typing, row, x, sixteens):
    """``dot_f32`` for bf16 weights: exact, a bf16 is a float32 with 16 bits cut off."""
    return float32(int64, int64, int64), _float_dot("bf16")


@intrinsic
def dot_f16(typing, row, x, sixteens):
    """``dot_f32`` for fp16 weights."""
    return float32(int64, int64, int64), _float_dot("f16")


def _loader(kind: Any, size: int, result: Any, widen: Any) -> Any:
    @intrinsic
    def load(typing, address, index):
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            value = b.load(_at(b, args[0], kind, b.mul(args[1], ir.Constant(I64, size))), align=size)
            return widen(b, value)

        return result(int64, int64), generate

    return load


def _storer(kind: Any, size: int, given: Any) -> Any:
    @intrinsic
    def store(typing, address, index, value):
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            value = args[2] if kind is F32 or kind is I32 else b.trunc(args[2], kind)
            b.store(value, _at(b, args[0], kind, b.mul(args[1], ir.Constant(I64, size))), align=size)
            return context.get_dummy_value()

        return types.void(int64, int64, given), generate

    return store


load_f32 = _loader(F32, 4, float32, lambda b, v: v)
load_bits = _loader(I32, 4, int32, lambda b, v: v)
load_u8 = _loader(I8, 1, int32, lambda b, v: b.zext(v, I32))
load_i8 = _loader(I8, 1, int32, lambda b, v: b.sext(v, I32))
load_i16 = _loader(I16, 2, int32, lambda b, v: b.sext(v, I32))
load_u16 = _loader(I16, 2, int32, lambda b, v: b.zext(v, I32))
load_i64 = _loader(I64, 8, int64, lambda b, v: v)
store_f32 = _storer(F32, 4, float32)
store_i32 = _storer(I32, 4, int32)
store_u8 = _storer(I8, 1, int32)
store_i16 = _storer(I16, 2, int32)


@intrinsic
def table(typing, address):
    """The int64 fields at an address, as what ``numba.carray`` takes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(types.CPointer(int64)))

    return types.CPointer(int64)(int64), generate


@intrinsic
def as_float(typing, bits):
    """int32 bits -> float32."""
    return float32(int32), lambda context, b, signature, args: b.bitcast(args[0], F32)


@intrinsic
def as_bits(typing, value):
    """float32 -> int32 bits."""
    return int32(float32), lambda context, b, signature, args: b.bitcast(args[0], I32)


@intrinsic
def atomic_add(typing, address, value):
    """Add to the int64 at address; returns what was there."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("add", _at(b, args[0], I64), args[1], "seq_cst")

    return int64(int64, int64), generate


@intrinsic
def atomic_swap(typing, address, value):
    """Store an int64 at address; returns what was there."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.atomic_rmw("xchg", _at(b, args[0], I64), args[1], "seq_cst")

    return int64(int64, int64), generate


@intrinsic
def atomic_load(typing, address):
    """Load the int64 at address."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(_at(b, args[0], I64), "seq_cst", 8)

    return int64(int64), generate


@intrinsic
def relax(typing):
    """Tell the processor that this is a waiting loop."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate
