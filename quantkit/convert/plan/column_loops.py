"""Compiled kernels of a conversion; loaded while planning, so that predicted memory counts them."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from quantkit.algorithms.gptq import Loops
from quantkit.runtime.kernels.numba import threads


def load_searches(device: torch.device) -> None:
    """Load the compiled search for scales, where its library is installed. Any method may use it."""
    if device.type == "cpu" and threads.available():
        threads.compiled("ranges").load()


def load_block_search(device: torch.device) -> None:
    """Load the compiled search for GGUF's block formats, where its library is installed."""
    if device.type == "cpu" and threads.available():
        threads.compiled("kquant").load()


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
