"""Codes to numbers inside Triton kernels: bit tricks in inline PTX, each with a plain twin that gives the same bits.

``ASM`` switches; the interpreter runs the twins, the compile test both.

A 4-bit code becomes a bf16 number by OR-ing it into the mantissa of 128 (0x4300; fp16: 1024, 0x6400). Two codes of
neighbouring words sit in the halves of one register, so one ``lop3`` and one packed addition make two weights; the
addition takes ``128 + zero`` away, and nothing is rounded: codes and zeros have at most 5 bits. Plain code costs 5
integer instructions for two weights where this costs 2, and integer units run at half the rate of the others: at 4.3
TB/s an H200 has time for about 1.7 integer instructions a weight. Numbers of a table (NF4, FP4) cost 2.9
(``fp4_tables.py``), time for two thirds of that bandwidth.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, no-redef"
# (functions under triton.jit are not Python)
from __future__ import annotations

import torch
import triton
import triton.language as tl

from quantkit.runtime.kernels.triton.fp4_tables import UNITS, entries, look_up


def _pair(place: int, bf16: bool) -> tl.constexpr:
    """PTX: 16-bit pair $1 of code carriers, pair $2 of minus zeros -> pair $0 of numbers, from nibble ``place``."""
    magic = "0x43004300" if bf16 else "0x64006400"
    shift = f"shr.u32 t, $1, {4 * place};" if place else "mov.b32 t, $1;"
    # sm_80 has no packed bf16 addition: times one, plus
    add = "mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, t, one, $2;" if bf16 else "add.rn.f16x2 $0, t, $2;"
    return tl.constexpr(f"{{ .reg .b32 t, one; {shift} lop3.b32 t, t, 0x000f000f, {magic}, 0xea; {add} }}")


_B0, _B1, _B2, _B3 = (_pair(place, True) for place in range(4))
_H0, _H1, _H2, _H3 = (_pair(place, False) for place in range(4))
# four signed bytes $2 -> two pairs $0, $1: byte ^ 0x80 in the mantissa of 2^23, less 2^23 + 128, rounded in pairs
# (exactly)
_BYTES = (
    "{ .reg .b32 u, a, b, c, d; .reg .f32 e, f, g, h; xor.b32 u, $2, 0x80808080; prmt.b32 a, u, 0x4b000000, 0x7440;"
    " prmt.b32 b, u, 0x4b000000, 0x7441; prmt.b32 c, u, 0x4b000000, 0x7442; prmt.b32 d, u, 0x4b000000, 0x7443; mov.b32"
    " e, a; mov.b32 f, b; mov.b32 g, c; mov.b32 h, d; sub.rn.f32 e, e, 0f4B000080; sub.rn.f32 f, f, 0f4B000080;"
    " sub.rn.f32 g, g, 0f4B000080; sub.rn.f32 h, h, 0f4B000080; "
)
_BYTES_BF16 = tl.constexpr(_BYTES + "cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g; }")
_BYTES_FP16 = tl.constexpr(_BYTES + "cvt.rn.f16x2.f32 $0, f, e; cvt.rn.f16x2.f32 $1, h, g; }")
_NF4, _NF4_B, _NF4_H = (tl.constexpr(entries("nf4", d)) for d in (torch.float32, torch.bfloat16, torch.float16))
_FP4, _FP4_B, _FP4_H = (tl.constexpr(entries("fp4", d)) for d in (torch.float32, torch.bfloat16, torch.float16))
_LOOK_NF4_B, _LOOK_NF4_H = (tl.constexpr(look_up("nf4", dtype)) for dtype in (torch.bfloat16, torch.float16))
_LOOK_FP4_B, _LOOK_FP4_H = (tl.constexpr(look_up("fp4", dtype)) for dtype in (torch.bfloat16, torch.float16))
_FOUR_BF16, _FOUR_FP16 = tl.constexpr((tl.bfloat16,) * 4), tl.constexpr((tl.float16,) * 4)
_UNIT_NF4_B, _UNIT_NF4_H = (tl.constexpr(1 / UNITS["nf4", dtype]) for dtype in (torch.bfloat16, torch.float16))
_UNIT_FP4_B, _UNIT_FP4_H = (tl.constexpr(1 / UNITS["fp4", dtype]) for dtype in (torch.bfloat16, torch.float16))


@triton.jit
def halves(words):
    """Split int32 words of 8 codes into their low and high 16 bits, int16: planes 0..3 and 4..7."""
    return words.to(tl.int16), (words >> 16).to(tl.int16)


@triton.jit
def plane(half, minus, PLACE: tl.constexpr, ASM: tl.constexpr):
    """Take the codes at nibble ``PLACE`` (0..3) of int16 ``half`` less their zeros, in the dtype of ``minus``.

    minus: ``-(128 + zero)`` in bf16 or ``-(1024 + zero)`` in fp16, of a shape that broadcasts to ``half``'s.
    """
    BF16: tl.constexpr = minus.dtype == tl.bfloat16
    if ASM:
        half, minus = tl.broadcast(half, minus)
        first: tl.constexpr = _B0 if BF16 else _H0
        second: tl.constexpr = _B1 if BF16 else _H1
        third: tl.constexpr = _B2 if BF16 else _H2
        fourth: tl.constexpr = _B3 if BF16 else _H3
        text: tl.constexpr = first if PLACE == 0 else (second if PLACE == 1 else (third if PLACE == 2 else fourth))
        value = tl.inline_asm_elementwise(text, "=r,r,r", [half, minus], dtype=minus.dtype, is_pure=True, pack=2)
    else:
        carrier = ((half >> (4 * PLACE)) & 15) | (0x4300 if BF16 else 0x6400)
        value = carrier.to(tl.int16).to(minus.dtype, bitcast=True)
        value = (value.to(tl.float32) + minus.to(tl.float32)).to(minus.dtype)  # the interpreter adds bf16 as integers
    return value


@triton.jit
def entry(codes, TABLE: tl.constexpr, dtype: tl.constexpr):
    """Look up entries of a table as float32, in plain code: 15 selections.

    bf16, fp16: as ``looked_up`` gives them, times the unit.
    """
    if dtype == tl.float32:
        t: tl.constexpr = _NF4 if TABLE == 1 else _FP4
    elif dtype == tl.bfloat16:
        t: tl.constexpr = _NF4_B if TABLE == 1 else _FP4_B
    else:
        t: tl.constexpr = _NF4_H if TABLE == 1 else _FP4_H
    one, two, four, eight = (codes & 1) != 0, (codes & 2) != 0, (codes & 4) != 0, (codes & 8) != 0
    low = tl.where(
        four,
        tl.where(two, tl.where(one, t[7], t[6]), tl.where(one, t[5], t[4])),
        tl.where(two, tl.where(one, t[3], t[2]), tl.where(one, t[1], t[0])),
    )
    high = tl.where(
        four,
        tl.where(two, tl.where(one, t[15], t[14]), tl.where(one, t[13], t[12])),
        tl.where(two, tl.where(one, t[11], t[10]), tl.where(one, t[9], t[8])),
    )
    return tl.where(eight, high, low)


@triton.jit
def looked_up(half, dtype: tl.constexpr, TABLE: tl.constexpr, ASM: tl.constexpr):
    """Look up the four planes of int16 ``half``: entries of a table times its unit (``per_unit``), in bf16 or fp16."""
    if ASM:
        if dtype == tl.bfloat16:
            text: tl.constexpr = _LOOK_NF4_B if TABLE == 1 else _LOOK_FP4_B
            types: tl.constexpr = _FOUR_BF16
        else:
            text: tl.constexpr = _LOOK_NF4_H if TABLE == 1 else _LOOK_FP4_H
            types: tl.constexpr = _FOUR_FP16
        a, b, c, d = tl.inline_asm_elementwise(text, "=r,=r,=r,=r,r", [half], dtype=types, is_pure=True, pack=2)
    else:
        a = entry(half, TABLE, dtype).to(dtype)
        b = entry(half >> 4, TABLE, dtype).to(dtype)
        c = entry(half >> 8, TABLE, dtype).to(dtype)
        d = entry(half >> 12, TABLE, dtype).to(dtype)
    return a, b, c, d


@triton.jit
def per_unit(TABLE: tl.constexpr, dtype: tl.constexpr):
    """The factor of a scale where numbers come from ``looked_up``."""
    if dtype == tl.bfloat16:
        unit: tl.constexpr = _UNIT_NF4_B if TABLE == 1 else _UNIT_FP4_B
    else:
        unit: tl.constexpr = _UNIT_NF4_H if TABLE == 1 else _UNIT_FP4_H
    return unit


@triton.jit
def product(left, right, acc, ASM: tl.constexpr):
    """Compute ``left @ right + acc``.

    The twin multiplies in float32, exactly: the interpreter has no bf16 matrix product.
    """
    if ASM:
        acc = tl.dot(left, right, acc)
    else:
        acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def signed_bytes(codes, minus, ASYM: tl.constexpr, ASM: tl.constexpr):
    """Turn int8 less their zeros into bf16 or fp16, the dtype of ``minus`` (what is added, if ``ASYM``), exactly."""
    BF16: tl.constexpr = minus.dtype == tl.bfloat16
    if ASM:
        if BF16:
            value = tl.inline_asm_elementwise(_BYTES_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            value = tl.inline_asm_elementwise(_BYTES_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
        if ASYM:
            value += minus
    else:
        value = codes.to(tl.float32)
        if ASYM:
            value += minus.to(tl.float32)
        value = value.to(minus.dtype)
    return value


@triton.jit
def scaled(value, scale, ASM: tl.constexpr):
    """Compute ``value * scale`` with scale (float32) and product rounded to the dtype of ``value``."""
    if ASM:
        value = value * scale.to(value.dtype)
    else:
        value = (value.to(tl.float32) * scale.to(value.dtype).to(tl.float32)).to(value.dtype)
    return value
