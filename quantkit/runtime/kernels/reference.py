"""Packed weights and the reference kernel: slow, plain, any device, any scheme. Its definitions are the contract.

``linear_reference(x, w, bias) = x @ dequantize(w).T + bias``, computed in float32 and cast to ``x.dtype`` at the end.
Every other kernel is tested against it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from quantkit.core import affine
from quantkit.core.packing import PackedCodes, pack_rows, unpack_rows
from quantkit.core.qtensor import BlockTensor, QuantTensor

# Weights are dequantized in slices of at most this many elements into one buffer that is used again, so that a layer
# of any size needs the same memory: 1 MiB in float32, which stays in a core's second-level cache until the matmul
# reads it. Measured by eval/kernels/cpu_linear.py.
SCRATCH_ELEMENTS = 1 << 18
_buffers = threading.local()


class PackedWeight(nn.Module):
    """A weight ``[out_features, in_features]`` held as buffers of about ``bits`` bits an entry, never as floats.

    A subclass is one memory layout. It holds its tensors as buffers and knows how to give a few output rows back as
    floats.
    """

    layout = ""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Dequantize rows ``start:stop`` of the weight, transposed: ``[in_features, stop - start]`` in ``dtype``.

        May be a scratch buffer: valid until the next call in this thread, and in any thread that does not wait for
        ``alone``.
        """
        raise TypeError(f"{type(self).__name__} is an abstract layout")

    def alone(self) -> AbstractContextManager[object]:
        """A lock where all threads share one scratch buffer, else nothing.

        Held from ``columns`` until what reads its result is launched.
        """
        return nullcontext()

    def row_step(self) -> int:
        """The number of rows that a start given to ``columns`` must be a multiple of."""
        return 1

    def slices(self) -> list[tuple[int, int]]:
        """Row ranges whose dequantized size stays within ``SCRATCH_ELEMENTS``, one ``row_step`` at least.

        On a GPU 64 times that: there launches cost, not caches.
        """
        step = self.row_step()
        most = SCRATCH_ELEMENTS if next(self.buffers()).device.type == "cpu" else SCRATCH_ELEMENTS << 6
        rows = max(step, most // self.in_features // step * step)
        return [(start, min(start + rows, self.out_features)) for start in range(0, self.out_features, rows)]

    def dequantize(self) -> Tensor:
        """The weights that this layout computes with, float32 ``[out_features, in_features]``.

        They are in memory of their own.
        """
        device = next(self.buffers()).device
        weight = torch.empty(self.out_features, self.in_features, device=device)
        for start, stop in self.slices():
            with self.alone():
                weight[start:stop] = self.columns(start, stop, torch.float32).T
        return weight

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize single rows for a lookup: int64 ``[n]`` -> ``[n, in_features]`` in ``dtype``."""
        step = self.row_step()
        picked = torch.empty(len(index), self.in_features, dtype=dtype, device=index.device)
        for block in torch.unique(index // step).tolist():
            stop = min((block + 1) * step, self.out_features)
            wanted = index // step == block
            picked[wanted] = self.columns(block * step, stop, dtype).T[index[wanted] - block * step]
        return picked

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())


class Kernel(Protocol):
    """x ``[tokens, in_features]``, bias ``[out_features]`` -> ``[tokens, out_features]`` in ``x.dtype``."""

    def __call__(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor: ...


class WordsWeight(PackedWeight):
    """The layout of ``core/packing.py``: any bits, group size, ragged last group, zeros or none; any device.

    words: int32 ``[out, ceil(in * bits / 32)]``. scales: fp16/bf16 ``[out, groups]``. zeros: ``[out, groups]``, uint8
    (int16 at 8 bits, where a zero may be 256), or None.
    """

    layout = "words"
    words: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, q: QuantTensor) -> None:
        super().__init__(*q.shape)
        self.scheme = q.scheme
        self.register_buffer("words", _words(q))
        self.register_buffer("scales", q.scales)
        small = torch.int16 if q.scheme.bits == 8 else torch.uint8
        self.register_buffer("zeros", None if q.zeros is None else q.zeros.to(small))

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        codes = unpack_rows(self.words[start:stop], self.scheme.bits, self.in_features)
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return affine.dequantize(codes, self.scales[start:stop], zeros, self.scheme).to(dtype).T

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        codes = unpack_rows(self.words[index], self.scheme.bits, self.in_features)
        zeros = None if self.zeros is None else self.zeros[index]
        return affine.dequantize(codes, self.scales[index], zeros, self.scheme).to(dtype)


def _words(q: QuantTensor) -> Tensor:
    """The codes in words: those of the file, where it holds such."""
    return q.stored.words if isinstance(q.stored, PackedCodes) else pack_rows(q.stored, q.scheme.bits)


class BlockWeight(PackedWeight):
    """A foreign number format (NF4, LLM.int8, K-quants): raw blocks, dequantized by their own decoder on every use."""

    layout = "blocks"

    def __init__(self, block: BlockTensor) -> None:
        super().__init__(*block.shape)
        self._names = list(block.raw)
        for index, name in enumerate(self._names):  # local names may hold dots, which buffers may not
            self.register_buffer(f"raw_{index}", block.raw[name])
        self._decode = block.decode

    def slices(self) -> list[tuple[int, int]]:
        return [(0, self.out_features)]  # a decoder gives the whole weight

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        raw = {name: self.get_buffer(f"raw_{index}") for index, name in enumerate(self._names)}
        return self._decode(raw)[start:stop].to(dtype).T


def scratch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in this thread's buffer: valid until the next call in this thread."""
    needed = torch.Size(shape).numel()
    buffer: Tensor | None = getattr(_buffers, str(dtype), None)
    if buffer is None or buffer.numel() < needed:
        with torch.inference_mode(False):  # a tensor made inside that mode could not be written outside it later
            buffer = torch.empty(max(needed, SCRATCH_ELEMENTS), dtype=dtype)
        setattr(_buffers, str(dtype), buffer)
    return buffer[:needed].view(shape)


def linear_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """``x @ dequantize(w).T + bias`` in float32, cast to ``x.dtype``."""
    y = nn.functional.linear(x.float(), weight.dequantize(), None if bias is None else bias.float())
    return y.to(x.dtype)


def linear_dequantize(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Dequantize slice by slice into a bounded scratch buffer, in ``x.dtype``, each followed by the vendor's matmul."""
    y = x.new_empty(x.shape[0], weight.out_features)
    for start, stop in weight.slices():
        with weight.alone():
            torch.mm(x, weight.columns(start, stop, x.dtype), out=y[:, start:stop])
    return y if bias is None else y.add_(bias)
