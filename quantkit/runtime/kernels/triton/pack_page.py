"""Packing of a page that has left the newest tokens, as part of a step: one launch for all layers of equal bits.

A program belongs to a layer, a sequence, a key head, and to keys or values. It looks whether a page of its sequence is
due at this position (one step in 64), and ends at once where none is: positions and addresses come from device memory,
so the launch can be captured with the step. The numbers are those of ``core/kvpages.py``: float16 scale and low, ranges
searched for the same bits, division and rounding as torch divides and rounds. Keys: 16 channels at a time, reduced
along the tokens. Values: 16 tokens and one group at a time, rotated by a product with the signs of H (exact in the
page's dtype, summed in float32).

Codes equal those of the definition where no sum of float32 in another order turns a half or a search; tests state how
many. Bytes, when a page is due: 4 * 64 * DIM read and ``KVScheme.page_bytes`` written for each key head; some 100
operations a number with a search, 20 without, once in 64 steps. Else 60 bytes a program: bound by the launch, some 5 us
for 4096 programs. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.core.kvpages import CUTS, LARGEST, SEARCHED_KEYS, SEARCHED_VALUES, SMALLEST_SCALE
from quantkit.runtime.kernels.decode_reference import PAGE, Heads, PackJob
from quantkit.runtime.kernels.triton.packed_attention import pool_at, product

SLOTS = tl.constexpr(PAGE)
ROWS = tl.constexpr(16)  # channels, or tokens, that are packed together
HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it off rounds to whole numbers, halves to even
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
_SEARCHED_KEYS, _SEARCHED_VALUES = tl.constexpr(SEARCHED_KEYS), tl.constexpr(SEARCHED_VALUES)
_TRIED = tl.constexpr(len(CUTS))
_BELOW, _ABOVE = tl.constexpr(tuple(below for below, _ in CUTS)), tl.constexpr(tuple(above for _, above in CUTS))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def as_stored(low, high, BITS: tl.constexpr):
    """Round scale and low of a range to what float16 holds."""
    scale = tl.div_rn(high - low, tl.full(low.shape, (1 << BITS) - 1, tl.float32))
    scale = tl.minimum(tl.maximum(scale, _SMALLEST), _LARGEST).to(tl.float16).to(tl.float32)
    return scale, tl.minimum(tl.maximum(low, -_LARGEST), _LARGEST).to(tl.float16).to(tl.float32)


@triton.jit
def coded(x, scale, low, BITS: tl.constexpr):
    """Round numbers to codes, as float32."""
    scale, x = tl.broadcast(scale, x)
    code = (tl.div_rn(x - low, scale) + HALF_EVEN) - HALF_EVEN
    return tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1.0)


@triton.jit
def squares(x, real, scale, low, BITS: tl.constexpr, AXIS: tl.constexpr):
    """Squared errors of a range's codes, added up along AXIS."""
    error = coded(x, scale, low, BITS) * scale + low - x
    return tl.expand_dims(tl.sum(tl.where(real, error * error, 0.0), AXIS), AXIS)


@triton.jit
def choose(x, real, SEARCH: tl.constexpr, BITS: tl.constexpr, AXIS: tl.constexpr):
    """Choose scale and low of the real numbers along AXIS: ``kvpages.choose_range``."""
    low = tl.expand_dims(tl.min(tl.where(real, x, float("inf")), AXIS), AXIS)
    high = tl.expand_dims(tl.max(tl.where(real, x, -float("inf")), AXIS), AXIS)
    scale, least = as_stored(low, high, BITS)
    if SEARCH:
        error, span = squares(x, real, scale, least, BITS, AXIS), high - low
        for i in tl.static_range(_TRIED):
            tried, bottom = as_stored(low + _BELOW[i] * span, high - _ABOVE[i] * span, BITS)
            cost = squares(x, real, tried, bottom, BITS, AXIS)
            better = cost < error
            scale, least = tl.where(better, tried, scale), tl.where(better, bottom, least)
            error = tl.minimum(cost, error)
    return scale, least


@triton.jit
def store_bits(place, codes, rows, first, stride, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Store codes of 1, 2, 4 or 8 bits as bytes.

    codes: int32 ``[rows, channels]``, COUNT of them real. Channel ``first`` begins a byte.
    """
    PER: tl.constexpr = 8 // BITS
    together = (
        tl.reshape(codes, (codes.shape[0], codes.shape[1] // PER, PER)) << (tl.arange(0, PER) * BITS)[None, None, :]
    )
    byte = tl.arange(0, codes.shape[1] // PER)
    at = place + rows[:, None] * stride + first // PER + byte[None, :]
    tl.store(at, tl.sum(together, 2).to(tl.uint8), mask=(byte < COUNT // PER)[None, :])


@triton.jit
def store_codes(place, codes, rows, first, DIM: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Store codes (float32 ``[rows, channels]``) of a page at ``place``, channels from ``first`` on."""
    whole = codes.to(tl.int32)
    if BITS == 3:
        store_bits(place, whole & 3, rows, first, 3 * DIM // 8, COUNT, 2)
        store_bits(place + DIM // 4, whole >> 2, rows, first, 3 * DIM // 8, COUNT, 1)
    else:
        store_bits(place, whole, rows, first, DIM * BITS // 8, COUNT, BITS)


@triton.jit
def pack_keys(page, place, scales, skip, DIM: tl.constexpr, BITS: tl.constexpr):
    """Pack keys. page: ``[64, DIM]`` as it is; the first ``skip`` tokens do not count for the range."""
    slots, lane = tl.arange(0, SLOTS), tl.arange(0, ROWS)
    real = tl.broadcast_to((slots >= skip)[:, None], (SLOTS, ROWS))
    for channel in range(0, DIM, ROWS):
        x = tl.load(page + slots[:, None] * DIM + channel + lane[None, :]).to(tl.float32)
        scale, low = choose(x, real, BITS <= _SEARCHED_KEYS, BITS, 0)
        store_codes(place, coded(x, scale, low, BITS), slots, channel, DIM, ROWS, BITS)
        tl.store(scales + channel + lane, tl.reshape(scale, (ROWS,)).to(tl.float16))
        tl.store(scales + DIM + channel + lane, tl.reshape(low, (ROWS,)).to(tl.float16))


@triton.jit
def pack_values(
    page, place, scales, turn, TURN: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pack values. page: ``[64, DIM]`` as it is; SPAN: a power of two not below the channels of a group."""
    WIDTH: tl.constexpr = DIM // GROUPS
    row, at, inner = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, SPAN)
    real = tl.broadcast_to((inner < WIDTH)[None, :], (ROWS, SPAN))
    for group in range(GROUPS):
        h = tl.load(
            turn + at[:, None] * DIM + (group * WIDTH + inner)[None, :],
            mask=(at < DIM)[:, None] & (inner < WIDTH)[None, :],
            other=0.0,
        )
        for first in range(0, SLOTS, ROWS):
            token = first + row
            x = tl.load(page + token[:, None] * DIM + at[None, :], mask=(at < DIM)[None, :], other=0.0)
            x = product(x, h.to(x.dtype), tl.zeros((ROWS, SPAN), tl.float32), PRECISION) * TURN
            scale, low = choose(x, real, BITS <= _SEARCHED_VALUES, BITS, 1)
            store_codes(place, coded(x, scale, low, BITS), token, group * WIDTH, DIM, WIDTH, BITS)
            pair = scales + (token * GROUPS + group) * 2
            tl.store(pair, tl.reshape(scale, (ROWS,)).to(tl.float16))
            tl.store(pair + 1, tl.reshape(low, (ROWS,)).to(tl.float16))


@triton.jit(do_not_specialize=["rows", "stride_exact", "stride_packed"])
def pack_kernel(
    base, index, pads, length, exact, packed, done, pools, fields, windows, turn, rows, stride_exact, stride_packed,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
    GROUPS: tl.constexpr,
    SPAN: tl.constexpr, RECENT: tl.constexpr, FIRST: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (2 KV_HEADS, sequences, layers of ``index``). base: any aligned memory, of the dtype of exact pages."""
    dtype: tl.constexpr = base.dtype.element_ty
    head, row = tl.program_id(0) // 2, tl.program_id(1)
    layer = tl.load(index + tl.program_id(2)).to(tl.int64)
    pad, window = tl.load(pads + row), tl.load(windows + layer)
    last = tl.load(length) - pad + 1 - RECENT
    page = last // SLOTS - 1
    hidden = (window > 0) & (window <= RECENT)
    if (pad >= 0) & (last > 0) & (last % SLOTS == 0) & (page >= tl.load(done + layer * rows + row)) & (hidden == 0):
        source = tl.load(exact + (layer * rows + row) * stride_exact + page) * KV_HEADS + head
        target = tl.load(packed + (layer * rows + row) * stride_packed + page) * KV_HEADS + head
        which = tl.program_id(0) % 2
        given = pool_at(tl.load(pools + layer * 2 + which), base, dtype) + source * (SLOTS * DIM)
        to = tl.load(fields + layer * 6 + which * 2)
        scales = pool_at(tl.load(fields + layer * 6 + which * 2 + 1), base, tl.float16)
        if which == 0:
            if KB == 16:
                copy(given, pool_at(to, base, dtype) + target * (SLOTS * DIM), DIM)
            else:
                place = pool_at(to, base, tl.uint8) + target * (SLOTS * DIM * KB // 8)
                pack_keys(given, place, scales + target * (2 * DIM), tl.where(page == 0, FIRST, 0), DIM, KB)
        elif VB == 16:
            copy(given, pool_at(to, base, dtype) + target * (SLOTS * DIM), DIM)
        else:
            place = pool_at(to, base, tl.uint8) + target * (SLOTS * DIM * VB // 8)
            beside = scales + target * (SLOTS * GROUPS * 2)
            pack_values(given, place, beside, turn, TURN, DIM, WIDE, GROUPS, SPAN, VB, PRECISION)


@triton.jit
def copy(given, place, DIM: tl.constexpr):
    """Copy a page of ``DIM`` channels."""
    slots, lane = tl.arange(0, SLOTS), tl.arange(0, ROWS)
    for channel in range(0, DIM, ROWS):
        at = slots[:, None] * DIM + channel + lane[None, :]
        tl.store(place + at, tl.load(given + at))


def pack(job: PackJob, heads: Heads, dtype: torch.dtype, turn: Tensor) -> None:
    """Do ``decode_reference.pack`` for the layers of a job, in one kernel. turn: ``attention.signs``."""
    layers, rows = len(job.index), job.done.shape[1]
    precision = "ieee" if INTERPRETED or dtype == torch.float32 else ""
    with torch.cuda.device_of(turn):
        pack_kernel[(2 * heads.kv, rows, layers)](
            turn.view(torch.uint8).view(dtype), job.index, job.pads, job.length, job.exact, job.packed, job.done,
            job.pools, job.fields,
            job.windows, turn, rows, job.exact.stride(1), job.packed.stride(1),
            KV_HEADS=heads.kv, DIM=heads.dim, WIDE=max(16, triton.next_power_of_2(heads.dim)), KB=job.keys,
            VB=job.values,
            GROUPS=job.groups, SPAN=max(16, triton.next_power_of_2(heads.dim // job.groups)), RECENT=job.recent,
            FIRST=job.first,
            TURN=(heads.dim & -heads.dim) ** -0.5, PRECISION=precision, num_warps=4,
        )  # fmt: skip
