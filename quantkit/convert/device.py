"""The device that blocks are worked on: its name, its memory, and the products of float32 matrices there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from quantkit.algorithms.gptq import Loops
from quantkit.calibrate.products import products
from quantkit.convert.memory import Prediction
from quantkit.core.host import release_free_memory, size_text
from quantkit.core.precision import exact_products
from quantkit.errors import QuantkitError
from quantkit.runtime import workers


def device_name(device: torch.device) -> str:
    """``cpu``, or the model of GPU: the order of sums, and so a few codes, differ between them."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def check_device(device: torch.device, need: Prediction, spares: str = "") -> list[str]:
    """Problems, in words, if a GPU has less free memory than the job needs. spares: the option that does without measuring what counts, if one does."""
    if device.type != "cuda":
        return []
    free = torch.cuda.mem_get_info(device)[0]
    if need.device <= free:
        return []
    less = f" {spares} needs less." if spares and need.busiest == "measure" else ""
    return [
        f"{device}: {size_text(need.device)} of its memory are needed, {size_text(free)} are free. "
        f"Free some of it, choose another GPU (--device cuda:1), or --device cpu.{less}"
    ]


def column_loops(device: torch.device) -> Loops:
    """What visits GPTQ's columns there: compiled kernels where their library is installed, in memory from the first call on. The codes are the same."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from quantkit.runtime.kernels import triton_gptq

        return Loops(triton_gptq.round_columns)
    if device.type == "cpu" and workers.available():
        kernels = workers.compiled("gptq")
        kernels.load()
        return Loops(kernels.round_columns, kernels.descend_columns)
    return Loops()


@contextlib.contextmanager
def working_on(device: torch.device, mode: str = "float32") -> Iterator[None]:
    """float32 products are float32 (no TF32: statistics would keep 10 bits) or ``mode``, and memory is counted from here.

    Raises QuantkitError in place of torch's error where the device's memory does not suffice."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        with exact_products(), products(mode):
            yield
    except torch.OutOfMemoryError as error:
        raise QuantkitError(
            f"{device}: its memory does not suffice ({str(error).partition('. ')[0]}). Does another process use it? "
            "Use --device cpu, or fewer tokens per window (--seq-len)."
        ) from error


def peak_device_bytes(device: torch.device) -> int:
    """Most bytes that tensors took on a GPU since ``working_on``; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def release_memory(device: torch.device) -> None:
    """Give what is free back, on the host and on a GPU: the next block needs pieces of other sizes."""
    release_free_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()
