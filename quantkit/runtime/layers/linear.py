"""QuantLinear, and the one ``linear()`` that chooses a kernel by layout, device and number of tokens."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.errors import RequestError
from quantkit.runtime.kernels.cpu_layouts import (
    GEMM_TOKENS,
    WIDE,
    PlanarWeight,
    linear_gemm,
    linear_gemv,
    linear_numba,
    planar_fits,
)
from quantkit.runtime.kernels.cpu_torch import Int4Weight, Int8Weight, int4_fits, int8_fits, linear_int4, linear_int8
from quantkit.runtime.kernels.float_weights import FloatWeight, linear_float
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kernels.reference import (
    BlockWeight,
    Kernel,
    PackedWeight,
    WordsWeight,
    linear_dequantize,
    linear_reference,
)
from quantkit.runtime.kernels.triton.fp4_tables import known_table
from quantkit.runtime.kernels.triton.layout import TritonWeight, triton_fits
from quantkit.runtime.kernels.w8a8 import W8A8Weight, linear_w8a8
from quantkit.runtime.layers.weight_view import WeightView


def _on_triton(name: str, module: str = "launch") -> Kernel:
    def kernel(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        kernels = import_module(
            f"quantkit.runtime.kernels.triton.{module}"
        )  # Triton is imported when a GPU first needs it
        chosen: Kernel = getattr(kernels, name)
        return chosen(x, weight, bias)

    return kernel


KERNELS: dict[str, Kernel] = {
    "reference": linear_reference,
    "dequantize": linear_dequantize,
    "int4": linear_int4,
    "int8": linear_int8,
    "triton": _on_triton("linear_triton"),
    "triton-gemv": _on_triton("linear_gemv"),
    "triton-gemm": _on_triton("linear_gemm"),
    "numba": linear_numba,
    "numba-gemv": linear_gemv,
    "numba-gemm": linear_gemm,
    "w8a8": linear_w8a8,
    "triton-w8a8": _on_triton("linear_w8a8_triton", "w8a8"),
    "float": linear_float,
}

NUMBA = ("numba", "numba-gemv", "numba-gemm")  # the first chooses between the others
# layout -> (kernel for few tokens, number of tokens from which "dequantize" is faster). Measured on AVX2, one thread,
# torch 2.13: eval/results/cpu_linear.json, from eval/kernels/cpu_linear.py.
CROSSOVER: dict[str, tuple[str, int]] = {
    # 64 at 576 x 576 and 1536 x 576, between 64 and 128 at 2048 x 5632; one token: 7 to 17 times faster than
    # dequantizing
    "int4": ("int4", 64),
    # per channel 16 to 24 at SmolLM2's widths, groups of 128 24 to 48, later at 2048 x 5632; never 1.5 x off in between
    "int8": ("int8", 32),
    # never: "numba" unpacks in the first cache and multiplies integers, which no float product reaches (docs/cpu.md)
    "planar4": ("numba", sys.maxsize),
    "planar8": ("numba", sys.maxsize),
    # tried by hand on one thread of a shared AVX2 machine: even at 24 to 32 tokens for 1536 x 576, later for 2048 x
    # 5632
    "half": ("numba", 24),
    # no fused kernel takes these layouts (yet): 2048 x 5632 costs 15 to 30 ms a call, whatever the number of tokens
    "words": ("dequantize", 0),
    # kernels/triton/tile_table.py decides by shape and device, dequantizing for many tokens included
    "triton": ("triton", sys.maxsize),
    "blocks": ("dequantize", 0),
    "w8a8": ("w8a8", sys.maxsize),  # "dequantize" would leave activations in floating point: other numbers
    "w8a8-triton": ("triton-w8a8", sys.maxsize),
    "float": ("float", sys.maxsize),  # it dequantizes itself, and rounds activations where they are quantized
}


def pack(q: QuantTensor | BlockTensor, *, device: torch.device, kernel: str | None = None) -> PackedWeight:
    """Choose the layout for a device, and pack.

    q: codes and scales.
    device: where the weight will be read.
    kernel: None, or a name from ``KERNELS`` that is to be used for every number of tokens.

    Raises RequestError if that kernel cannot take this weight.
    """
    if kernel is not None and kernel not in KERNELS:
        raise RequestError(f"kernel={kernel!r}: known kernels are {', '.join(KERNELS)}.")
    if isinstance(q, BlockTensor):
        return _pack_blocks(q, device, kernel)
    if q.scheme.number != "integer":
        if kernel not in (None, "float"):
            raise RequestError(
                f"kernel={kernel!r} takes integers; these weights are {q.scheme.describe()}. Leave the kernel to"
                " quantkit."
            )
        return FloatWeight(q).to(device)
    if kernel == "float":
        raise RequestError(
            f"kernel={kernel!r} takes FP8, NVFP4 and MXFP4; these weights are {q.scheme.describe()}. Leave the kernel"
            " to quantkit."
        )
    if q.scheme.activations is not None:
        return _pack_w8a8(q, device, kernel)
    if kernel in ("w8a8", "triton-w8a8"):
        raise RequestError(
            f"kernel={kernel!r} rounds activations to int8; {q.scheme.describe()} keeps them in floating point. Convert"
            " with --activations int8, or leave the kernel to quantkit."
        )
    planar = device.type == "cpu" and planar_fits(q.scheme, q.shape[1])
    can4 = device.type == "cpu" and int4_fits(q.scheme, *q.shape)
    can8 = device.type == "cpu" and int8_fits(q.scheme, *q.shape)
    gpu = device.type == "cuda" and find_spec("triton") is not None and triton_fits(q.scheme, q.shape[1])
    triton = kernel is not None and kernel.startswith("triton")
    fits = {"int4": can4, "int8": can8, **dict.fromkeys(NUMBA, planar)}
    if not fits.get(str(kernel), True) or (triton and not gpu):
        takes = [name for name, fit in fits.items() if fit] + (["triton"] if gpu else []) + ["dequantize", "reference"]
        raise _unfit(kernel, f"{q.scheme.describe()} over {list(q.shape)}", device, takes)
    if planar and kernel in (None, *NUMBA):
        return PlanarWeight(q)
    if can4 and kernel in (None, "int4"):
        return Int4Weight(q)
    if can8 and kernel in (None, "int8"):
        return Int8Weight(q)
    if gpu:
        return TritonWeight(q, device)
    return WordsWeight(q).to(device)


def _unfit(kernel: str | None, what: str, device: torch.device, takes: list[str]) -> RequestError:
    """Return the error for a kernel that cannot run here, naming those that could."""
    why = f"cannot take {what} on {device}"
    if str(kernel).startswith("triton") and device.type != "cuda":
        why = f"runs on a GPU, not on {device}"
    elif str(kernel).startswith("triton") and find_spec("triton") is None:
        why = "needs the library 'triton', which is not installed"
    elif kernel in NUMBA and device.type == "cpu" and not threads.available():
        why = "needs numba (pip install 'quantkit[cpu]')"
    elif kernel in (*NUMBA, "int4", "int8") and device.type != "cpu":
        why = f"runs on a CPU, not on {device}"
    return RequestError(f"kernel={kernel!r} {why}. Leave the kernel to quantkit, or choose from {', '.join(takes)}.")


def _pack_blocks(q: BlockTensor, device: torch.device, kernel: str | None) -> PackedWeight:
    triton = (kernel is not None and kernel.startswith("triton-g")) or kernel == "triton"
    if kernel not in (None, "reference", "dequantize") and not triton:
        raise RequestError(
            f"kernel={kernel!r} takes integer weights; this one is {q.kind}. Leave the kernel to quantkit."
        )
    if q.look_up is not None and device.type == "cuda" and find_spec("triton") is not None:
        tabled = q.look_up({name: tensor.to(device) for name, tensor in q.raw.items()})
        if known_table(tabled.table) and triton_fits(tabled.scheme, q.shape[1]):
            return TritonWeight(tabled, device)
    if triton:
        raise _unfit(kernel, f"{q.kind} over {list(q.shape)}", device, ["dequantize", "reference"])
    return BlockWeight(q).to(device)


def _pack_w8a8(q: QuantTensor, device: torch.device, kernel: str | None) -> PackedWeight:
    gpu = device.type == "cuda" and find_spec("triton") is not None
    if kernel not in (None, "w8a8", "triton-w8a8"):
        raise RequestError(
            f"kernel={kernel!r} leaves activations in floating point; {q.scheme.describe()} computes with int8. "
            "Leave the kernel to quantkit, or take 'w8a8'."
        )
    if kernel == "triton-w8a8" and not gpu:
        raise RequestError(
            f"kernel={kernel!r} runs on a GPU with Triton, not on {device}. Leave the kernel to quantkit."
        )
    return W8A8Weight(q, triton=gpu and kernel != "w8a8").to(device)


def choose(weight: PackedWeight, tokens: int) -> Kernel:
    """Return the faster kernel for this many tokens, by the measured table."""
    few, crossover = CROSSOVER[weight.layout]
    return KERNELS[few if tokens < crossover else "dequantize"]


def use_packed_kernels(module: nn.Module) -> None:
    """Make every QuantLinear run its packed kernel whatever the number of tokens, as in decoding; for evaluation.

    "triton" chooses by itself and would dequantize for many tokens: it is replaced by the kernel that decodes a batch.
    """
    for layer in module.modules():
        if isinstance(layer, QuantLinear):
            few = CROSSOVER[layer.packed.layout][0]
            layer.kernel = "triton-gemm" if few == "triton" else few


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, kernel: Kernel | None = None) -> Tensor:
    """Compute ``y = x @ dequantize(weight).T + bias``.

    x: ``[..., in_features]``; the result is ``[..., out_features]`` in ``x.dtype``.
    weight: the packed weight.
    bias: ``[out_features]`` or None.
    kernel: None for the measured choice.
    """
    flat = x.reshape(-1, weight.in_features)
    if not flat.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.out_features)
    y = (kernel or choose(weight, flat.shape[0]))(flat, weight, bias)
    return y.reshape(*x.shape[:-1], weight.out_features)


class QuantLinear(nn.Module):
    """A linear layer whose weight is packed. Takes the place of an ``nn.Linear`` in a model ready to run.

    weight: the packed weight.
    bias: ``[out_features]`` or None.
    kernel: a name from ``KERNELS``, or None for the measured choice.
    dtype: of activations, which a model's own code may ask ``weight`` for.
    dense: a float copy ``[out, in]`` beside it (``keep_dense``) for the many tokens of a prompt, or None.
    """

    bias: nn.Parameter | None
    dense: Tensor | None

    def __init__(
        self,
        weight: PackedWeight,
        bias: nn.Parameter | None = None,
        kernel: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.packed, self.dtype = weight, dtype
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.register_parameter("bias", bias)
        self.register_buffer("dense", None, persistent=False)
        self.kernel = kernel

    @property
    def weight(self) -> WeightView:
        """The weight as a model's own code sees it."""
        return WeightView(self.packed, self.dtype)

    def keep_dense(self, dtype: torch.dtype) -> None:
        """Keep a float copy too: a prompt is read without dequantizing, at the memory of a model that is not quantized.

        dtype: of the copy.

        Raises RequestError for a layer whose activations are quantized: floats would give another model's numbers.
        """
        if isinstance(self.packed, W8A8Weight) or self._rounds():
            kind = "int8" if isinstance(self.packed, W8A8Weight) else "rounded"
            raise RequestError(
                f"keep_dense serves weight-only layers; this model's activations are {kind}. Leave it out."
            )
        self.dense = self.dequantize().to(dtype)

    def _rounds(self) -> bool:
        return isinstance(self.packed, FloatWeight) and self.packed.scheme.activations is not None

    def may_take_dense(self) -> bool:
        """Tell whether a float copy would ever be read: not beside kernels that are faster for any number of tokens.

        A head kept in 16 bits becomes float32 for next to nothing, and reads one token of each prompt.
        """
        few = CROSSOVER[self.packed.layout][1]
        return isinstance(self.packed, W8A8Weight) or (few < sys.maxsize and self.packed.layout != "half")

    def takes_dense(self, tokens: int) -> bool:
        """Tell whether so many tokens are multiplied by the float copy: it exists, and no kernel was asked for."""
        return self.dense is not None and self.kernel is None and tokens >= CROSSOVER[self.packed.layout][1]

    def kernel_for(self, tokens: int) -> str:
        """Return the name of the kernel that multiplies so many tokens by the packed weight."""
        few, crossover = CROSSOVER[self.packed.layout]
        return self.kernel or (few if tokens < crossover else "dequantize")

    def invariant_tokens(self) -> int:
        """Return how many tokens are multiplied together without one changing a bit of another."""
        if self.kernel_for(1) != "numba":
            return 1
        return GEMM_TOKENS - 1 if isinstance(self.packed, PlanarWeight) else WIDE

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., in_features]`` by the weight: ``[..., out_features]``."""
        if self.dense is not None and self.takes_dense(x.numel() // self.in_features):
            return nn.functional.linear(x, self.dense, self.bias)
        return linear(x, self.packed, self.bias, kernel=KERNELS[self.kernel] if self.kernel else None)

    def dequantize(self) -> Tensor:
        """Return the weight, float32 ``[out_features, in_features]``."""
        return self.packed.dequantize()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, layout={self.packed.layout}"
