"""Choice of the kernel for GPTQ's loop over columns; loaded while planning, so that predicted memory counts it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from quantkit.algorithms.gptq import Loops
from quantkit.runtime.kernels.numba import threads


def column_loops(device: torch.device) -> Loops:
    """Return the column loops for ``device``: compiled kernels where their library is installed, else torch's.

    All of them give the same codes. Compiled kernels stay in memory from the first call on.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from quantkit.runtime.kernels.triton import gptq

        return Loops(gptq.round_columns)
    if device.type == "cpu" and threads.available():
        kernels = threads.compiled("gptq")
        kernels.load()
        return Loops(kernels.round_columns, kernels.descend_columns)
    return Loops()
