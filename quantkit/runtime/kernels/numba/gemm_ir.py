"""Vector code of the matrix product (``gemm.py``): panels of unpacked weights, and a tile of tokens times a panel.

A panel holds a block of columns of PANEL_ROWS rows as int16, two neighbouring columns of a row beside each other::

    int16 [columns / 2, PANEL_ROWS, 2]

so one load gives a pair of columns of many rows, one broadcast gives the same pair of a token, and ``pmaddwd`` adds
both products into the lane of each row: no sum across lanes. With VNNI product and sum are one instruction
(``vpdpwssd``), which LLVM makes of the two.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quantkit.runtime.kernels.numba.ir import (
    F32,
    I16,
    I32,
    I64,
    V8I32,
    V16I8,
    V16I16,
    _at,
    _pmadd,
    _same,
    _splat,
    _vector,
    int64,
)

# 512-bit registers where the processor has them, and 32 of them: twice the rows, twice the tokens.
WIDE = bool(llvm.get_host_cpu_features().get("avx512bw"))
PANEL_ROWS = 32 if WIDE else 16
TILE_TOKENS = 8 if WIDE else 4
VECTORS = 2  # a panel's rows in registers


def _transpose(b: Any, rows: list[Any]) -> list[Any]:
    """Eight int32 x 8 -> their transpose, by three rounds of shuffles in pairs."""

    def pick(x: Any, y: Any, lanes: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(V8I32, lanes))

    low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
    singles = [pick(rows[i], rows[i + 1], lanes) for i in (0, 2, 4, 6) for lanes in (low, high)]
    low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
    pairs = [pick(singles[i], singles[i + 2], lanes) for i in (0, 1, 4, 5) for lanes in (low, high)]
    low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    return [pick(pairs[i], pairs[i + 4], low) for i in range(4)] + [
        pick(pairs[i], pairs[i + 4], high) for i in range(4)
    ]


def _panel(nibbles: bool) -> Any:
    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        codes, row_bytes, left, zeros, out = args
        for group in range(0, PANEL_ROWS, 8):
            low: list[Any] = []
            high: list[Any] = []
            for row in range(group, group + 8):
                number = ir.Constant(I64, row)
                last = b.sub(left, ir.Constant(I64, 1))
                inside = b.select(b.icmp_signed("<", number, left), number, last)
                first = b.add(codes, b.mul(inside, row_bytes))
                zero = _splat(b, b.load(_at(b, zeros, I16, 2 * row), align=2), V16I16)
                if nibbles:
                    both = b.zext(_vector(b, first, V16I8), V16I16)
                    halves = b.and_(both, _same(V16I16, 15)), b.lshr(both, _same(V16I16, 4))
                else:
                    halves = b.sext(_vector(b, first, V16I8), V16I16), b.sext(_vector(b, first, V16I8, 16), V16I16)
                for half, into in zip(halves, (low, high), strict=True):
                    into.append(b.bitcast(b.sub(half, zero), V8I32))
            for pair, vector in enumerate(_transpose(b, low) + _transpose(b, high)):
                b.store(vector, _at(b, out, V8I32, (pair * PANEL_ROWS + group) * 4), align=4)
        return context.get_dummy_value()

    return generate


@intrinsic
def panel4(typing, codes, row_bytes, left, zeros, out):
    """Unpack 32 columns of PANEL_ROWS rows of planar nibbles into 16 pairs of a panel at ``out``: int16, code - zero.

    codes: address of the first row's 16 bytes; rows follow after ``row_bytes``. left: rows that there are, 1 or more;
    behind them the last one is repeated. zeros: int16 ``[PANEL_ROWS]``.
    """
    return types.void(int64, int64, int64, int64, int64), _panel(True)


@intrinsic
def panel8(typing, codes, row_bytes, left, zeros, out):
    """``panel4`` for signed bytes, 32 of a row."""
    return types.void(int64, int64, int64, int64, int64), _panel(False)


def _product(b: Any, x: Any, y: Any) -> Any:
    """int16 pairs times int16 pairs, both products added: int32."""
    if not WIDE:
        return _pmadd(b, x, y)
    kind = ir.FunctionType(ir.VectorType(I32, 16), [ir.VectorType(I16, 32)] * 2)
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.pmaddw.d.512"), [x, y])


def _tile(context: Any, b: Any, signature: Any, args: Any) -> Any:
    panel, x, token_bytes, pairs, scales, x_scales, sums = args
    lanes = PANEL_ROWS // VECTORS
    words, halves, floats = ir.VectorType(I32, lanes), ir.VectorType(I16, 2 * lanes), ir.VectorType(F32, lanes)
    cells = [(t, v) for t in range(TILE_TOKENS) for v in range(VECTORS)]
    totals = {cell: cgutils.alloca_once(b, words) for cell in cells}
    for cell in cells:
        b.store(ir.Constant(words, None), totals[cell])
    tokens = [b.add(x, b.mul(token_bytes, ir.Constant(I64, t))) for t in range(TILE_TOKENS)]
    with cgutils.for_range(b, pairs) as loop:
        at = b.add(panel, b.mul(loop.index, ir.Constant(I64, PANEL_ROWS * 4)))
        weights = [_vector(b, at, halves, v * lanes * 4) for v in range(VECTORS)]
        column = b.shl(loop.index, ir.Constant(I64, 2))
        for t in range(TILE_TOKENS):
            pair = b.bitcast(_splat(b, b.load(_at(b, tokens[t], I32, column), align=4), words), halves)
            for v in range(VECTORS):
                total = totals[t, v]
                b.store(b.add(b.load(total), _product(b, weights[v], pair)), total)
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(floats, [floats] * 3), f"llvm.fma.v{lanes}f32")
    for t, v in cells:
        scale = b.fmul(
            _vector(b, scales, floats, v * lanes * 4),
            _splat(b, b.load(_at(b, x_scales, F32, 4 * t), align=4), floats),
        )
        place = _at(b, sums, floats, (t * PANEL_ROWS + v * lanes) * 4)
        whole = b.sitofp(b.load(totals[t, v]), floats)
        b.store(b.call(fma, [whole, scale, b.load(place, align=4)]), place, align=4)
    return context.get_dummy_value()


@intrinsic
def tile(typing, panel, x, token_bytes, pairs, scales, x_scales, sums):
    """Add a block's products of TILE_TOKENS tokens to float32 ``[TILE_TOKENS, PANEL_ROWS]`` at ``sums``.

    x: int16 columns of the first token; tokens follow after ``token_bytes``. pairs: of columns. scales: float32
    ``[PANEL_ROWS]`` of the weights, x_scales: float32 ``[TILE_TOKENS]`` of the activations. Integer sums are exact.
    """
    return types.void(int64, int64, int64, int64, int64, int64, int64), _tile
