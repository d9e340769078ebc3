"""Codes -> numbers inside Triton kernels: bit tricks in inline PTX, each with a plain twin that gives the same bits.

``ASM`` switches; the interpreter runs the twins, the compile test both.

A 4-bit code becomes a bf16 number by OR-ing it into the mantissa of 128 (0x4300; fp16: 1024, 0x6400). Two codes of neighbouring
words sit in the halves of one register, so one ``lop3`` and one packed addition make two weights; the addition takes
``128 + zero`` away, and nothing is rounded: codes and zeros have at most 5 bits. Plain code costs 5 integer instructions
for two weights where this costs 2, and integer units run at half the rate of the others: at 4.3 TB/s an H200 has time for
about 1.7 integer instructions a weight.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import triton
import triton.language as tl


def _pair(place: int, bf16: bool) -> tl.constexpr:
    """PTX: 16-bit pair $1 of code carriers, pair $2 of minus zeros -> pair $0 of numbers, from nibble ``place``."""
    magic = "0x43004300" if bf16 else "0x64006400"
    shift = f"shr.u32 t, $1, {4 * place};" if place else "mov.b32 t, $1;"
    # sm_80 has no packed bf16 addition: times one, plus
    add = "mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, t, one, $2;" if bf16 else "add.rn.f16x2 $0, t, $2;"
    return tl.constexpr(f"{{ .reg .b32 t, one; {shift} lop3.b32 t, t, 0x000f000f, {magic}, 0xea; {add} }}")


_B0, _B1, _B2, _B3 = (_pair(place, True) for place in range(4))
_H0, _H1, _H2, _H3 = (_pair(place, False) for place in range(4))
# four signed bytes $2 -> two pairs $0, $1: byte ^ 0x80 in the mantissa of 2^23, less 2^23 + 128, rounded in pairs (exactly)
_BYTES = (
    "{ .reg .b32 u, a, b, c, d; .reg .f32 e, f, g, h; xor.b32 u, $2, 0x80808080; "
    "prmt.b32 a, u, 0x4b000000, 0x7440; prmt.b32 b, u, 0x4b000000, 0x7441; "
    "prmt.b32 c, u, 0x4b000000, 0x7442; prmt.b32 d, u, 0x4b000000, 0x7443; "
    "mov.b32 e, a; mov.b32 f, b; mov.b32 g, c; mov.b32 h, d; "
    "sub.rn.f32 e, e, 0f4B000080; sub.rn.f32 f, f, 0f4B000080; sub.rn.f32 g, g, 0f4B000080; sub.rn.f32 h, h, 0f4B000080; "
)
_BYTES_BF16 = tl.constexpr(_BYTES + "cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g; }")
_BYTES_FP16 = tl.constexpr(_BYTES + "cvt.rn.f16x2.f32 $0, f, e; cvt.rn.f16x2.f32 $1, h, g; }")


@triton.jit
def halves(words):
    """int32 words of 8 codes -> their low and high 16 bits, int16: planes 0..3 and 4..7."""
    return words.to(tl.int16), (words >> 16).to(tl.int16)


@triton.jit
def plane(half, minus, PLACE: tl.constexpr, ASM: tl.constexpr):
    """The codes at nibble ``PLACE`` (0..3) of int16 ``half`` less their zeros, in the dtype of ``minus``.

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
def product(left, right, acc, ASM: tl.constexpr):
    """``left @ right + acc``. The twin multiplies in float32, exactly: the interpreter has no bf16 matrix product."""
    if ASM:
        acc = tl.dot(left, right, acc)
    else:
        acc = tl.dot(left.to(tl.float32), right.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def signed_bytes(codes, minus, ASYM: tl.constexpr, ASM: tl.constexpr):
    """int8 less their zeros -> bf16 or fp16, the dtype of ``minus`` (what is added, if ``ASYM``), exactly."""
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
    """``value * scale`` with scale (float32) and product rounded to the dtype of ``value``."""
    if ASM:
        value = value * scale.to(value.dtype)
    else:
        value = (value.to(tl.float32) * scale.to(value.dtype).to(tl.float32)).to(value.dtype)
    return value
