"""Packing codes as planar nibbles in one pass: 32 columns in 16 bytes (``runtime/kernels/cpu_layouts.py``)."""

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
