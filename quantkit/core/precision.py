"""Which matrix products are exact and which are fast: float32 kept as float32, bf16 where the processor has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside: no TF32 on a GPU, no bf16 on a CPU.

    What was set before comes back, by whichever of torch's two interfaces it was set.
    """
    cuda: Any = torch.backends.cuda
    mkldnn: Any = torch.backends.mkldnn
    backends = cuda.matmul, mkldnn.matmul
    each = [backend.fp32_precision for backend in backends]
    word = None
    with contextlib.suppress(RuntimeError):  # set for single backends: torch refuses to say it in one word
        word = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if word is not None:
            torch.set_float32_matmul_precision(word)
        for backend, before in zip(backends, each, strict=True):
            if backend.fp32_precision != before:
                backend.fp32_precision = before


def cpu_has_bfloat16() -> bool:
    """True if this processor multiplies bf16 in hardware; elsewhere torch emulates it, slower than float32."""
    return _cpu_has("_is_avx512_bf16_supported") or cpu_has_amx()


def cpu_has_amx() -> bool:
    """True if this processor has matrix units for bf16."""
    return _cpu_has("_is_amx_tile_supported")


def _cpu_has(check: str) -> bool:
    return bool(getattr(torch.cpu, check, lambda: False)())
