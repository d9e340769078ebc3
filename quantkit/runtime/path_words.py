"""Which path a model runs on, and why, in words: what ``generate`` and ``bench`` print."""

from __future__ import annotations

from typing import Any

import torch

from quantkit.runtime.kernels.numba import threads

FASTER = "--dtype float32: faster from token to token, slower in prompts, in twice the memory"
MISSING = "pip install 'quantkit[cpu]' (numba) brings compiled kernels, several times as fast: see docs/cpu.md"


def path_words(model: Any) -> str:
    """Say how tokens are computed, with the reason where another setting would be faster.

    model: a ``Model``.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    layouts = ", ".join(f"{count} x {name}" for name, count in model.layouts().items()) or "no packed weights"
    head = model.head_bits
    rounded = f", head of {head} bits" if head else ""
    return f"{model.device}, {dtype}, {layouts}{rounded}; {_steps(model)}"


def _steps(model: Any) -> str:
    if model.device.type != "cpu":
        return {"graph": "captured steps", "lean": "short steps"}.get(model.decoding, "transformers' definition")
    if not threads.available():
        return f"torch's kernels. {MISSING}"
    if model.decoding == "lean":
        return "one compiled step a token"
    if model.dtype != torch.float32:
        packed = set(model.layouts()) - {"half"}
        remedy = "leave --dtype out" if packed else FASTER
        return f"transformers' definition: the compiled step runs in float32 ({remedy})"
    slow = [layout for layout in model.layouts() if layout in ("float", "blocks")]
    if slow:  # FP8, NVFP4, MXFP4; NF4, LLM.int8, act-order: made for GPUs
        return "transformers' definition: no compiled step for these numbers, each token unpacks them anew"
    compiled = any(layout.startswith("planar") for layout in model.layouts())
    return "transformers' definition" + (" with compiled linears" if compiled else "")
