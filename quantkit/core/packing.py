"""Pack codes into int32 words and back. Pure functions; one dense little-endian bit stream per row.

Field i of a row occupies bits ``i*bits .. i*bits + bits - 1`` of the stream; word w holds stream bits
``32*w .. 32*w + 31``, lowest bit first::

    bits=4   word 0 = c7 c6 c5 c4 c3 c2 c1 c0                  (c0 = least significant nibble)
    bits=3   word 0 = c10[1:0] c9 c8 ... c1 c0                 word 1 starts with c10[2]
             (32 codes fill exactly 3 words: the layout of GPTQ and of dense compressed-tensors)

Rows need not divide: the last word is filled with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 16  # codes that are packed or unpacked at one time: what is in between fits the second cache
CHUNK_GPU = 1 << 22  # there launches cost, not caches


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Codes as ``pack_rows`` leaves them, for readers that take words as they lie in a file.

    words: int32 ``[rows, packed_width(cols, bits)]``.
    bits: of a code.
    cols: codes of a row.

    Raises ValueError for words of another shape or dtype.
    """

    words: Tensor
    bits: int
    cols: int

    def __post_init__(self) -> None:
        _check_words(self.words, self.bits, self.cols)

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, cols)``"""
        return self.words.shape[0], self.cols

    def unpack(self) -> Tensor:
        """Return the codes, uint8 ``[rows, cols]``."""
        return unpack_rows(self.words, self.bits, self.cols)

    def to(self, device: torch.device | str) -> PackedCodes:
        """The same words on a device."""
        return PackedCodes(self.words.to(device), self.bits, self.cols)


def packed_width(cols: int, bits: int) -> int:
    """Count the int32 words that ``cols`` codes of ``bits`` bits take: ``ceil(cols * bits / 32)``."""
    return -(-cols * bits // 32)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` [rows, cols] (any integer dtype, 0 .. 2**bits - 1) along cols into int32 [rows, packed_width].

    ``unpack_rows(words, bits, cols)`` undoes it. Raises ValueError for codes outside the range.

    >>> hex(pack_rows(torch.arange(8)[None], 4).item())
    '0x76543210'
    """
    _check(codes, bits)
    rows, cols = codes.shape
    step = max(1, (CHUNK if codes.device.type == "cpu" else CHUNK_GPU) // max(cols, 1))
    if rows > step:  # rows are independent; the temporaries are 8 to 16 times larger than the codes
        return torch.cat([pack_rows(part, bits) for part in codes.split(step)])
    if 32 % bits == 0:
        return _pack_aligned(codes, bits)
    blocks = -(-cols // 32)  # 32 codes fill exactly `bits` words
    padded = torch.zeros(rows, blocks * 32, dtype=torch.int64, device=codes.device)
    padded[:, :cols] = codes
    fields = padded.reshape(rows, blocks, 32)
    words = torch.zeros(rows, blocks, bits + 1, dtype=torch.int64, device=codes.device)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        shifted = fields[:, :, i] << shift
        words[:, :, word] |= shifted & 0xFFFFFFFF
        words[:, :, word + 1] |= shifted >> 32
    return _to_int32(words[:, :, :bits].reshape(rows, blocks * bits)[:, : packed_width(cols, bits)])


def unpack_rows(words: Tensor, bits: int, cols: int) -> Tensor:
    """Undo ``pack_rows``: int32 [rows, packed_width] -> uint8 [rows, cols]. Raises ValueError for a wrong width."""
    _check_words(words, bits, cols)
    rows = words.shape[0]
    step = max(1, (CHUNK if words.device.type == "cpu" else CHUNK_GPU) // max(cols, 1))
    if rows > step:
        return torch.cat([unpack_rows(part, bits, cols) for part in words.split(step)])
    mask = (1 << bits) - 1
    if bits in (4, 8):
        # int32 is little-endian on every platform that torch has wheels for
        # as one row: a tensor with one column may keep any stride there, contiguous or not
        pairs = words.reshape(-1).view(torch.uint8).reshape(rows, 4 * words.shape[1])
        fields = pairs if bits == 8 else _nibbles(pairs)
        return fields[:, :cols].contiguous()
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        fields = (words.unsqueeze(-1) >> shifts) & mask  # the arithmetic shift's sign bits are masked away
        return fields.to(torch.uint8).flatten(1)[:, :cols].contiguous()
    blocks = -(-cols // 32)
    stream = torch.zeros(rows, blocks * bits, dtype=torch.int64, device=words.device)
    stream[:, : words.shape[1]] = words.to(torch.int64) & 0xFFFFFFFF
    stream = stream.reshape(rows, blocks, bits)
    out = torch.empty(rows, blocks, 32, dtype=torch.uint8, device=words.device)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        field = stream[:, :, word] >> shift
        if shift + bits > 32:
            field = field | (stream[:, :, word + 1] << (32 - shift))
        out[:, :, i] = (field & mask).to(torch.uint8)
    return out.flatten(1)[:, :cols].contiguous()


def _check_words(words: Tensor, bits: int, cols: int) -> None:
    if words.dtype != torch.int32 or words.dim() != 2 or words.shape[1] != packed_width(cols, bits):
        raise ValueError(
            f"{cols} codes of {bits} bits need int32 [rows, {packed_width(cols, bits)}], got {words.dtype}"
            f" {list(words.shape)}"
        )


def _nibbles(pairs: Tensor) -> Tensor:
    """Split bytes into their low and high halves, in this order: uint8 [rows, n] -> uint8 [rows, 2 n].

    Both halves of a byte become one 16-bit number: operations on whole rows, which vectorise, unlike a stack.
    """
    wide = pairs.to(torch.int16)
    return torch.bitwise_or(wide & 15, (wide << 4) & 0xF00).view(torch.uint8)


def _pack_aligned(codes: Tensor, bits: int) -> Tensor:
    rows, cols = codes.shape
    per_word, width = 32 // bits, packed_width(cols, bits)
    if bits in (4, 8):
        fields = torch.zeros(rows, width * per_word, dtype=torch.uint8, device=codes.device)
        fields[:, :cols] = codes
        return (fields if bits == 8 else fields[:, ::2] | fields[:, 1::2] << 4).view(torch.int32)
    padded = torch.zeros(rows, width * per_word, dtype=torch.int32, device=codes.device)
    padded[:, :cols] = codes
    fields = padded.reshape(rows, width, per_word)
    words = torch.zeros(rows, width, dtype=torch.int32, device=codes.device)
    for i in range(per_word):
        words |= fields[:, :, i] << (i * bits)
    return words


def _to_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _check(codes: Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits}: 1 to 8 bits are packed")
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 1 << bits):
        raise ValueError(
            f"codes run from {int(codes.min())} to {int(codes.max())}; {bits} bits hold 0 to {(1 << bits) - 1}"
        )
