"""The 4-bit numbers that are looked up (NF4, FP4): their tables, and 8 look-ups in 23 instructions of inline PTX.

``prmt`` picks 4 bytes out of 8 by 4 selectors of 4 bits, which is what a word of codes is. Bit 3 of a selector does not
pick: it replaces the byte by its sign. So ``prmt(A, code) ^ prmt(B, code ^ 8)`` is a table of 16 bytes: one of the two
gives its byte, the other 0x00 or 0xff, which is known from the pair (entry i of A, entry i of B) and is worked into the
tables. That holds if both bytes that entries i and i + 8 stand for have the same top bit. Codes are renamed when a
weight is laid out (``order``) so that it does, for the low and the high bytes of bf16 and fp16 numbers alike.

A table is held times ``unit`` (the scales are divided by it), which costs nothing and is chosen so that the products
lie close to numbers of the dtype: NF4 is off by at most 1.9e-3 in bf16 and 2.1e-4 in fp16 (3.1e-3 and 3.3e-4 without),
FP4 by nothing.

The tables are bitsandbytes' (``functional.py``, ``create_normal_map`` as stored in checkpoints, and ``create_fp4``);
NF4: Dettmers et al., QLoRA (2305.14314), appendix E.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

VALUES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
}  # fmt: skip
UNITS: dict[tuple[str, torch.dtype], float] = {
    ("nf4", torch.bfloat16): 1.641357421875,
    ("nf4", torch.float16): 1.350341796875,
    ("fp4", torch.bfloat16): 1.5,
    ("fp4", torch.float16): 1.5,
}

NUMBERS = {"": 0, "nf4": 1, "fp4": 2}  # as kernels are told which table


def halfwords(kind: str, dtype: torch.dtype) -> list[int]:
    """The 16 bits of each entry times its unit, in bf16 or fp16, in the order of the checkpoint. NF4's zero is -0."""
    scaled = torch.tensor([-0.0 if not v and kind == "nf4" else v for v in VALUES[kind]]) * UNITS[kind, dtype]
    return [bits & 0xFFFF for bits in scaled.to(dtype).view(torch.int16).tolist()]


def _order(kind: str) -> tuple[int, ...]:
    words = list(zip(*(halfwords(kind, dtype) for dtype in (torch.bfloat16, torch.float16)), strict=True))
    tops = [tuple(word & 0x8080 for word in pair) for pair in words]
    low, high, left = [], [], list(range(16))
    while left:
        first = left.pop(0)
        second = next(code for code in left if tops[code] == tops[first])
        left.remove(second)
        low.append(first)
        high.append(second)
    return (*low, *high)


ORDERS = {kind: _order(kind) for kind in VALUES}  # entry -> code of the checkpoint
RENAMED = {kind: tuple(order.index(code) for code in range(16)) for kind, order in ORDERS.items()}


def entries(kind: str, dtype: torch.dtype) -> tuple[float, ...]:
    """The numbers that the kernels multiply by: a table in the order of ``ORDERS``.

    In float32 as it is, else times its unit and rounded.
    """
    table = torch.tensor(VALUES[kind])
    if dtype != torch.float32:
        table = (table * UNITS[kind, dtype]).to(dtype)
    return tuple(table[list(ORDERS[kind])].tolist())


def _registers(values: list[int]) -> list[int]:
    """16 bytes -> the four registers ``A0, A1, B0, B1`` of the look-up drawn above."""
    first, second = values[:8], values[8:]
    assert all((a ^ b) & 0x80 == 0 for a, b in zip(first, second, strict=True))
    second = [b ^ 0xFF if a & 0x80 else b for a, b in zip(first, second, strict=True)]
    return list(struct.unpack("<4I", bytes(first + second)))


def look_up(kind: str, dtype: torch.dtype) -> str:
    """Write the PTX that turns two half words $4 of 4 codes each into pairs $0 to $3 of numbers, a pair per nibble."""
    words = [halfwords(kind, dtype)[code] for code in ORDERS[kind]]
    tables = {"l": _registers([word & 0xFF for word in words]), "h": _registers([word >> 8 for word in words])}
    text = ["{ .reg .b32 r, x, a, b, l0, l1, h0, h1, p, q, s, t;", "mov.b32 r, $4; xor.b32 x, r, 0x88888888;"]
    for half in (0, 1):
        if half:
            text.append("shr.u32 r, r, 16; shr.u32 x, x, 16;")
        for byte, (a0, a1, b0, b1) in tables.items():
            text.append(f"prmt.b32 a, {a0:#010x}, {a1:#010x}, r; prmt.b32 b, {b0:#010x}, {b1:#010x}, x;")
            text.append(f"xor.b32 {byte}{half}, a, b;")
    text.append("prmt.b32 p, l0, h0, 0x5140; prmt.b32 q, l1, h1, 0x5140;")
    text.append("prmt.b32 s, l0, h0, 0x7362; prmt.b32 t, l1, h1, 0x7362;")
    text.append("prmt.b32 $0, p, q, 0x5410; prmt.b32 $1, p, q, 0x7632;")
    text.append("prmt.b32 $2, s, t, 0x5410; prmt.b32 $3, s, t, 0x7632; }")
    return " ".join(text)


def known_table(table: Tensor) -> str:
    """The name of a stored table (float32 ``[16]``): ``nf4`` or ``fp4`` if it is exactly that one, else empty."""
    stored = table.float().cpu().tolist()
    return next((kind for kind, values in VALUES.items() if stored == list(values)), "")
