"""The weight layout that the Triton kernels read: bricks of 64 rows, made once at load time, in torch alone.

A brick is 64 rows x ``span`` inputs. Its bytes lie together, bricks of the same rows one behind the other, so that a
program that walks along K reads one stream in 16-byte loads::

    bricks   uint8 [row blocks, K bricks, 64 rows, row bytes]

    4 bits   span = 8 * words (words: 16, 32 or 64). Word j of a row (little endian) holds one code of each of 8 planes:
                 bits 31..28 27..24 23..20 19..16 15..12 11..8  7..4   3..0
                 k =  7w+j   6w+j   5w+j   4w+j   3w+j   2w+j   w+j    j          (w = words)
             so plane i of a whole brick is ``(word >> 4i) & 15``, inputs that follow each other: one tile of x, one
             matrix product. Two words of neighbouring j give packed pairs: ``(pair >> 4i) & 0x000f000f | 0x43004300``
             is two bf16 numbers 128 + code (fp16: 0x6400, 1024 + code), and one packed addition takes 128 + zero away,
             exactly.
    8 bits   span = row bytes (32, 64 or 128). Byte k is input k, signed: what int8 matrix units take as it is.

    meta     uint8 [row blocks, groups, record]: scales and zeros of 64 rows and one group
             record = 64 scales of 16 bits, then 64 zeros: uint8 (4 bits), int16 (8 bits), or nothing (symmetric)

Codes of 2 and 3 bits are held in 4, those of 5 to 7 in 8, moved so that the zero of a symmetric scheme is 8 there and 0
here (asymmetric zeros move along): kernels know one constant each. Codes of a table (NF4, FP4) are renamed
(``fp4_tables.ORDERS``), their records are 64 scales of float32, nothing else. Rows are padded to 64 with scale 0, K to
whole bricks with codes at the symmetric zero; kernels read x as 0 there. ``columns`` gives back
``QuantTensor.dequantize`` bit for bit.
"""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from quantkit.core.qtensor import QuantTensor, TableTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.kernels.triton.fp4_tables import ORDERS, RENAMED, VALUES, known_table

ROWS = 64  # rows per brick: the height of one warp group's matrix instruction
DEVICE_SCRATCH = 1 << 26  # weights dequantized at a time on a GPU: 128 MiB in bf16, used again by every layer
WASTE = 0.05  # K may be padded by this much for the sake of wider bricks (128 bytes a row instead of 64)
_turn = threading.Lock()
_scratch: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}


def brick_span(scheme: Scheme, in_features: int) -> int | None:
    """Inputs per brick, or None if groups do not fall on the borders of planes (4 bits) or bricks (8 bits).

    One group over all inputs always fits. The widest brick whose padding stays within ``WASTE``, else the least
    padding.
    """
    width = scheme.width(in_features)
    planes = 8 if scheme.bits <= 4 else 1
    sizes = (64, 32, 16) if scheme.bits <= 4 else (128, 64, 32)
    fits = [size * planes for size in sizes if width == in_features or width % size == 0]
    if not fits:
        return None
    padded = {span: math.ceil(in_features / span) * span for span in fits}
    narrow = [span for span in fits if padded[span] <= in_features * (1 + WASTE)]
    return narrow[0] if narrow else min(fits, key=lambda span: (padded[span], -span))


def triton_fits(scheme: Scheme, in_features: int) -> bool:
    """True if ``TritonWeight`` can hold such a weight."""
    return brick_span(scheme, in_features) is not None


class TritonWeight(PackedWeight):
    """Bricks and their meta records, as drawn above, on any device.

    bricks: uint8 ``[row blocks, K bricks, 64, row bytes]``. meta: uint8 ``[row blocks, groups, record]``. held: 4 or 8
    bits per code. group: inputs per scale, or 0 for one scale over all. flush: planes of a brick that share one scale.
    pair: output rows of the first of two matrices that lie one above the other for an activation (gate, up), else 0.
    table: the name of the table that codes are looked up in (``fp4_tables.VALUES``), or empty: codes are integers.
    """

    layout = "triton"
    bricks: Tensor
    meta: Tensor

    def __init__(self, q: QuantTensor | TableTensor, device: torch.device | None = None, *, pair: int = 0) -> None:
        super().__init__(*q.shape)
        self.table = known_table(q.table) if isinstance(q, TableTensor) else ""
        if isinstance(q, TableTensor) and not self.table:
            raise ValueError("kernels know the tables of NF4 and FP4, not this one")
        span = brick_span(q.scheme, self.in_features)
        if span is None:
            raise ValueError(f"{q.scheme.describe()} over {list(q.shape)}: groups do not fall on the borders of bricks")
        if pair and (pair * 2 != self.out_features or pair % ROWS):
            raise ValueError(
                f"pair={pair}: two matrices of {pair} rows must make {self.out_features}, each a multiple of {ROWS}"
            )
        self.scheme, self.span, self.pair = q.scheme, span, pair
        self.held = 4 if q.scheme.bits <= 4 else 8
        self.groups = q.scheme.groups(self.in_features)
        self.group = 0 if self.groups == 1 else q.scheme.width(self.in_features)
        plane = span // 8 if self.held == 4 else span
        self.flush = math.gcd(self.group // plane, 8) if self.held == 4 else 1  # gcd(0, 8) = 8
        where = device or q.codes.device
        self.register_buffer("bricks", self._lay(q, where))
        self.register_buffer("meta", self._records(q).to(where))

    @property
    def row_blocks(self) -> int:
        return math.ceil(self.out_features / ROWS)

    @property
    def k_bricks(self) -> int:
        return math.ceil(self.in_features / self.span)

    @property
    def shift(self) -> int:
        """The number added to codes and zeros: the symmetric zero becomes 8 in 4 bits and 0 in signed 8 bits."""
        return (8 if self.held == 4 else 0) - self.scheme.midpoint

    @property
    def scales(self) -> Tensor:
        """The first 64 numbers of each record, a view: fp16/bf16 ``[row blocks, groups, record / 2]``.

        With a table float32 ``[row blocks, groups, record / 4]``.
        """
        return self.meta.view(torch.float32 if self.table else self.scheme.torch_scale_dtype)

    @property
    def zeros(self) -> Tensor:
        """The records as zeros are stored: uint8 (4 bits, from entry 128) or int16 (8 bits, from entry 64). A view."""
        return self.meta if self.held == 4 else self.meta.view(torch.int16)

    @property
    def words(self) -> Tensor:
        """The bricks as kernels read them: int32 ``[.., 64, words]`` (4 bits) or int8 ``[.., 64, span]``. A view."""
        return self.bricks.view(torch.int32 if self.held == 4 else torch.int8)

    def row_step(self) -> int:
        return ROWS

    def alone(self) -> AbstractContextManager[object]:
        # threads launch on one stream, so what one dequantizes must meet its product before another overwrites it
        return _turn if self.bricks.is_cuda else nullcontext()

    def slices(self) -> list[tuple[int, int]]:
        if not self.bricks.is_cuda:
            return super().slices()
        rows = max(ROWS, DEVICE_SCRATCH // self.in_features // ROWS * ROWS)
        return [(start, min(start + rows, self.out_features)) for start in range(0, self.out_features, rows)]

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self.bricks.is_cuda:
            from quantkit.runtime.kernels.triton.dequant import dequantize_rows

            out = _device_scratch(self.bricks.device, dtype, (stop - start) * self.in_features)
            return dequantize_rows(self, out.view(stop - start, self.in_features), start=start).T
        return self._floats(torch.arange(start, stop, device=self.bricks.device)).to(dtype).T

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        if self.bricks.is_cuda:
            from quantkit.runtime.kernels.triton.dequant import dequantize_rows

            out = torch.empty(len(index), self.in_features, dtype=dtype, device=index.device)
            return dequantize_rows(self, out, index=index) if len(index) else out
        return self._floats(index).to(dtype)

    def _floats(self, index: Tensor) -> Tensor:
        """Rows of the weight in float32 ``[n, in_features]``.

        ``(code - zero) * scale`` or ``table[code] * scale``, no other rounding.
        """
        block, row = index // ROWS, index % ROWS
        raw = self.bricks[block, :, row]  # [n, K bricks, row bytes]
        if self.held == 4:
            # [n, bricks, 4 * words, 2]: byte b of a word, its two codes
            nibbles = torch.stack([raw & 15, raw >> 4], dim=-1)
            codes = nibbles.unflatten(2, (-1, 4)).flatten(3).transpose(2, 3)  # [n, bricks, 8 planes, words]
        else:
            codes = raw.view(torch.int8)
        codes = codes.flatten(1)[:, : self.in_features]
        records = self.meta[block]  # [n, groups, record]
        lane = row[:, None, None].expand(-1, self.groups, 1)
        scale = records[..., : ROWS * self.scales.itemsize].view(self.scales.dtype).gather(2, lane)[..., 0].float()
        of = torch.arange(self.in_features, device=raw.device) // (self.group or self.in_features)
        if self.table:
            values = torch.tensor(VALUES[self.table], device=raw.device)[list(ORDERS[self.table])]
            numbers: Tensor = values[codes.long()] * scale[:, of]
            return numbers
        zero = torch.full_like(scale, 8.0 if self.held == 4 else 0.0)
        if not self.scheme.symmetric:
            stored = records[..., 2 * ROWS :].contiguous()
            zero = (stored if self.held == 4 else stored.view(torch.int16)).gather(2, lane)[..., 0].float()
        floats: Tensor = (codes.float() - zero[:, of]) * scale[:, of]
        return floats

    def _lay(self, q: QuantTensor | TableTensor, device: torch.device) -> Tensor:
        bits = self.held
        row_bytes = self.span * bits // 8
        bricks = torch.empty(self.row_blocks, self.k_bricks, ROWS, row_bytes, dtype=torch.uint8, device=device)
        step = max(1, (1 << 24) // (ROWS * self.in_features))  # row blocks at a time: temporaries of some 50 MB
        codes = q.codes  # unpacked once, where the file's words are held
        for first in range(0, self.row_blocks, step):
            part = codes[first * ROWS : (first + step) * ROWS].to(device)
            if self.table:
                part = torch.tensor(RENAMED[self.table], dtype=torch.uint8, device=device)[part.long()]
            blocks = math.ceil(len(part) / ROWS)
            shape = (blocks * ROWS, self.k_bricks * self.span)
            padded = torch.full(shape, 8 if bits == 4 else 0, dtype=torch.uint8, device=device)
            padded[: len(part), : self.in_features] = part + (self.shift & 255)  # uint8 wraps: two's complement
            planes = padded.view(blocks, ROWS, self.k_bricks, -1, row_bytes // 4 if bits == 4 else row_bytes)
            planes = planes.permute(0, 2, 1, 3, 4)  # [blocks, bricks, 64, planes, words]
            if bits == 4:  # byte b of a word: plane 2b in its low half, plane 2b + 1 in its high half
                planes = (planes[..., 0::2, :] | planes[..., 1::2, :] << 4).transpose(-1, -2)
            bricks[first : first + blocks] = planes.reshape(blocks, self.k_bricks, ROWS, row_bytes)
        return bricks

    def _records(self, q: QuantTensor | TableTensor) -> Tensor:
        """``[row blocks, groups, record]`` from scales and zeros ``[out, groups]``."""
        pad = self.row_blocks * ROWS - self.out_features

        def blocks(values: Tensor) -> Tensor:
            full = torch.nn.functional.pad(values, (0, 0, 0, pad))
            records: Tensor = full.view(self.row_blocks, ROWS, self.groups).transpose(1, 2).contiguous()
            return records.view(torch.uint8)

        parts = [blocks(q.scales)]
        if isinstance(q, QuantTensor) and q.zeros is not None:
            moved = q.zeros + self.shift
            parts.append(blocks(moved.to(torch.uint8 if self.held == 4 else torch.int16)))
        return torch.cat(parts, dim=-1)


def _device_scratch(device: torch.device, dtype: torch.dtype, count: int) -> Tensor:
    """An uninitialised buffer, valid until the next call for the same stream.

    One buffer per stream, so that order protects it (``alone``).
    """
    key = (device, dtype, torch.cuda.current_stream(device).cuda_stream)
    buffer = _scratch.get(key)
    if buffer is None or buffer.numel() < count:
        with torch.inference_mode(False):
            buffer = _scratch[key] = torch.empty(max(count, DEVICE_SCRATCH), dtype=dtype, device=device)
    return buffer[:count]


def join_rows(parts: list[QuantTensor]) -> QuantTensor:
    """Lay matrices that read the same input one above the other: one scheme, one width. Raises ValueError otherwise."""
    first = parts[0]
    if any(q.scheme != first.scheme or q.shape[1] != first.shape[1] for q in parts):
        raise ValueError("only weights of one scheme and one width can be joined")
    zeros = None if first.zeros is None else torch.cat([q.zeros for q in parts if q.zeros is not None])
    return QuantTensor(torch.cat([q.codes for q in parts]), torch.cat([q.scales for q in parts]), zeros, first.scheme)
