"""Load a checkpoint in any format that quantkit reads as a model ready to run."""

from __future__ import annotations

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import Source
from quantkit.core.host import available_bytes, choose_device
from quantkit.core.interrupt import interruptible
from quantkit.core.kvscheme import KVScales
from quantkit.core.precision import cpu_has_bfloat16
from quantkit.errors import RequestError
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.formats.reader import QuantizedReader
from quantkit.model.end_tokens import end_tokens
from quantkit.model.skeleton import build_skeleton
from quantkit.runtime.decode.cpu_step import proved
from quantkit.runtime.images.processor import load_processor
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kv_cache.choose import kv_plan, tell_of_foreign_scales
from quantkit.runtime.layers.build import fill
from quantkit.runtime.layers.dense_source import stored_experts, tell_of_static_activations
from quantkit.runtime.layers.fused import fuse_linears
from quantkit.runtime.layers.head import check_head_bits, compact_head, default_head_bits, round_head
from quantkit.runtime.layers.linear import KERNELS, QuantLinear
from quantkit.runtime.model import Model

__all__ = ["Model", "load"]

# A dense model that has more weights, or needs more of the free memory in float32, stays in bf16.
MOST_WEIGHTS, SHARE = 10**9, 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@interruptible()
def load(
    ref: str | Path | Source,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kv_bits: int | str | None = None,
    kv_scales: KVScales | None = None,
    dequantize: bool = False,
    kernel: str | None = None,
    head_bits: int | None = None,
    keep_dense: bool = False,
    graphs: bool = True,
) -> Model:
    """Load a model to run it: floating point, or quantized in any format that quantkit reads.

    ref: named model, folder, GGUF file, or a source that is open already.
    device: "auto" (a GPU if there is one), "cpu", "cuda".
    dtype: of activations and dense weights: "auto", "float32", "bfloat16", "float16" (never on a CPU).
    kv_bits: 16, 8, 4, 3, 2, "fp8", or "k4v2" (keys and values apart); None for what the checkpoint says, else 16.
    kv_scales: "online", or "static" (which ``convert`` calibrates); None for those of the checkpoint, else online.
    dequantize: hold quantized weights as floats (for evaluation).
    kernel: None for the measured choice, or a name from ``runtime.layers.linear.KERNELS`` for every layer.
    head_bits: 8 or 4 rounds a dense head (and the embedding tied to it) to groups of that many bits, 16 keeps it; None:
        8 on a CPU beside weights of at most 6 bits, else 16.
    keep_dense: hold a float copy of every packed layer beside it, for prompts; for a CPU without the extra ``[cpu]``.
    graphs: on a GPU, capture decode steps in CUDA graphs where the model allows it; False launches each kernel.

    Raises RequestError for a bad option, SourceError or CheckpointError for a model that cannot be read whole.
    """
    where = choose_device(device)
    _check_options(where, dtype, dequantize, kernel, head_bits, keep_dense, graphs)
    source = stored_experts(open_source(ref))
    ends = end_tokens(source)
    stored = read_kv_plan(source.path) if source.path.is_dir() else None
    plan = kv_plan(stored, kv_bits, kv_scales)
    reader = QuantizedReader(source)
    usual = not dequantize and kernel in (None, "numba")
    number = choose_dtype(dtype, where, compiled=usual and _runs_compiled(source, reader, where, dtype))
    tell_of_foreign_scales(reader, plan, stored)
    module = build_skeleton(source.config, number)
    if keep_dense and head_bits in (None, 16) and not reader.modules:
        raise RequestError(
            f"keep_dense (--keep-dense) has no effect: no weight of {source.path} is quantized. Drop it."
        )
    fill(module, source, reader, device=where, dtype=number, dequantize=dequantize, kernel=kernel)
    _finish_layers(module, reader, where, number, dequantize, kernel, head_bits, keep_dense)
    return Model(
        module, source.config, device=where, dtype=number, read_tokenizer=partial(_tokenizer, source),
        read_processor=partial(load_processor, source), path=source.path, end_tokens=ends, kv_plan=plan, graphs=graphs,
    )  # fmt: skip


def _runs_compiled(source: Source, reader: QuantizedReader, device: torch.device, dtype: str | torch.dtype) -> bool:
    """Tell whether compiled code will run a model: packed weights, or dense ones by the compiled step.

    Dense ones count on a CPU that multiplies bf16 if they are few: decoding is then three times as fast as in bf16 by
    the transformers definition, and reads prompts at two thirds of its speed; with 1.5 billion weights 1.6 times and
    a third (docs/cpu.md).
    """
    if reader.modules:
        return True
    if dtype != "auto" or device.type != "cpu" or not cpu_has_bfloat16() or not threads.available():
        return False
    weights = sum(prod(source.info(name).shape) for name in source.names())
    few = weights <= MOST_WEIGHTS and 4 * weights <= SHARE * available_bytes()
    return few and proved(json.dumps(dict(source.config), sort_keys=True))


def _check_options(
    device: torch.device, dtype: str | torch.dtype, dequantize: bool, kernel: str | None, head_bits: int | None,
    keep_dense: bool, graphs: bool,
) -> None:  # fmt: skip
    """Refuse options of ``load`` that are unknown, or that contradict each other, with RequestError."""
    choose_dtype(dtype, device)
    if kernel is not None and kernel not in KERNELS:
        raise RequestError(f"kernel={kernel!r}: known kernels are {', '.join(KERNELS)}.")
    if head_bits is not None:
        check_head_bits(head_bits, dequantize)
    if keep_dense and (dequantize or kernel is not None or device.type != "cpu"):
        raise RequestError(
            "keep_dense serves packed layers of a CPU, each with its own choice of kernel. Leave it out here."
        )
    if not graphs and device.type != "cuda":
        raise RequestError(
            f"graphs=False (--no-graphs) has no effect on {device}: only a GPU captures graphs. Leave it out."
        )


def _finish_layers(
    module: nn.Module,
    reader: QuantizedReader,
    device: torch.device,
    dtype: torch.dtype,
    dequantize: bool,
    kernel: str | None,
    head_bits: int | None,
    keep_dense: bool,
) -> None:
    """Give the head its run-time form, keep float copies where asked for, and fuse linears on a GPU."""
    tell_of_static_activations(reader)
    plain = dequantize or kernel not in (None, "numba") or dtype != torch.float32
    head_bits = head_bits or default_head_bits(module, reader, device, 16 if plain else 8)
    if head_bits in (4, 8):
        round_head(module, head_bits, device=device, dtype=dtype, kernel=kernel)
    elif not dequantize and device.type == "cpu" and kernel in (None, "numba"):
        compact_head(module, dtype, kernel)
    if keep_dense:
        _keep_dense(module, dtype)
    if device.type == "cuda":
        fuse_linears(module, device)


def _keep_dense(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep float copies of the layers that would read a prompt from them. Raises RequestError if there are none."""
    layers = [layer for layer in module.modules() if isinstance(layer, QuantLinear) and layer.may_take_dense()]
    if not layers:
        raise RequestError(
            "keep_dense (--keep-dense) has no effect: the compiled kernels read prompts faster from packed weights than"
            " from a float copy. Leave it out."
        )
    for layer in layers:
        layer.keep_dense(dtype)


def choose_dtype(dtype: str | torch.dtype, device: torch.device, *, compiled: bool = False) -> torch.dtype:
    """Resolve "auto": bf16 on a GPU and where a processor multiplies it (AVX512-BF16, AMX), else float32.

    Where the compiled kernels or the compiled step will run, it is float32, which they compute in: bf16 is decoded by
    the transformers definition, many times slower (docs/cpu.md).

    dtype: as it was asked for.
    device: where the model will run.
    compiled: whether compiled kernels will run its weights, or the compiled step will.

    Raises RequestError for an unknown dtype, and for float16 on a CPU: it overflows at 65504, and no CPU kernel is
    faster for it.
    """
    if dtype == "auto":
        lean = cpu_has_bfloat16() and not (compiled and threads.available())
        return torch.bfloat16 if device.type == "cuda" or lean else torch.float32
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None:
        raise RequestError(f"dtype={dtype!r}: expected auto, {', '.join(DTYPES)}.")
    if chosen == torch.float16 and device.type == "cpu":
        raise RequestError(
            "dtype=float16 on a CPU: large activations overflow and nothing gets faster. Use float32 or bfloat16."
        )
    return chosen


def _tokenizer(source: Source) -> Any:
    from quantkit.checkpoint.tokenizer import load_tokenizer

    return load_tokenizer(source)
