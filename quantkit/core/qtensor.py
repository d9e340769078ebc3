"""The weights that algorithms, formats and kernels exchange.

QuantTensor: integer codes, scales, zero points and their scheme. BlockTensor: raw blocks of a foreign number format.
TableTensor: 4-bit codes that name entries of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.packing import PackedCodes, pack_rows
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A weight of codes and scales; the currency between algorithms, formats and kernels.

    stored: the codes, values in ``0 .. 2**bits - 1``: uint8 ``[out, in]``, or packed as a file holds them
    scales: ``[out, groups]``, float16 or bfloat16, finite and positive; float32 beside floating-point numbers, and
        each of the rows that share a scale has it
    zeros:  int16 ``[out, groups]``, values in ``0 .. 2**bits``; None when symmetric (zero = ``2**(bits-1)``)

    Raises CheckpointError when shapes or dtypes do not fit together.
    """

    stored: Tensor | PackedCodes
    scales: Tensor
    zeros: Tensor | None
    scheme: Scheme

    def __post_init__(self) -> None:
        held = self.stored
        if isinstance(held, PackedCodes):
            if held.bits != self.scheme.bits:
                raise CheckpointError(f"codes are packed in {held.bits} bits, not those of {self.scheme.describe()}")
        elif held.dim() != 2 or held.dtype != torch.uint8:
            raise CheckpointError(f"codes must be uint8 [out, in], not {held.dtype} {list(held.shape)}")
        expected = (self.shape[0], self.scheme.groups(self.shape[1]))
        dtypes = (torch.float16, torch.bfloat16) if self.scheme.number == "integer" else (torch.float32,)
        if tuple(self.scales.shape) != expected or self.scales.dtype not in dtypes:
            raise CheckpointError(
                f"scales are {self.scales.dtype} {list(self.scales.shape)}; {self.scheme.describe()} over "
                f"{list(self.shape)} needs {' or '.join(str(t).removeprefix('torch.') for t in dtypes)}"
                f" {list(expected)}"
            )
        if not bool((torch.isfinite(self.scales) & (self.scales > 0)).all()):
            raise CheckpointError("a scale is not finite and positive: the file is damaged")
        if (self.zeros is None) != self.scheme.symmetric:
            raise CheckpointError(
                f"{self.scheme.describe()}: zeros must be {'absent' if self.scheme.symmetric else 'present'}"
            )
        if self.zeros is not None and (tuple(self.zeros.shape) != expected or self.zeros.dtype != torch.int16):
            raise CheckpointError(
                f"zeros are {self.zeros.dtype} {list(self.zeros.shape)}, expected int16 {list(expected)}"
            )
        if (
            self.zeros is not None
            and self.zeros.numel()
            and (int(self.zeros.min()) < 0 or int(self.zeros.max()) > self.scheme.levels)
        ):
            raise CheckpointError(
                f"zeros run to {int(self.zeros.max())}; {self.scheme.describe()} holds 0 to {self.scheme.levels}"
            )

    @property
    def codes(self) -> Tensor:
        """The codes, uint8 ``[out, in]``; unpacked anew each time where they are held packed."""
        return self.stored.unpack() if isinstance(self.stored, PackedCodes) else self.stored

    @property
    def words(self) -> Tensor:
        """The codes as ``pack_rows`` packs them: int32 ``[out, packed_width]``."""
        held = self.stored
        if isinstance(held, PackedCodes) and held.cols * held.bits % 32 == 0:
            return held.words
        return pack_rows(self.codes, self.scheme.bits)

    def rows(self, which: slice) -> QuantTensor:
        """Some rows, of a weight whose rows have scales of their own."""
        held = self.stored
        stored = PackedCodes(held.words[which], held.bits, held.cols) if isinstance(held, PackedCodes) else held[which]
        return QuantTensor(stored, self.scales[which], None if self.zeros is None else self.zeros[which], self.scheme)

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``"""
        return self.stored.shape[0], self.stored.shape[1]

    @property
    def bits_stored(self) -> int:
        """Bits that codes, scales and zeros take (zeros counted at ``bits`` each, as formats pack them)."""
        if self.scheme.number != "integer":
            each = 8 * self.scheme.stored_scale_dtype.itemsize
            return (
                self.shape[0] * self.shape[1] * self.scheme.bits
                + self.scheme.scales_stored(*self.shape) * each
                + 32 * sum(g is not None for g in (self.scheme.global_scale, self.scheme.input_global_scale))
            )
        zeros = 0 if self.zeros is None else self.zeros.numel() * self.scheme.bits
        return self.shape[0] * self.shape[1] * self.scheme.bits + self.scales.numel() * 16 + zeros

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same numbers on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return QuantTensor(self.stored.to(device), self.scales.to(device), zeros, self.scheme)

    def dequantize(self) -> Tensor:
        """``(code - zero) * scale`` in float32 ``[out, in]``: the one definition; kernels are tested against it."""
        return affine.dequantize(self.codes, self.scales, self.zeros, self.scheme)

    def equal(self, other: QuantTensor) -> bool:
        """True if codes, scales, zeros and scheme are identical."""
        if self.scheme != other.scheme or (self.zeros is None) != (other.zeros is None):
            return False
        same = torch.equal(self.codes, other.codes) and torch.equal(self.scales, other.scales)
        if self.zeros is not None and other.zeros is not None:
            same = same and torch.equal(self.zeros, other.zeros)
        return same


@dataclass(frozen=True, slots=True)
class TableTensor:
    """A weight of 4-bit codes that name entries of a table, times a scale per group of inputs: ``table[code] * scale``.

    codes: uint8 ``[out, in]``, 0 to 15.
    scales: float32 ``[out, groups]``.
    table: float32 ``[16]``.
    group_size: inputs per scale, which divides ``in``, or None for one scale per row.
    """

    codes: Tensor
    scales: Tensor
    table: Tensor
    group_size: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """``(out_features, in_features)``"""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def scheme(self) -> Scheme:
        """How codes and scales lie; what a code means is the table's."""
        return Scheme(4, self.group_size)

    def dequantize(self) -> Tensor:
        """Float32 ``[out, in]``."""
        width = self.scheme.width(self.shape[1])
        return self.table[self.codes.long()] * self.scales.repeat_interleave(width, dim=1)


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A weight in a number format that is not uniform integer (NF4, LLM.int8, K-quants): raw blocks and their kind.

    Evaluated, loaded and verified like any weight; repacking to an integer format is lossy and refused.

    raw: the stored tensors by their local names.
    decode: raw -> float32 ``[out, in]``; it belongs to the format that made this tensor.
    look_up: raw -> the same numbers as a TableTensor, for formats whose blocks are one, else None.
    """

    kind: str
    raw: dict[str, Tensor]
    shape: tuple[int, int]
    bits_stored: int
    decode: Callable[[dict[str, Tensor]], Tensor]
    look_up: Callable[[dict[str, Tensor]], TableTensor] | None = None

    def dequantize(self) -> Tensor:
        """Float32 ``[out, in]``."""
        return self.decode(self.raw)
