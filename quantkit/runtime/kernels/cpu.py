"""CPU kernels on torch's packed integer matmuls: few tokens, where reading the weights is what costs.

int4: ``aten::_weight_int4pack_mm_for_cpu`` (torch >= 2.6; x, scales and zeros of one dtype: float32, bf16 or fp16).
int8: ``aten::_weight_int8pack_mm``, one call per group, so that groups, zeros and ragged tails work too.
Codes of 2 and 3 bits are held in 4, those of 5 to 7 bits in 8: torch has no narrower kernel, and unpacking by hand costs
more than the bytes it saves.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.reference import PackedWeight, scratch

INT4_GROUPS = (256, 128, 64, 32)  # group sizes the int4 kernel has


def int4_part(width: int, columns: int) -> int | None:
    """The largest kernel group that divides both a scheme's group width and the number of columns, or None."""
    return next((g for g in INT4_GROUPS if width % g == 0 and columns % g == 0), None)


def int4_splits(scheme: Scheme, in_features: int) -> list[tuple[int, int, int]] | None:
    """Column ranges ``(start, stop, kernel group)``: the whole groups, and a ragged last group; None if one does not fit."""
    width = scheme.width(in_features)
    whole = in_features // width * width
    ranges = [(0, whole, width)] + ([(whole, in_features, in_features - whole)] if whole < in_features else [])
    splits = []
    for start, stop, size in ranges:
        group = int4_part(size, stop - start)
        if group is None:
            return None
        splits.append((start, stop, group))
    return splits


def int4_fits(scheme: Scheme, out_features: int, in_features: int) -> bool:
    """True if ``Int4Weight`` can hold such a weight on this processor."""
    fits = scheme.bits <= 4 and out_features % 16 == 0 and int4_splits(scheme, in_features) is not None
    return fits and _block_layout() is not None


class Int4Weight(PackedWeight):
    """torch's int4 layout, one part for the whole groups and one for a ragged tail.

    packed_i: uint8 ``[out, columns / 2]`` in torch's order (see ``_unpack``). scale_zero_i: ``[groups, out, 2]`` in the
    run-time dtype; the kernel computes ``(code - 8) * scale + zero``, so its zero is ``(8 - ours) * scale``. In
    float32 both products are exact (a code or zero has at most 5 bits, a scale 11), so this layout holds the same weights as
    ``QuantTensor.dequantize``, bit for bit; in bf16 scales and zeros are rounded to 8 bits.
    """

    layout = "int4"

    def __init__(self, q: QuantTensor, dtype: torch.dtype) -> None:
        super().__init__(*q.shape)
        splits = int4_splits(q.scheme, self.in_features)
        if splits is None or not int4_fits(q.scheme, *q.shape):
            raise ValueError(f"{q.scheme.describe()} over {list(q.shape)} does not fit torch's int4 kernel")
        self.splits = splits
        width = q.scheme.width(self.in_features)
        for index, (start, stop, group) in enumerate(splits):
            codes = q.codes[:, start:stop].to(torch.int32).contiguous()
            self.register_buffer(f"packed_{index}", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
            columns = torch.arange(start, stop, group) // width  # the scheme's group of each kernel group
            scale = q.scales[:, columns].float()
            zero = float(q.scheme.midpoint) if q.zeros is None else q.zeros[:, columns].float()
            both = torch.stack([scale, (8 - zero) * scale], dim=-1).transpose(0, 1).contiguous().to(dtype)
            self.register_buffer(f"scale_zero_{index}", both)

    def parts(self) -> list[tuple[int, int, int, Tensor, Tensor]]:
        """``(start, stop, group, packed, scale_zero)`` of each part."""
        return [
            (*split, self.get_buffer(f"packed_{i}"), self.get_buffer(f"scale_zero_{i}"))
            for i, split in enumerate(self.splits)
        ]

    def row_step(self) -> int:
        return 64  # a multiple of every block that torch packs

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        out = scratch((self.in_features, stop - start), dtype)
        for first, last, group, packed, scale_zero in self.parts():
            part = out[first:last]
            _unpack(packed, start, stop, part)
            scale, zero = scale_zero[:, None, start:stop].to(dtype).unbind(-1)
            part.view(-1, group, stop - start).sub_(8).mul_(scale).add_(zero)
        return out


def _unpack(packed: Tensor, start: int, stop: int, out: Tensor) -> None:
    """Codes of rows ``start:stop`` of a packed part into ``out`` ``[columns, stop - start]``.

    torch packs blocks of 32 rows (64 with AVX512), column by column; the ``block / 2`` bytes of a column hold::

        whole block:        byte d = row d (low nibble), row d + block/2 (high nibble)
        last, short block:  byte d = row 2d (low),       row 2d + 1 (high)
    """
    layout = _block_layout()
    assert layout is not None  # int4_fits was true when this weight was packed
    block, paired = layout
    columns, rows = out.shape
    flat = packed.reshape(-1)[start * columns // 2 : stop * columns // 2]
    whole = 0 if paired else rows // block * block
    blocks = flat[: whole * columns // 2].view(-1, columns, block // 2).transpose(0, 1)
    target = out[:, :whole].unflatten(1, (-1, block)) if whole else out[:, :0].reshape(columns, 0, block)
    target[..., : block // 2] = blocks & 15
    target[..., block // 2 :] = blocks >> 4
    for first in range(whole, rows, block):  # at most one short block, unless torch pairs everywhere
        last = min(first + block, rows)
        short = flat[first * columns // 2 : last * columns // 2].view(columns, -1)
        out[:, first:last:2] = short & 15
        out[:, first + 1 : last : 2] = short >> 4


@lru_cache(maxsize=1)
def _block_layout() -> tuple[int, bool] | None:
    """(rows per block, rows always paired) of this processor's int4 packing, found by packing a known matrix.

    None if the packing is of no known kind: the int4 kernel is then left alone, because the large-batch path could not read it.
    """
    codes = torch.randint(0, 16, (208, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    flat = packed.reshape(-1)
    for block, paired in ((32, False), (64, False), (32, True)):
        rows = min(block, 208)
        first = flat[: rows * 32].view(64, rows // 2)
        low, high = (first & 15).T, (first >> 4).T
        read = torch.stack([low, high], 1).flatten(0, 1) if paired else torch.cat([low, high])
        if torch.equal(read.to(torch.int32), codes[:rows]):
            return block, paired
    return None


def linear_int4(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """torch's fused int4 matmul. x: ``[tokens, in]`` of the dtype the weight was packed for.

    Tolerance in float32: weights are exact (above), so only the order of the sum differs from the reference:
    ``|error| <= in_features * 2**-24 * sum |x_i w_i|``.
    """
    assert isinstance(weight, Int4Weight)
    y: Tensor | None = None
    for start, stop, group, packed, scale_zero in weight.parts():
        part = torch.ops.aten._weight_int4pack_mm_for_cpu(x[:, start:stop].contiguous(), packed, group, scale_zero)
        y = part if y is None else y.add_(part)
    assert y is not None
    return y if bias is None else y.add_(bias)


def int8_fits(scheme: Scheme, in_features: int) -> bool:
    """True if ``Int8Weight`` is the layout for such a weight: above 4 bits, and groups long enough for one call each."""
    return scheme.bits > 4 and scheme.width(in_features) >= 32


class Int8Weight(PackedWeight):
    """Signed bytes by group. parts: int8 ``[out, width]``, code - 128 (whole groups in one ``[groups, out, width]`` buffer).

    scale: ``[groups, out]`` in the run-time dtype. shift: ``(128 - zero) * scale`` ``[groups, out]``, or None when it is 0
    everywhere; ``w = byte * scale + shift``, and ``shift`` meets the sum of a group's inputs.
    """

    layout = "int8"
    whole: Tensor
    tail: Tensor | None
    scale: Tensor
    shift: Tensor | None

    def __init__(self, q: QuantTensor, dtype: torch.dtype) -> None:
        super().__init__(*q.shape)
        self.width = q.scheme.width(self.in_features)
        count = self.in_features // self.width
        signed = (q.codes.to(torch.int16) - 128).to(torch.int8)
        whole = signed[:, : count * self.width].unflatten(1, (count, self.width)).transpose(0, 1).contiguous()
        self.register_buffer("whole", whole)
        ragged = count * self.width < self.in_features
        self.register_buffer("tail", signed[:, count * self.width :].contiguous() if ragged else None)
        scale = q.scales.float().T.contiguous()
        zero = float(q.scheme.midpoint) if q.zeros is None else q.zeros.float().T
        shift = (128 - zero) * scale
        self.register_buffer("scale", scale.to(dtype))
        self.register_buffer("shift", shift.to(dtype).contiguous() if bool(shift.any()) else None)

    def parts(self) -> list[tuple[int, int, Tensor]]:
        """``(start, stop, int8 [out, stop - start])`` of each group."""
        found = [(i * self.width, (i + 1) * self.width, part) for i, part in enumerate(self.whole)]
        if self.tail is not None:
            found.append((len(found) * self.width, self.in_features, self.tail))
        return found

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows = scratch((stop - start, self.in_features), dtype)
        for index, (first, last, part) in enumerate(self.parts()):
            target = rows[:, first:last]
            target.copy_(part[start:stop]).mul_(self.scale[index, start:stop, None].to(dtype))
            if self.shift is not None:
                target.add_(self.shift[index, start:stop, None].to(dtype))
        return rows.T


def linear_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """torch's int8 matmul, group by group. x: ``[tokens, in]`` of the dtype the weight was packed for.

    Tolerance in float32: the kernel sums ``x_i * byte_i`` before it scales. Each product and sum rounds at 2**-24; with zeros
    the two sums (bytes up to 128 from 0) may cancel, so the error is bounded by
    ``in_features * 2**-23 * sum |x_i| * 256 * scale``.
    """
    assert isinstance(weight, Int8Weight)
    y: Tensor | None = None
    sums = []
    for index, (start, stop, part) in enumerate(weight.parts()):
        piece = x[:, start:stop].contiguous()
        product = torch.ops.aten._weight_int8pack_mm(piece, part, weight.scale[index])
        y = product if y is None else y.add_(product)
        if weight.shift is not None:
            sums.append(piece.sum(-1))
    assert y is not None
    if weight.shift is not None:
        y = torch.addmm(y, torch.stack(sums, dim=1), weight.shift)
    return y if bias is None else y.add_(bias)
