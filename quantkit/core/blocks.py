"""The block formats of ggml: what kinds there are, and the numbers that codes, scales and minima stand for.

A row is cut into blocks (32 or 256 weights). A block has one scale d, and kinds with minima one factor dmin for those.
In blocks of 256 every 16 or 32 weights have an integer scale and an integer minimum of their own::

    step = d * scale,  low = dmin * minimum           (scale = 1 and minimum = 1 in blocks of 32)
    w    = step * (code - offset)                     kinds without minima: Q4_0, Q5_0, Q8_0, Q3_K, Q6_K
    w    = step * code - low                          kinds with minima: Q4_1, Q5_1 (low = -m), Q2_K, Q4_K, Q5_K
    w    = step * table[code]                         IQ4_NL; MXFP4, whose d is a power of two

Everything is float32, in this order of operations: the result has the bits of ggml's own. Where the bits lie in a file:
``quantkit.formats.ggml.blocks``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RequestError


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One of ggml's block formats.

    name: as ggml has it.
    width, nbytes: weights of a block, and its bytes.
    bits: of a code.
    sub: weights that share an integer scale; ``width`` if there are none.
    offset: what is subtracted from a code; 0 for kinds with minima or a table.
    scale_bits: of the integer scales and minima, 0 without them. signed: scales run below 0, too.
    minima: the kind has minima.
    table: the values of codes, if they are not equidistant.
    exponent: d is a power of two, stored as its exponent in one byte.
    """

    name: str
    width: int
    nbytes: int
    bits: int
    sub: int
    offset: int = 0
    scale_bits: int = 0
    signed: bool = False
    minima: bool = False
    table: tuple[int, ...] | None = None
    exponent: bool = False

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def scale_range(self) -> tuple[int, int]:
        """The smallest and the largest integer scale."""
        half = 1 << (self.scale_bits - 1) if self.scale_bits else 0
        return (-half, half - 1) if self.signed else (0, 2 * half - 1)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a weight, scales counted."""
        return 8 * self.nbytes / self.width

    def row_bytes(self, in_features: int) -> int:
        """Count the bytes of a row, whose length the block must divide."""
        return in_features // self.width * self.nbytes


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
KINDS = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", 32, 18, 4, 32, offset=8),
        BlockKind("Q4_1", 32, 20, 4, 32, minima=True),
        BlockKind("Q5_0", 32, 22, 5, 32, offset=16),
        BlockKind("Q5_1", 32, 24, 5, 32, minima=True),
        BlockKind("Q8_0", 32, 34, 8, 32, offset=128),
        BlockKind("IQ4_NL", 32, 18, 4, 32, table=IQ4_VALUES),
        BlockKind("MXFP4", 32, 17, 4, 32, table=FP4_VALUES, exponent=True),
        BlockKind("Q2_K", 256, 84, 2, 16, scale_bits=4, minima=True),
        BlockKind("Q3_K", 256, 110, 3, 16, offset=4, scale_bits=6, signed=True),
        BlockKind("Q4_K", 256, 144, 4, 32, scale_bits=6, minima=True),
        BlockKind("Q5_K", 256, 176, 5, 32, scale_bits=6, minima=True),
        BlockKind("Q6_K", 256, 210, 6, 16, offset=32, scale_bits=8, signed=True),
    )
}


def block_kind(name: str) -> BlockKind:
    """Return a kind by its name. Raises RequestError for one that does not exist here."""
    if name not in KINDS:
        raise RequestError(f"{name}: no block format of that name is known. There are {', '.join(KINDS)}.")
    return KINDS[name]


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A weight ``[out, in]`` in one of ggml's block formats, its fields apart.

    codes: uint8 ``[out, in]``, 0 to ``kind.top``.
    d: float16 ``[out, in / width]``; uint8 exponents (127 more than they are) for MXFP4.
    scales: int16 ``[out, in / sub]``, None without integer scales.
    dmin: float16, shaped like ``d``; for Q4_1 and Q5_1 the minimum m itself, which is added; None without minima.
    minima: int16, shaped like ``scales``; None without integer minima.

    Raises CheckpointError when shapes or dtypes do not fit together.
    """

    kind: BlockKind
    codes: Tensor
    d: Tensor
    scales: Tensor | None = None
    dmin: Tensor | None = None
    minima: Tensor | None = None

    def __post_init__(self) -> None:
        kind, (rows, width) = self.kind, self.codes.shape
        blocks, subs = (rows, width // kind.width), (rows, width // kind.sub)
        factor = torch.uint8 if kind.exponent else torch.float16
        wanted = {
            "codes": (self.codes, torch.uint8, (rows, blocks[1] * kind.width)),
            "d": (self.d, factor, blocks),
            "scales": (self.scales, torch.int16, subs if kind.scale_bits else None),
            "dmin": (self.dmin, torch.float16, blocks if kind.minima else None),
            "minima": (self.minima, torch.int16, subs if kind.minima and kind.scale_bits else None),
        }
        for name, (value, dtype, shape) in wanted.items():
            found = None if value is None else (value.dtype, tuple(value.shape))
            if found != (None if shape is None else (dtype, shape)):
                raise CheckpointError(f"{kind.name}: {name} is {found}, expected {dtype} {shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``"""
        return self.codes.shape[0], self.codes.shape[1]

    def steps(self) -> Tensor:
        """Return the distance between neighbouring codes, float32 ``[out, in / sub]``."""
        d = exponents(self.d) if self.kind.exponent else self.d.float()
        return d if self.scales is None else _each(d, self.scales) * self.scales.float()

    def lows(self) -> Tensor | None:
        """Return what is subtracted, float32 ``[out, in / sub]``; None for kinds without minima."""
        if self.dmin is None:
            return None
        return -self.dmin.float() if self.minima is None else _each(self.dmin.float(), self.minima) * self.minima

    def dequantize(self) -> Tensor:
        """Return the numbers, float32 ``[out, in]``: the one definition."""
        steps, lows = self.steps(), self.lows()
        if self.kind.table is not None:
            levels = torch.tensor(self.kind.table, dtype=torch.float32, device=self.codes.device)[self.codes.long()]
        else:
            levels = self.codes.float() - self.kind.offset
        values = _each(steps, levels) * levels
        return values if lows is None else values - _each(lows, levels)

    def to(self, device: torch.device | str) -> BlockCodes:
        """Return the same numbers on a device."""
        return combined([self], lambda value: value.to(device))

    def rows(self, part: slice) -> BlockCodes:
        """Return some rows."""
        return combined([self], lambda value: value[part])


def combined(parts: Sequence[BlockCodes], how: Callable[..., Tensor]) -> BlockCodes:
    """Return one weight of several of one kind: every field by ``how`` from theirs."""

    def field(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else how(*values)

    codes, d = how(*(part.codes for part in parts)), how(*(part.d for part in parts))
    return BlockCodes(parts[0].kind, codes, d, field("scales"), field("dmin"), field("minima"))


def exponents(stored: Tensor) -> Tensor:
    """Return half of the powers of two that E8M0 bytes stand for, float32: ggml's table holds doubled values."""
    powers = stored.to(torch.int32)
    normal, below = (powers - 1) << 23, (1 << 21) << powers.clamp(max=1)  # the two smallest are no normal numbers
    return torch.where(powers < 2, below, normal).view(torch.float32)


def _each(values: Tensor, finer: Tensor) -> Tensor:
    """Repeat values per block to the width of a finer tensor."""
    return values.repeat_interleave(finer.shape[1] // max(values.shape[1], 1), dim=1)
