"""Codes into the planar layout in one pass: 32 columns in 16 bytes, or in 32 (``runtime/kernels/cpu_layouts.py``).

From bytes, one code each, or from the little-endian bit streams of ``core/packing.py``, one row each.
"""

from __future__ import annotations

import numpy as np

from quantkit.runtime.kernels.numba.gemv import jit


@jit
def pack_nibbles(codes, packed):
    """Pack uint8 ``[rows, 32 n]``, each below 16, into uint8 ``[rows, 16 n]``: code j | code j + 16 << 4."""
    rows, width = packed.shape
    for row in range(rows):
        for first in range(0, width, 16):
            for j in range(first, first + 16):
                packed[row, j] = codes[row, first + j] | np.uint8(codes[row, first + j + 16] << 4)


@jit
def pack_pairs(stream, packed):
    """Pack a stream of 4-bit codes, uint8 ``[rows, 16 n]`` (code 2 b | code 2 b + 1 << 4), into as many bytes."""
    rows, width = packed.shape
    for row in range(rows):
        for first in range(0, width, 16):
            for j in range(8):
                low, high = stream[row, first + j], stream[row, first + 8 + j]
                packed[row, first + 2 * j] = (low & np.uint8(15)) | np.uint8(high << 4)
                packed[row, first + 2 * j + 1] = np.uint8(low >> 4) | (high & np.uint8(240))


@jit
def _field(stream, row, at, bits):
    """The code whose bits begin at bit ``at`` of a row; it ends in that byte or in the next."""
    byte = at >> 3
    both = np.uint32(stream[row, byte])
    if (at & 7) + bits > 8:
        both |= np.uint32(stream[row, byte + 1]) << np.uint32(8)
    return np.uint8((both >> np.uint32(at & 7)) & np.uint32((1 << bits) - 1))


@jit
def pack_stream(stream, bits, packed):
    """Pack a stream of codes of up to 4 bits into uint8 ``[rows, 16 n]``."""
    rows, width = packed.shape
    for row in range(rows):
        for first in range(0, width, 16):
            at = 2 * first * bits
            for j in range(16):
                low, high = _field(stream, row, at + j * bits, bits), _field(stream, row, at + (j + 16) * bits, bits)
                packed[row, first + j] = low | np.uint8(high << 4)


@jit
def pack_stream_bytes(stream, bits, packed):
    """Unpack a stream of codes of 5 to 7 bits into uint8 ``[rows, n]``, each less 128 as a signed byte."""
    rows, width = packed.shape
    for row in range(rows):
        for j in range(width):
            packed[row, j] = _field(stream, row, j * bits, bits) ^ np.uint8(128)
