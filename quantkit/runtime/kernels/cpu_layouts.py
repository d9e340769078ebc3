"""Weight layouts of the numba kernels (extra ``[cpu]``): planar nibbles, bytes, and dense 16-bit matrices.

Planar nibbles, 32 columns in 16 bytes::

    byte j of a block = code j | code j + 16 << 4          j = 0..15

so one load, one ``and`` and one shift give 32 codes in the order in which their inputs lie, and dequantizing needs no
shuffle either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.core.packing import PackedCodes
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kernels.reference import PackedWeight, scratch

# From so many tokens on unpacking a panel costs less than unpacking every row for each of them (docs/cpu.md).
GEMM_TOKENS = 4
MOST_TOKENS = 2048  # that are rounded to integers at a time, which bounds the scratch memory
WIDE = 8  # tokens up to which every thread quantizes all activations itself
BLOCKS = (128, 64, 32)  # inputs that share one scale of int16 activations


def block_size(scheme: Scheme, in_features: int) -> int | None:
    """The columns of a block: a number that divides the group and (padded to 32) the row; None if there is none."""
    width, padded = scheme.width(in_features), -(-in_features // 32) * 32
    whole = width >= in_features
    return next((size for size in BLOCKS if padded % size == 0 and (whole or width % size == 0)), None)


def planar_fits(scheme: Scheme, in_features: int) -> bool:
    """True if ``PlanarWeight`` can hold such a weight here: numba is installed, groups are multiples of 32."""
    return threads.available() and block_size(scheme, in_features) is not None


class PlanarWeight(PackedWeight):
    """Codes of up to 4 bits as planar nibbles, of 5 to 8 bits as signed bytes (code - 128), row by row.

    A block (``block_size`` columns) shares a scale of int16 activations, and has its own weight scale and zero here:
    those of its group, so a kernel loads four neighbours at once.

    codes: uint8 ``[out, bytes]``. scale: fp16 or bf16 ``[out, blocks]``.
    zero: int8 (nibbles) or int16 (bytes, less 128) ``[out, blocks]``, or four times the same where all are the
    midpoint.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, q: QuantTensor) -> None:
        super().__init__(*q.shape)
        size = block_size(q.scheme, self.in_features)
        if size is None:
            raise ValueError(f"{q.scheme.describe()} over {list(q.shape)} does not fit the planar layout")
        self.narrow = q.scheme.bits <= 4
        self.layout = "planar4" if self.narrow else "planar8"
        padded = -(-self.in_features // 32) * 32
        self.register_buffer("codes", _planar_codes(q, padded))
        self._blocks, self._parts = padded // size, size // 32
        group = torch.arange(self._blocks) * size // q.scheme.width(self.in_features)
        group.clamp_(max=q.scales.shape[1] - 1)  # padding may begin a group of its own
        self.register_buffer("scale", q.scales[:, group].contiguous())
        middle = 0 if self.narrow else 128
        zero = torch.tensor([q.scheme.midpoint] * 4) if q.zeros is None else q.zeros[:, group]
        signed = (zero.to(torch.int16) - middle).to(torch.int8 if self.narrow else torch.int16)
        self.register_buffer("zero", signed.contiguous())

    def fields(self, bias: Tensor | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """This matrix as int64 fields of a job. Valid while the tensors are where they are."""
        k = threads.compiled()
        numbers = np.zeros(k.FIELDS, dtype=np.int64)
        single = self.zero.dim() == 1
        numbers[k.KIND] = k.NIBBLES if self.narrow else k.BYTES
        numbers[k.ROWS], numbers[k.COLUMNS], numbers[k.ROW_BYTES] = (
            self.out_features,
            self.in_features,
            self.codes.shape[1],
        )
        numbers[k.CODES], numbers[k.SCALES], numbers[k.ZEROS] = (
            self.codes.data_ptr(), self.scale.data_ptr(), self.zero.data_ptr(),
        )  # fmt: skip
        numbers[k.SCALE_STRIDE] = self.scale.shape[1] * 2
        numbers[k.ZERO_MASK] = 0 if single else -1
        numbers[k.ZERO_STRIDE] = 0 if single else self.scale.shape[1] * self.zero.element_size()
        numbers[k.BLOCKS], numbers[k.PARTS] = self._blocks, self._parts
        numbers[k.SCALE_SHIFT] = 13 if self.scale.dtype == torch.float16 else 16
        numbers[k.BIAS] = 0 if bias is None else bias.data_ptr()
        return numbers

    def scratch_bytes(self, tokens: int) -> int:
        """Bytes a thread needs for the quantized activations."""
        return tokens * self._blocks * (self._parts * 64 + 8) + 64

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        k = threads.compiled()
        rows = scratch((stop - start, self.in_features), torch.float32)
        job = np.zeros(k.FIRST + k.FIELDS, dtype=np.int64)
        job[k.JOB], job[k.TOKENS], job[k.INPUT], job[k.COUNT] = k.JOB_FLOATS, start, rows.data_ptr(), stop - start
        job[k.FIRST :] = self.fields()
        threads.pool().run(job, threads.threads())
        return rows.T if dtype == torch.float32 else rows.to(dtype).T

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        codes = self.codes[index]
        if self.narrow:
            blocks = codes.view(len(index), codes.shape[1] // 16, 1, 16)
            codes = torch.cat([blocks & 15, blocks >> 4], dim=2).flatten(1)
        whole = codes.float() if self.narrow else codes.view(torch.int8).float()
        block = torch.arange(self.in_features) // (32 * self._parts)
        zero = self.zero[0].float() if self.zero.dim() == 1 else self.zero[index].float()[:, block]
        return ((whole[:, : self.in_features] - zero) * self.scale[index].float()[:, block]).to(dtype)


def _planar_codes(q: QuantTensor, padded: int) -> Tensor:
    """Codes in the order of ``PlanarWeight``; from a file's words without a byte per code between."""
    k = threads.compiled("planar")
    narrow = q.scheme.bits <= 4
    packed = torch.empty(q.shape[0], padded // 2 if narrow else padded, dtype=torch.uint8)
    if isinstance(q.stored, PackedCodes) and q.shape[1] == padded:
        words = q.stored.words.contiguous().view(torch.uint8).numpy()
        if q.scheme.bits == 4:
            k.pack_pairs(words, packed.numpy())
        elif q.scheme.bits == 8:
            np.bitwise_xor(words, 128, out=packed.numpy())
        else:
            (k.pack_stream if narrow else k.pack_stream_bytes)(words, q.scheme.bits, packed.numpy())
        return packed
    codes = q.codes.contiguous()
    if padded > q.shape[1]:
        codes = torch.nn.functional.pad(codes, (0, padded - q.shape[1]))
    if narrow:
        k.pack_nibbles(codes.numpy(), packed.numpy())
        return packed
    return torch.bitwise_xor(codes, 128, out=packed)  # code - 128 as a signed byte


class HalfWeight(PackedWeight):
    """A dense matrix in the 16 bits it was stored in, where the run-time dtype is float32.

    Half the bytes, the same numbers. weight: bf16 or fp16 ``[out, in]``, which may lie in a mapped file; forget then
    gives pages of it that were read back to the system.
    """

    layout = "half"
    weight: Tensor

    def __init__(self, weight: Tensor, forget: Callable[[], None] | None = None) -> None:
        super().__init__(*weight.shape)
        self.register_buffer("weight", weight.contiguous())
        self.forget = forget

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "forget": None}  # a pickled one is in no file

    @staticmethod
    def dtype_of(weight: Tensor) -> torch.dtype | None:
        """The 16-bit dtype that holds this float32 matrix exactly, or None."""
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(part.to(dtype).float(), part) for part in weight.split(4096)):
                return dtype
        return None

    def fields(self, bias: Tensor | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
        """This matrix as int64 fields of a job. Valid while the tensors are where they are."""
        return dense_fields(self.weight, bias)

    def scratch_bytes(self, tokens: int) -> int:
        """None: nothing is quantized."""
        return 0

    def columns(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        rows = scratch((stop - start, self.in_features), torch.float32)
        rows.copy_(self.weight[start:stop])
        return rows.T if dtype == torch.float32 else rows.to(dtype).T

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight[index].to(dtype)


def dense_fields(weight: Tensor, bias: Tensor | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A dense matrix ``[out, in]``, contiguous, as int64 fields of a job."""
    k = threads.compiled()
    kinds = {torch.float32: k.FLOAT32, torch.bfloat16: k.BFLOAT16, torch.float16: k.FLOAT16}
    fields = np.zeros(k.FIELDS, dtype=np.int64)
    fields[k.KIND], fields[k.ROWS], fields[k.COLUMNS] = kinds[weight.dtype], *weight.shape
    fields[k.ROW_BYTES], fields[k.CODES] = weight.shape[1] * weight.element_size(), weight.data_ptr()
    fields[k.BIAS] = 0 if bias is None else bias.data_ptr()
    return fields


def linear_numba(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply by a packed matrix: row by row for few tokens, in panels for many.

    x: ``[tokens, in]``, taken as float32; the result comes back in ``x.dtype``. Tolerance: as ``linear_gemv``.
    """
    many = isinstance(weight, PlanarWeight) and x.shape[0] >= GEMM_TOKENS
    return (linear_gemm if many else linear_gemv)(x, weight, bias)


def linear_gemv(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply by a packed matrix in one compiled pass over its rows.

    x: ``[tokens, in]``, taken as float32; the result comes back in ``x.dtype``.

    Tolerance of planar weights: activations of a block are rounded to int16, the rest is exact but for float32 sums:
    ``|error| <= 2**-16 * sum over blocks of max|x| * sum |w|``, the float32 sums' 2**-24 not counted. ``half`` weights:
    float32 sums alone.
    """
    assert isinstance(weight, (PlanarWeight, HalfWeight))
    k = threads.compiled()
    x32 = x.float().contiguous()
    bias32 = None if bias is None else bias.float().contiguous()
    y = torch.empty(x.shape[0], weight.out_features)
    parts = threads.beside_step()
    template = np.zeros(k.FIRST + k.FIELDS, dtype=np.int64)
    template[k.FIRST :] = weight.fields(bias32)
    template[k.JOB], template[k.COUNT] = k.JOB_LINEAR, 1
    for first in range(0, x.shape[0], WIDE):
        tokens = min(WIDE, x.shape[0] - first)
        needed = -(-weight.scratch_bytes(tokens) // 64) * 64
        space = scratch((parts * needed + 64,), torch.uint8) if needed else y
        job = template.copy()
        job[k.TOKENS] = tokens
        job[k.INPUT], job[k.SCRATCH], job[k.SCRATCH_BYTES] = x32[first:].data_ptr(), space.data_ptr(), needed
        job[k.FIRST + k.OUT], job[k.FIRST + k.OUT_STRIDE] = y[first:].data_ptr(), 4 * weight.out_features
        threads.pool().run(job, parts)
    return y.to(x.dtype)


def linear_gemm(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Multiply many tokens by a planar weight: unpacked in the first cache, no float copy of any slice.

    x: ``[tokens, in]``, taken as float32; the result comes back in ``x.dtype``. Tolerance: as ``linear_gemv``.
    """
    assert isinstance(weight, PlanarWeight)
    x32 = x.float().contiguous()
    bias32 = None if bias is None else bias.float().contiguous()
    y = torch.empty(x.shape[0], weight.out_features)
    for rows, into in zip(x32.split(MOST_TOKENS), y.split(MOST_TOKENS), strict=True):
        _multiply(rows, weight, bias32, into)
    return y.to(x.dtype)


def _multiply(x: Tensor, weight: PlanarWeight, bias: Tensor | None, y: Tensor) -> None:
    """Compute ``linear_gemm`` of contiguous float32 tokens, into ``y``."""
    k, g = threads.compiled(), threads.compiled("gemm")
    tokens, parts = x.shape[0], threads.threads()
    every = -(-tokens // g.TILE_TOKENS) * g.TILE_TOKENS
    shared = scratch((g.COUNTER_BYTES + weight.scratch_bytes(every),), torch.uint8)
    shared[: g.COUNTER_BYTES] = 0
    own = scratch((parts * g.OWN_BYTES // 4 + 16,), torch.float32)
    job = np.zeros(k.FIRST + k.FIELDS, dtype=np.int64)
    job[k.FIRST :] = weight.fields(bias)
    job[k.JOB], job[k.COUNT], job[k.TOKENS], job[k.INPUT] = g.JOB_GEMM, 1, tokens, x.data_ptr()
    job[k.SCRATCH], job[k.SCRATCH_BYTES], job[g.SHARED] = own.data_ptr(), g.OWN_BYTES, shared.data_ptr()
    job[k.FIRST + k.OUT], job[k.FIRST + k.OUT_STRIDE] = y.data_ptr(), 4 * weight.out_features
    threads.pool().run(job, parts)
