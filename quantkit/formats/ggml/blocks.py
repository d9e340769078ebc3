"""The bytes of ggml's blocks: where codes, scales and minima lie. Nothing is rounded here.

Blocks run along the inputs, one after the other, rows contiguous: a weight ``[out, in]`` is uint8
``[out, in / width * nbytes]``. The layouts, field by field: docs/formats/gguf.md. What the numbers mean:
``quantkit.core.blocks``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.core.blocks import BlockCodes, BlockKind
from quantkit.errors import CheckpointError


def encode(blocks: BlockCodes) -> Tensor:
    """Return the bytes of a weight: uint8 ``[out, row bytes]``."""
    kind, (rows, _) = blocks.kind, blocks.shape
    codes = blocks.codes.reshape(-1, kind.width)
    fields = _FIELDS[kind.name](codes, blocks)
    packed = torch.cat(fields, dim=1)
    return packed.reshape(rows, -1)


def decode(packed: Tensor, kind: BlockKind) -> BlockCodes:
    """Undo ``encode`` exactly.

    packed: uint8 ``[out, row bytes]``.

    Raises CheckpointError if the rows do not end with a block.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 2 or packed.shape[1] % kind.nbytes:
        raise CheckpointError(
            f"{kind.name}: {packed.dtype} {list(packed.shape)} are no rows of blocks of {kind.nbytes} bytes"
        )
    rows = packed.shape[0]
    blocks = packed.reshape(-1, kind.nbytes)
    return _PARTS[kind.name](blocks, kind, rows)


def _half(values: Tensor) -> Tensor:
    """Return the two bytes of each float16: ``[blocks, 2]``."""
    return values.reshape(-1, 1).contiguous().view(torch.uint8)


def _halves(stored: Tensor, rows: int) -> Tensor:
    return stored.contiguous().view(torch.float16).reshape(rows, -1)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack 32 codes into 16 bytes: code j below, code j + 16 above."""
    return (codes[:, :16] & 15) | (codes[:, 16:] << 4)


def _two_nibbles(stored: Tensor) -> Tensor:
    return torch.cat([stored & 15, stored >> 4], dim=1)


def _gather(values: Tensor, parts: int, lanes: int, bits: int) -> Tensor:
    """Pack ``[blocks, 256]``: each stretch of ``parts * lanes`` values into lanes, part j at bit ``bits * j``."""
    grouped = values.reshape(len(values), -1, parts, lanes)
    packed = grouped[:, :, 0].clone()
    for j in range(1, parts):
        packed |= grouped[:, :, j] << (bits * j)
    return packed.reshape(len(values), -1)


def _scatter(stored: Tensor, parts: int, lanes: int, bits: int) -> Tensor:
    """Undo ``_gather``."""
    grouped = stored.reshape(len(stored), -1, 1, lanes)
    shifts = torch.arange(parts, dtype=torch.uint8, device=stored.device)[None, None, :, None] * bits
    return ((grouped >> shifts) & ((1 << bits) - 1)).reshape(len(stored), -1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """Pack the highest bit of 32 codes of 5 bits: 4 bytes, code j at bit j of the little-endian word."""
    return _gather_bits(codes >> 4)


def _gather_bits(bits: Tensor) -> Tensor:
    weights = (1 << torch.arange(8, device=bits.device)).to(torch.uint8)
    return (bits.reshape(len(bits), -1, 8) * weights).sum(-1, dtype=torch.uint8)


def _spread_bits(stored: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=stored.device)
    return ((stored[:, :, None] >> shifts) & 1).reshape(len(stored), -1)


def _per_block(values: Tensor | None, kind: BlockKind) -> Tensor:
    """Return integer scales or minima as int16 ``[blocks, width / sub]``."""
    assert values is not None
    return values.reshape(-1, kind.width // kind.sub)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack 8 scales and 8 minima of 6 bits into 12 bytes, as Q4_K and Q5_K do."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    second = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    third = (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    return torch.cat([first, second, third], dim=1)


def _eight_and_eight(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Undo ``_six_bits``."""
    first, second, third = stored.split(4, dim=1)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.to(torch.int16), minima.to(torch.int16)


def _sixteen_of_six(scales: Tensor) -> Tensor:
    """Pack 16 scales of 6 bits into 12 bytes, as Q3_K does: low nibbles in 8 bytes, high pairs in 4."""
    s = scales.to(torch.uint8)
    low = (s[:, :8] & 15) | ((s[:, 8:] & 15) << 4)
    return torch.cat([low, _gather(s >> 4, 4, 4, 2)], dim=1)


def _from_sixteen_of_six(stored: Tensor) -> Tensor:
    low, high = stored[:, :8], stored[:, 8:]
    return (torch.cat([low & 15, low >> 4], dim=1) | (_scatter(high, 4, 4, 2) << 4)).to(torch.int16)


Fields = Callable[[Tensor, BlockCodes], list[Tensor]]


def _small(codes: Tensor, b: BlockCodes) -> list[Tensor]:
    """Blocks of 32: scale, minimum, fifth bits, nibbles; whichever of them the kind has."""
    fields = [b.d.reshape(-1, 1) if b.kind.exponent else _half(b.d)]
    if b.dmin is not None:
        fields.append(_half(b.dmin))
    if b.kind.bits == 5:
        fields.append(_fifth_bits(codes))
    return [*fields, (codes ^ 128) if b.kind.bits == 8 else _nibbles(codes)]


def _q2_k(codes: Tensor, b: BlockCodes) -> list[Tensor]:
    scales, minima = (_per_block(t, b.kind).to(torch.uint8) for t in (b.scales, b.minima))
    assert b.dmin is not None
    return [scales | (minima << 4), _gather(codes, 4, 32, 2), _half(b.d), _half(b.dmin)]


def _q3_k(codes: Tensor, b: BlockCodes) -> list[Tensor]:
    scales = _sixteen_of_six(_per_block(b.scales, b.kind) + 32)
    return [_gather(codes >> 2, 8, 32, 1), _gather(codes & 3, 4, 32, 2), scales, _half(b.d)]


def _q4_k(codes: Tensor, b: BlockCodes) -> list[Tensor]:
    assert b.dmin is not None
    scales = _six_bits(_per_block(b.scales, b.kind), _per_block(b.minima, b.kind))
    return [_half(b.d), _half(b.dmin), scales, _gather(codes, 2, 32, 4)]


def _q5_k(codes: Tensor, b: BlockCodes) -> list[Tensor]:
    *head, low = _q4_k(codes & 15, b)
    return [*head, _gather(codes >> 4, 8, 32, 1), low]


def _q6_k(codes: Tensor, b: BlockCodes) -> list[Tensor]:
    scales = _per_block(b.scales, b.kind).to(torch.int8).view(torch.uint8)
    return [_gather(codes & 15, 2, 64, 4), _gather(codes >> 4, 4, 32, 2), scales, _half(b.d)]


SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
_FIELDS: dict[str, Fields] = {
    **dict.fromkeys(SMALL, _small),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
Parts = Callable[[Tensor, BlockKind, int], BlockCodes]


def _codes(codes: Tensor, rows: int) -> Tensor:
    return codes.reshape(rows, -1)


def _small_parts(blocks: Tensor, kind: BlockKind, rows: int) -> BlockCodes:
    at = 1 if kind.exponent else 2
    d = blocks[:, :1].reshape(rows, -1) if kind.exponent else _halves(blocks[:, :2], rows)
    dmin = None
    if kind.minima:
        dmin, at = _halves(blocks[:, 2:4], rows), 4
    if kind.bits == 8:
        return BlockCodes(kind, _codes(blocks[:, at:] ^ 128, rows), d)
    codes = _two_nibbles(blocks[:, -16:])
    if kind.bits == 5:
        codes |= _spread_bits(blocks[:, at : at + 4]) << 4
    return BlockCodes(kind, _codes(codes, rows), d, None, dmin)


def _q2_k_parts(blocks: Tensor, kind: BlockKind, rows: int) -> BlockCodes:
    scales, codes, d, dmin = blocks.split([16, 64, 2, 2], dim=1)
    ints = [_codes(part.to(torch.int16), rows) for part in (scales & 15, scales >> 4)]
    return BlockCodes(
        kind, _codes(_scatter(codes, 4, 32, 2), rows), _halves(d, rows), ints[0], _halves(dmin, rows), ints[1]
    )


def _q3_k_parts(blocks: Tensor, kind: BlockKind, rows: int) -> BlockCodes:
    high, low, scales, d = blocks.split([32, 64, 12, 2], dim=1)
    codes = _scatter(low, 4, 32, 2) | (_scatter(high, 8, 32, 1) << 2)
    return BlockCodes(kind, _codes(codes, rows), _halves(d, rows), _codes(_from_sixteen_of_six(scales) - 32, rows))


def _q4_k_parts(blocks: Tensor, kind: BlockKind, rows: int) -> BlockCodes:
    d, dmin, packed, rest = blocks.split([2, 2, 12, kind.nbytes - 16], dim=1)
    scales, minima = (_codes(part, rows) for part in _eight_and_eight(packed))
    codes = _scatter(rest[:, -128:], 2, 32, 4)
    if kind.bits == 5:
        codes |= _scatter(rest[:, :32], 8, 32, 1) << 4
    return BlockCodes(kind, _codes(codes, rows), _halves(d, rows), scales, _halves(dmin, rows), minima)


def _q6_k_parts(blocks: Tensor, kind: BlockKind, rows: int) -> BlockCodes:
    low, high, scales, d = blocks.split([128, 64, 16, 2], dim=1)
    codes = _scatter(low, 2, 64, 4) | (_scatter(high, 4, 32, 2) << 4)
    ints = scales.contiguous().view(torch.int8).to(torch.int16)
    return BlockCodes(kind, _codes(codes, rows), _halves(d, rows), _codes(ints, rows))


_PARTS: dict[str, Parts] = {
    **dict.fromkeys(SMALL, _small_parts),
    "Q2_K": _q2_k_parts, "Q3_K": _q3_k_parts, "Q4_K": _q4_k_parts, "Q5_K": _q4_k_parts, "Q6_K": _q6_k_parts,
}  # fmt: skip
