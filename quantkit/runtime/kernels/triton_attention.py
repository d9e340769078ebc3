"""Attention of one token a sequence over the paged cache: each program takes some pages of one key head, all queries that read it.

The tokens of a sequence are cut into ``parts`` ranges of whole pages (at least ``LEAST``), so that one sequence with few key heads fills the
device; every range keeps its own maximum and sum (online softmax, arXiv 1805.02867), and the program that finishes last joins
them in their order (flash decoding): the same input gives the same bits. Queries of one key head lie side by side and are the narrow side
of a matrix product, at least 16, so keys and values are read once for all of them. Pages are read as ``cache.py`` stores them: 16 bit or float32
as they come, 8- and 4-bit codes as ``(code - zero) * scale`` in float32, rounded to the dtype of q, which is what ``decode`` gives.

Position, padding, pages and their addresses come from device memory; parts that a short sequence has no use for end at once.
A token outside the sliding window is not read, nor is a page of them.

Bytes: 2 L KV_HEADS DIM (2, 1 or 1/2) for L tokens in reach, and 8 parts HEADS DIM in the cache. Operations: 4 L HEADS DIM on matrix units (with
less than 16 queries a key head the rest of the tile is empty), some 6 L HEADS for the softmax, 2 L KV_HEADS DIM 3 to decode integers.
Floor: bytes / copy bandwidth: 0.03 us for 1024 tokens of 8 heads of 128 in 16 bits at 4.3 TB/s; short contexts are bound by the latency
of one page and the launch, some 5 us. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.runtime.kernels.step import PAGE, Heads, Pages

SLOTS = tl.constexpr(PAGE)
LEAST = tl.constexpr(2)  # pages a program, where there are so many
MOST_PARTS = 64
LOG2E = 1.4426950408889634
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """``left @ right`` in float32. PRECISION "": on matrix units as they come; else float32 by that name of tl.dot."""
    if PRECISION == "":
        value = tl.dot(left, right)
    else:
        value = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision=PRECISION)
    return value


@triton.jit
def page_at(address, base, ELEMENT: tl.constexpr):
    """The pointer to a page at an address out of memory (a multiple of 16 bytes), to elements of ELEMENT bytes as ``base`` is.

    Counted from ``base``, an argument, because a number that becomes a pointer says nothing about its alignment: every element would
    be loaded by itself, in place of 16 bytes at a time.
    """
    moved = tl.multiple_of(address - base.to(tl.int64), 16)
    if ELEMENT > 1:  # a division says nothing either
        moved = tl.multiple_of(moved // ELEMENT, 16 // ELEMENT)
    return base + moved


@triton.jit
def page_of(place, scale, zero, at, seen, dtype: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr,
            GROUPS: tl.constexpr, ODD: tl.constexpr):  # fmt: skip
    """One page of one head, ``[64, channels at]`` in ``dtype``; tokens that are not seen give 0. ROW: stored elements of a token.

    at: channels; with 4 bits those of one parity, ``2 at + ODD``.
    """
    slots = tl.arange(0, SLOTS)
    if BITS == 16:
        mask = seen[:, None] & (at < DIM)[None, :]
        stored = place + slots[:, None] * ROW + at[None, :]
        value = tl.load(stored, mask=mask, other=0.0)
    else:
        channel = 2 * at + ODD if BITS == 4 else at
        # the stored element counts, not its channel: steps of 2 would hide that neighbours are loaded together
        mask = seen[:, None] & (at < ((DIM + 1 - ODD) // 2 if BITS == 4 else DIM))[None, :]
        raw = tl.load(place + slots[:, None] * ROW + at[None, :], mask=mask, other=0)
        if BITS == 4:
            raw = raw >> 4 if ODD else raw & 15
        group = tl.minimum(channel, DIM - 1) // (DIM // GROUPS)
        value = (raw.to(tl.float32) - tl.load(zero + group)[None, :]) * tl.load(scale + group)[None, :]
        value = tl.where(mask, value, 0.0).to(dtype)
    return value


@triton.jit
def join(work, sums, first, live, y_at, y_mask, BLOCK_G: tl.constexpr, WIDE: tl.constexpr, HALVES: tl.constexpr):
    """The parts of one key head together: ``[BLOCK_G, WIDE]`` (twice with HALVES) written to ``y_at`` (``y_at + 1``)."""
    queries, inner = tl.arange(0, BLOCK_G), tl.arange(0, WIDE)
    size: tl.constexpr = BLOCK_G * WIDE
    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    for part in range(live):
        best = tl.maximum(best, tl.load(sums + (first + part) * (2 * BLOCK_G) + queries, cache_modifier=".cg"))
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, WIDE), tl.float32)
    odd = tl.zeros((BLOCK_G, WIDE), tl.float32)
    for part in range(live):
        own = sums + (first + part) * (2 * BLOCK_G) + queries
        factor = tl.exp2(tl.load(own, cache_modifier=".cg") - best)
        total += factor * tl.load(own + BLOCK_G, cache_modifier=".cg")
        at = work + (first + part) * ((2 if HALVES else 1) * size) + queries[:, None] * WIDE + inner[None, :]
        acc += factor[:, None] * tl.load(at, cache_modifier=".cg")
        if HALVES:
            odd += factor[:, None] * tl.load(at + size, cache_modifier=".cg")
    tl.store(y_at, (acc / total[:, None]).to(y_at.dtype.element_ty), mask=y_mask)
    if HALVES:
        tl.store(y_at + 1, (odd / total[:, None]).to(y_at.dtype.element_ty), mask=y_mask)


@triton.jit(do_not_specialize=["stride_table", "window"])
def attention_kernel(
    q, y, base, pads, length, table, start, pools, k_scale, k_zero, v_scale, v_zero, work, sums, lock,
    scaling, window, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr, WIDE: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, ROW: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """q ``[sequences, HEADS, DIM]`` -> y of the same shape. Grid: (sequences * KV_HEADS, PARTS). scaling: times log2 e. base: any
    aligned memory, as elements of the pages (``page_at``)."""
    dtype: tl.constexpr = q.dtype.element_ty
    shared: tl.constexpr = HEADS // KV_HEADS
    halves: tl.constexpr = BITS == 4
    pair, part = tl.program_id(0), tl.program_id(1)
    row, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    pad, now = tl.load(pads + row), tl.load(length)
    begin = tl.maximum(pad, tl.where(window > 0, now - window + 1, 0))
    page0 = begin // SLOTS
    pages = now // SLOTS + 1 - page0
    per = tl.maximum(tl.cdiv(pages, PARTS), LEAST)
    live = tl.cdiv(pages, per)
    if (pad >= 0) & (part < live):
        queries, at, slots = tl.arange(0, BLOCK_G), tl.arange(0, WIDE), tl.arange(0, SLOTS)
        channel = 2 * at if halves else at
        q_mask = (queries < shared)[:, None] & (channel < DIM)[None, :]
        q_at = (row * HEADS + head * shared + queries)[:, None] * DIM + channel[None, :]
        left = tl.load(q + q_at, mask=q_mask, other=0.0)
        other = left
        if halves:
            other = tl.load(q + q_at + 1, mask=q_mask, other=0.0)
        keys, values = tl.load(pools), tl.load(pools + 1)
        pages_at = table + row * stride_table + page0 - tl.load(start)
        group = head * GROUPS
        element: tl.constexpr = dtype.primitive_bitwidth // 8 if BITS == 16 else 1
        best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, WIDE), tl.float32)
        odd = tl.zeros((BLOCK_G, WIDE), tl.float32)
        for index in tl.range(part * per, tl.minimum((part + 1) * per, pages), num_stages=STAGES):
            offset = (tl.load(pages_at + index).to(tl.int64) * KV_HEADS + head) * (SLOTS * ROW * element)
            key_page, value_page = page_at(keys + offset, base, element), page_at(values + offset, base, element)
            position = (page0 + index) * SLOTS + slots
            seen = (position >= begin) & (position <= now)
            page = page_of(key_page, k_scale + group, k_zero + group, at, seen, dtype, DIM, ROW, BITS, GROUPS, 0)
            scores = product(left, tl.trans(page), PRECISION)
            if halves:
                page = page_of(key_page, k_scale + group, k_zero + group, at, seen, dtype, DIM, ROW, BITS, GROUPS, 1)
                scores += product(other, tl.trans(page), PRECISION)
            scores = tl.where(seen[None, :], scores * scaling, -float("inf"))
            new = tl.maximum(best, tl.max(scores, 1))
            factor, weights = tl.exp2(best - new), tl.exp2(scores - new[:, None])
            total, best = total * factor + tl.sum(weights, 1), new
            page = page_of(value_page, v_scale + group, v_zero + group, at, seen, dtype, DIM, ROW, BITS, GROUPS, 0)
            acc = acc * factor[:, None] + product(weights.to(dtype), page, PRECISION)
            if halves:
                page = page_of(value_page, v_scale + group, v_zero + group, at, seen, dtype, DIM, ROW, BITS, GROUPS, 1)
                odd = odd * factor[:, None] + product(weights.to(dtype), page, PRECISION)
        first = pair * PARTS
        own = work + (first + part).to(tl.int64) * ((2 if halves else 1) * BLOCK_G * WIDE)
        tile = queries[:, None] * WIDE + at[None, :]
        tl.store(own + tile, acc)
        if halves:
            tl.store(own + BLOCK_G * WIDE + tile, odd)
        tl.store(sums + (first + part) * (2 * BLOCK_G) + queries, best)
        tl.store(sums + (first + part) * (2 * BLOCK_G) + BLOCK_G + queries, total)
        tl.debug_barrier()  # every thread's share is written before the counter says so
        if tl.atomic_add(lock + pair, 1, sem="acq_rel") == live - 1:
            join(work, sums, first, live, y + q_at, q_mask, BLOCK_G, WIDE, halves)
            tl.store(lock + pair, 0)
    if (pad < 0) & (part == 0):  # what follows computes with these rows too
        queries, at = tl.arange(0, BLOCK_G), tl.arange(0, WIDE)
        for odd_one in tl.static_range(2 if halves else 1):
            channel = (2 * at + odd_one) if halves else at
            y_at = y + (row * HEADS + head * shared + queries)[:, None] * DIM + channel[None, :]
            nothing = tl.zeros((BLOCK_G, WIDE), dtype)
            tl.store(y_at, nothing, mask=(queries < shared)[:, None] & (channel < DIM)[None, :])


class Workspace:
    """Partial results of every part, and the counters, which every launch leaves at 0. One for all layers of a step."""

    def __init__(self, sequences: int, heads: Heads, processors: int, device: torch.device) -> None:
        self.parts = parts_for(sequences * heads.kv, processors)
        self.block_g = max(16, triton.next_power_of_2(heads.query // heads.kv))
        pairs, wide = sequences * heads.kv, max(16, triton.next_power_of_2(heads.dim))
        self.work = torch.empty(pairs * self.parts * self.block_g * 2 * wide, dtype=torch.float32, device=device)
        self.sums = torch.empty(pairs * self.parts * 2 * self.block_g, dtype=torch.float32, device=device)
        self.lock = torch.zeros(pairs, dtype=torch.int32, device=device)


def parts_for(pairs: int, processors: int) -> int:
    """Ranges of tokens for two programs on every multiprocessor, a power of two."""
    return min(MOST_PARTS, triton.next_power_of_2(max(1, 2 * processors // pairs)))


def attend(q: Tensor, pages: Pages, heads: Heads, space: Workspace) -> Tensor:
    """``step.attend`` in one kernel: q ``[sequences, heads, dim]`` -> ``[sequences, heads * dim]``."""
    y = torch.empty_like(q)
    wide = max(16, triton.next_power_of_2(-(-heads.dim // 2) if pages.bits == 4 else heads.dim))
    exact = "ieee" if INTERPRETED else ("tf32x3" if q.dtype == torch.float32 else "")
    row = heads.dim if pages.bits != 4 else -(-heads.dim // 2)
    warps, stages = shape_of_launch(heads.dim, q.dtype)
    with torch.cuda.device_of(q):
        attention_kernel[(q.shape[0] * heads.kv, space.parts)](
            q, y, y if pages.bits == 16 else y.view(torch.uint8), pages.pads, pages.length, pages.table, pages.start, pages.pools, *pages.numbers(space.sums),
            space.work, space.sums, space.lock, heads.scaling * LOG2E, pages.window, pages.table.stride(0),
            HEADS=heads.query, KV_HEADS=heads.kv, DIM=heads.dim, BLOCK_G=space.block_g, WIDE=wide,
            BITS=pages.bits, GROUPS=pages.groups, ROW=row, PARTS=space.parts, PRECISION=exact, STAGES=stages,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y.view(q.shape[0], -1)


def shape_of_launch(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Warps and stages that compile without spills for sm_80 and sm_90 (float32 with 4 bits excepted); not yet measured."""
    if dtype == torch.float32:
        return 8, 1
    return (4 if dim <= 128 else 8), 2
