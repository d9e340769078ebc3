"""CPU kernels on torch's packed integer matmuls: few tokens, where reading the weights is what costs.

int4: ``aten::_weight_int4pack_mm_for_cpu``. int8: ``aten::_weight_int8pack_mm``, one call per group, so that groups,
zeros and ragged tails work too. Both are vectorised for bf16 activations only: in float32 and fp16 torch 2.13 runs
scalar code, more than 10 times slower (``activation_dtypes`` in eval/results/cpu_linear.json). So they get bf16 here
whatever the run-time dtype: products and sums are float32 inside, inputs and results are rounded to 8 bits. Many tokens
go through ``columns`` in full precision, and ``quantkit.load(..., kernel="dequantize")`` sends all of them there.

Codes of 2 and 3 bits are held in 4, those of 5 to 7 bits in 8: torch has no narrower kernel, and unpacking by hand
costs more than the bytes it saves.
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
    """Column ranges ``(start, stop, kernel group)``: the whole groups, and a ragged last group.

    None if one does not fit.
    """
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

    packed_i: uint8 ``[out, columns / 2]`` in torch's order (see ``_unpack``). scale_zero_i: bf16 ``[groups, out, 2]``;
    the kernel computes ``(code - 8) * scale + zero``, so its zero is ``(8 - ours) * scale``. scale: as stored,
    ``[groups, out]`` over all columns in kernel groups, and zero: uint8 or None; with these ``columns`` gives back
    ``QuantTensor.dequantize`` bit for bit.
    """

    layout = "int4"
    scale: Tensor
    zero: Tensor | None

    def __init__(self, q: QuantTensor) -> None:
        super().__init__(*q.shape)
        splits = int4_splits(q.scheme, self.in_features)
        if splits is None or not int4_fits(q.scheme, *q.shape):
            raise ValueError(f"{q.scheme.describe()} over {list(q.shape)} does not fit torch's int4 kernel")
        self.splits, self.midpoint = splits, float(q.scheme.midpoint)
        width = q.scheme.width(self.in_features)
        group_of = torch.cat([torch.arange(start, stop, group) // width for start, stop, group in splits])
        self.register_buffer("scale", q.scales[:, group_of].T.contiguous())
        zeros = None if q.zeros is None else q.zeros[:, group_of].T.to(torch.uint8).contiguous()
        self.register_buffer("zero", zeros)
        first = 0
        every = q.codes
        for index, (start, stop, group) in enumerate(splits):
            codes = every[:, start:stop].to(torch.int32).contiguous()
            self.register_buffer(f"packed_{index}", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
            last = first + (stop - start) // group
            scale = self.scale[first:last].float()
            zero = self.midpoint if zeros is None else zeros[first:last].float()
            both = torch.stack([scale, (8 - zero) * scale], dim=-1)
            self.register_buffer(f"scale_zero_{index}", both.to(torch.bfloat16))
            first = last

    def parts(self) -> list[tuple[int, int, int, Tensor, Tensor]]:
        """``(start, stop, group, packed, scale_zero)`` of each part."""
        return [
            (*split, self.get_buffer(f"packed_{i}"), self.get_buffer(f"scale_zero_{i}"))
            for i, split in enumerate(self.splits)
        ]

    def row_step(self) -> int:
        return 64  # a multiple of every block that torch packs

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        out = scratch((self.in_features, stop - start), torch.float32)
        group_row = 0
        for first, last, group, packed, _ in self.parts():
            part = out[first:last]
            part.copy_(_unpack(packed, start, stop, last - first))
            rows = slice(group_row, group_row + (last - first) // group)
            scale = self.scale[rows, None, start:stop].float()
            # code * scale - zero * scale is exact: codes and zeros have at most 5 bits, scales 11, float32 24
            offset = -scale * (self.midpoint if self.zero is None else self.zero[rows, None, start:stop].float())
            grouped = part.view(-1, group, stop - start)
            torch.addcmul(offset, grouped, scale, out=grouped)
            group_row = rows.stop
        return out if dtype == torch.float32 else out.to(dtype)


def _unpack(packed: Tensor, start: int, stop: int, columns: int) -> Tensor:
    """Codes of rows ``start:stop`` of a packed part: uint8 ``[columns, stop - start]``.

    torch packs blocks of 32 rows (64 with AVX512), column by column; the ``block / 2`` bytes of a column hold::

        whole block:        byte d = row d (low nibble), row d + block/2 (high nibble)
        last, short block:  byte d = row 2d (low),       row 2d + 1 (high)
    """
    layout = _block_layout()
    assert layout is not None  # int4_fits was true when this weight was packed
    block, paired = layout
    rows = stop - start
    flat = packed.reshape(-1)[start * columns // 2 : stop * columns // 2]
    whole = 0 if paired else rows // block * block
    blocks = flat[: whole * columns // 2].view(-1, columns, block // 2)
    pieces = [torch.cat([blocks & 15, blocks >> 4], dim=-1).transpose(0, 1).reshape(columns, whole)]
    for first in range(whole, rows, block):  # at most one short block, unless torch pairs everywhere
        last = min(first + block, rows)
        short = flat[first * columns // 2 : last * columns // 2].view(columns, -1)
        pieces.append(torch.stack([short & 15, short >> 4], dim=-1).flatten(1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


@lru_cache(maxsize=1)
def _block_layout() -> tuple[int, bool] | None:
    """(rows per block, rows always paired) of this processor's int4 packing, found by packing a known matrix.

    None if the packing is of no known kind: the int4 kernel is then left alone, because the large-batch path could not
    read it.
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
    """Multiply by torch's fused int4 matmul.

    x: ``[tokens, in]``, rounded to bf16; the result comes back in ``x.dtype``.

    Tolerance: x, the result, the scales and the zeros are rounded to bf16, each by at most 2**-9 of its size; a zero is
    at most 8 steps, so ``|error| <= 2**-9 * sum |x_i| (3 |w_i| + 8 scale_i)``, the float32 sum's 2**-24 not counted.
    Errors of different groups are independent: what is seen is far smaller.
    """
    assert isinstance(weight, Int4Weight)
    low = x.to(torch.bfloat16)
    y: Tensor | None = None
    for start, stop, group, packed, scale_zero in weight.parts():
        part = torch.ops.aten._weight_int4pack_mm_for_cpu(low[:, start:stop].contiguous(), packed, group, scale_zero)
        y = part.to(x.dtype) if y is None else y.add_(part)
    assert y is not None
    return y if bias is None else y.add_(bias)


def int8_fits(scheme: Scheme, out_features: int, in_features: int) -> bool:
    """True if ``Int8Weight`` is the layout for such a weight.

    torch's bf16 kernel reads whole vectors of up to 32 inputs and blocks of 4 rows without looking at the end: other
    sizes read past the buffer (seen: a crash at 30 x 70), so every group, the last one too, must be a multiple.
    """
    width = scheme.width(in_features)
    return scheme.bits > 4 and out_features % 4 == 0 and width % 32 == 0 and in_features % width % 32 == 0


class Int8Weight(PackedWeight):
    """Signed bytes by group: ``w = byte * scale + shift``.

    parts: int8 ``[out, width]``, code - 128 (whole groups in one ``[groups, out, width]`` buffer).
    scale: float32 ``[groups, out]``.
    shift: ``(128 - zero) * scale`` ``[groups, out]``, or None when it is 0 everywhere. It meets the sum of a group's
    inputs.
    one: the scales that torch's kernel asks for in bf16; the real ones are applied afterwards in float32.
    """

    layout = "int8"
    whole: Tensor
    tail: Tensor | None
    scale: Tensor
    shift: Tensor | None
    one: Tensor

    def __init__(self, q: QuantTensor) -> None:
        super().__init__(*q.shape)
        if not int8_fits(q.scheme, *q.shape):
            raise ValueError(f"{q.scheme.describe()} over {list(q.shape)} does not fit torch's int8 kernel")
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
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift.contiguous() if bool(shift.any()) else None)
        self.register_buffer("one", torch.ones(1, dtype=torch.bfloat16).expand(self.out_features).contiguous())

    def parts(self) -> list[tuple[int, int, Tensor]]:
        """``(start, stop, int8 [out, stop - start])`` of each group."""
        columns = [(i * self.width, (i + 1) * self.width, part) for i, part in enumerate(self.whole)]
        if self.tail is not None:
            columns.append((len(columns) * self.width, self.in_features, self.tail))
        return columns

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows = scratch((stop - start, self.in_features), torch.float32)
        for index, (first, last, part) in enumerate(self.parts()):
            target = rows[:, first:last]
            target.copy_(part[start:stop]).mul_(self.scale[index, start:stop, None])
            if self.shift is not None:
                target.add_(self.shift[index, start:stop, None])  # exact, as in Int4Weight
        return rows.T if dtype == torch.float32 else rows.to(dtype).T


def linear_int8(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply by torch's int8 matmul, group by group.

    x: ``[tokens, in]``, rounded to bf16; the result comes back in ``x.dtype``.

    Tolerance: x and each group's sum are rounded to bf16, by 2**-9 of their size, before the scale and the shift are
    applied in float32: ``|error| <= 2**-8 * sum |x_i byte_i| scale_i``, where ``byte * scale`` is the weight less its
    shift. The sums that meet the shift are of the rounded x, so nothing is lost there.
    """
    assert isinstance(weight, Int8Weight)
    low = x.to(torch.bfloat16)
    y = torch.zeros(x.shape[0], weight.out_features, device=x.device)
    sums = []
    for index, (start, stop, part) in enumerate(weight.parts()):
        piece = low[:, start:stop].contiguous()
        y.addcmul_(torch.ops.aten._weight_int8pack_mm(piece, part, weight.one).float(), weight.scale[index])
        if weight.shift is not None:
            sums.append(piece.float().sum(-1))
    if weight.shift is not None:
        y.addmm_(torch.stack(sums, dim=1), weight.shift)
    y = y.to(x.dtype)
    return y if bias is None else y.add_(bias)
