"""Attention of one token a sequence over the paged cache.

Each program takes some pages of one key head, and all queries that read it. The tokens of a sequence are cut into
``parts`` ranges of whole pages (at least ``LEAST``), so that one sequence with few key heads fills the device; every
range keeps its own maximum and sum (online softmax, arXiv 1805.02867), and the program that finishes last joins them in
their order (flash decoding): the same input gives the same bits. Queries of one key head lie side by side and are the
narrow side of a matrix product, at least 16, so keys and values are read once for all of them. Exact pages are read
here, packed ones in ``packed_attention.py``; a range that holds both keeps two results. The first tokens of a sequence
whose first page is packed are one more exact page. Packed values are rotated: what they give is turned back once, where
the ranges are joined.

Position, pages and their addresses come from device memory; parts that a short sequence has no use for end at once.
A token outside the sliding window is not read, nor is a page of them.

Bytes: 4 L KV_HEADS DIM for L exact tokens in reach, and 8 parts HEADS DIM in the cache. Operations: 4 L HEADS DIM on
matrix units (with less than 16 queries a key head the rest of the tile is empty), some 6 L HEADS for the softmax.
Floor: bytes / copy bandwidth: 0.03 us for 1024 tokens of 8 heads of 128 in 16 bits at 4.3 TB/s; short contexts are
bound by the latency of one page and the launch, some 5 us. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.core.kvpages import hadamard
from quantkit.runtime.kernels.decode_reference import PAGE, Heads, Pages
from quantkit.runtime.kernels.triton.packed_attention import CHUNK, packed_part, pool_at, product

SLOTS = tl.constexpr(PAGE)
LEAST = tl.constexpr(2)  # pages a program, where there are so many
COLUMNS = tl.constexpr(64)  # of the result, that are turned back together
MOST_PARTS = 64
PACKED_PROGRAMS = 4  # on a multiprocessor
LOG2E = 1.4426950408889634
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def exact_part(
    q, base, pages_at, pools, firsts, work, sums, extra, lo, hi, begin, now, row, head, scaling,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, SHARED: tl.constexpr, BLOCK_G: tl.constexpr, WIDE: tl.constexpr,
    FIRST: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to exact pages ``lo .. hi`` of a sequence, tokens ``begin`` to ``now``.

    The result goes to ``work`` ``[BLOCK_G, WIDE]``, maximum and sum to ``sums``. With ``extra`` (1 or 0) the first
    tokens before them are read too, which lie at ``firsts``.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    queries, at, slots = tl.arange(0, BLOCK_G), tl.arange(0, WIDE), tl.arange(0, SLOTS)
    left = tl.load(
        q + queries[:, None] * DIM + at[None, :], mask=(queries < SHARED)[:, None] & (at < DIM)[None, :], other=0.0
    )
    keys, values = tl.load(pools), tl.load(pools + 1)
    if FIRST > 0:
        first_keys, first_values = tl.load(firsts), tl.load(firsts + 1)
    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, WIDE), tl.float32)
    for index in tl.range(lo - extra, hi, num_stages=STAGES):
        page = tl.where(index < lo, -1, index)
        position = page * SLOTS + slots
        number = tl.load(pages_at + page, mask=page >= 0, other=0).to(tl.int64)
        offset = (number * KV_HEADS + head) * (SLOTS * DIM)
        key_page, value_page = keys + offset * SIZE, values + offset * SIZE
        if FIRST > 0:
            offset = (row * KV_HEADS + head) * (FIRST * DIM * SIZE)
            key_page = tl.where(page < 0, first_keys + offset, key_page)
            value_page = tl.where(page < 0, first_values + offset, value_page)
            position = tl.where(page < 0, tl.where(slots < FIRST, slots, now + 1), position)
        seen = (position >= begin) & (position <= now)
        mask = seen[:, None] & (at < DIM)[None, :]
        stored = tl.load(pool_at(key_page, base, dtype) + slots[:, None] * DIM + at[None, :], mask=mask, other=0.0)
        scores = product(left, tl.trans(stored), tl.zeros((BLOCK_G, SLOTS), tl.float32), PRECISION)
        scores = tl.where(seen[None, :], scores * scaling, -float("inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        factor, weights = tl.exp2(best - new), tl.exp2(scores - new[:, None])
        total, best = total * factor + tl.sum(weights, 1), new
        stored = tl.load(pool_at(value_page, base, dtype) + slots[:, None] * DIM + at[None, :], mask=mask, other=0.0)
        acc = product(weights.to(dtype), stored, acc * factor[:, None], PRECISION)
    tl.store(work + queries[:, None] * WIDE + at[None, :], acc)
    tl.store(sums + queries, best)
    tl.store(sums + BLOCK_G + queries, total)


@triton.jit
def parts_of(
    work,
    sums,
    best,
    live,
    at,
    BLOCK_G: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    WAYS: tl.constexpr,
    WAY: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Add up channels ``at`` of the parts' results of one way, not yet divided by the sum of weights.

    WAY: 0 for exact pages, 1 for packed ones.
    """
    queries = tl.arange(0, BLOCK_G)
    acc = tl.zeros((BLOCK_G, at.shape[0]), tl.float32)
    for part in range(live):
        own = tl.load(
            sums + (part * WAYS + WAY) * (2 * BLOCK_G) + queries,
            mask=queries < SHARED,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        place = work + (part * WAYS + WAY) * (BLOCK_G * WIDE) + queries[:, None] * WIDE + at[None, :]
        more = tl.load(
            place, mask=(own > -float("inf"))[:, None] & (at < DIM)[None, :], other=0.0, cache_modifier=".cg"
        )
        acc += tl.exp2(own - best)[:, None] * more
    return acc


@triton.jit
def join(
    work, sums, turn, y, live, SHARED: tl.constexpr, BLOCK_G: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr,
    WAYS: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Join the parts of one key head and write them to ``y``.

    turn: float16 ``[DIM, DIM]``, H as signs. TURN: what they are multiplied by, 0: not turned.
    """
    queries = tl.arange(0, BLOCK_G)
    best = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    for part in range(live * WAYS):
        own = tl.load(sums + part * (2 * BLOCK_G) + queries, mask=queries < SHARED, other=0.0, cache_modifier=".cg")
        best = tl.maximum(best, own)
    total = tl.zeros((BLOCK_G,), tl.float32)
    for part in range(live * WAYS):
        own = tl.load(
            sums + part * (2 * BLOCK_G) + queries, mask=queries < SHARED, other=-float("inf"), cache_modifier=".cg"
        )
        some = own > -float("inf")
        more = tl.load(sums + part * (2 * BLOCK_G) + BLOCK_G + queries, mask=some, other=0.0, cache_modifier=".cg")
        total += tl.exp2(own - best) * more
    total = tl.where(queries < SHARED, total, 1.0)
    at = tl.arange(0, WIDE)
    width: tl.constexpr = COLUMNS if WIDE > COLUMNS else WIDE
    if TURN > 0:
        rotated = parts_of(work, sums, best, live, at, BLOCK_G, WIDE, DIM, WAYS, 1, SHARED) * (TURN / total)[:, None]
        high = rotated.to(tl.float16)
        rest = (rotated - high.to(tl.float32)).to(tl.float16)
    for column in tl.static_range(0, WIDE, width):
        inner = column + tl.arange(0, width)
        value = parts_of(work, sums, best, live, inner, BLOCK_G, WIDE, DIM, WAYS, 0, SHARED) / total[:, None]
        if WAYS == 2 and TURN == 0:
            value += parts_of(work, sums, best, live, inner, BLOCK_G, WIDE, DIM, WAYS, 1, SHARED) / total[:, None]
        if TURN > 0:
            h = tl.load(
                turn + at[:, None] * DIM + inner[None, :], mask=(at < DIM)[:, None] & (inner < DIM)[None, :], other=0.0
            )
            if PRECISION == "":
                value = tl.dot(rest, h, tl.dot(high, h, value))
            else:
                value = product(rotated, h, value, PRECISION)
        mask = (queries < SHARED)[:, None] & (inner < DIM)[None, :]
        tl.store(y + queries[:, None] * DIM + inner[None, :], value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_table", "stride_packed", "window", "recent"])
def attention_kernel(
    q, y, base, pads, length, table, pools, packed, done, fields, turn, work, sums, scratch, lock,
    scaling, window, recent, stride_table, stride_packed,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GQ: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, GROUPS: tl.constexpr,
    FIRST: tl.constexpr,
    TURN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q ``[sequences, HEADS, DIM]`` -> y of the same shape. Grid: (sequences * KV_HEADS, PARTS).

    scaling: times log2 e. base: any aligned memory (``pool_at``). KB, VB: bits of keys and values in packed pages; KB
    0: there are none.
    """
    SHARED: tl.constexpr = HEADS // KV_HEADS
    WAYS: tl.constexpr = 2 if KB > 0 else 1
    pair, part = tl.program_id(0), tl.program_id(1)
    row, head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
    pad = tl.load(pads + row)
    now = tl.load(length) - pad
    begin = tl.maximum(tl.where(window > 0, now - window + 1, 0), 0)
    page0 = begin // SLOTS
    pages = now // SLOTS + 1 - page0
    per = tl.maximum(tl.cdiv(pages, PARTS), LEAST)
    live = tl.cdiv(pages, per)
    first_head = (row * HEADS + head * SHARED) * DIM
    if (pad >= 0) & (part < live):
        lo = page0 + part * per
        hi = tl.minimum(lo + per, page0 + pages)
        first = (pair * PARTS).to(tl.int64) * WAYS
        all_work, all_sums = work + first * (BLOCK_G * WIDE), sums + first * (2 * BLOCK_G)
        own_work, own_sums = all_work + part * (WAYS * BLOCK_G * WIDE), all_sums + part * (WAYS * 2 * BLOCK_G)
        old, extra = lo, 0
        if KB > 0:
            packed_pages = tl.maximum(tl.load(done + row), (now + 1 - recent) // SLOTS)
            old = tl.minimum(tl.maximum(packed_pages, lo), hi)
            extra = ((lo == 0) & (old > 0) & (begin < FIRST)).to(tl.int32)
            nothing = tl.full((BLOCK_G,), -float("inf"), tl.float32)
            if lo < old:
                packed_part(
                    q + first_head, base, packed + row * stride_packed, fields,
                    scratch + (pair * PARTS + part) * (CHUNK * BLOCK_M),
                    own_work + BLOCK_G * WIDE, own_sums + 2 * BLOCK_G, lo, old, tl.maximum(begin, FIRST), head, scaling,
                    KV_HEADS, DIM, SHARED, GQ, BLOCK_M, BLOCK_G, WIDE, KB, VB, GROUPS, PRECISION, STAGES,
                )  # fmt: skip
            else:
                tl.store(own_sums + 2 * BLOCK_G + tl.arange(0, BLOCK_G), nothing)
        exact_part(
            q + first_head, base, table + row * stride_table, pools, fields + 4, own_work, own_sums,
            extra, old, hi, begin, now, row, head, scaling,
            KV_HEADS, DIM, SHARED, BLOCK_G, WIDE, FIRST if KB > 0 else 0, PRECISION, STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # every thread's share is written before the counter says so
        if tl.atomic_add(lock + pair, 1, sem="acq_rel") == live - 1:
            join(all_work, all_sums, turn, y + first_head, live, SHARED, BLOCK_G, WIDE, DIM, WAYS, TURN, PRECISION)
            tl.store(lock + pair, 0)
    if (pad < 0) & (part == 0):  # what follows computes with these rows too
        queries, at = tl.arange(0, BLOCK_G), tl.arange(0, WIDE)
        mask = (queries < SHARED)[:, None] & (at < DIM)[None, :]
        nought = tl.zeros((BLOCK_G, WIDE), y.dtype.element_ty)
        tl.store(y + first_head + queries[:, None] * DIM + at[None, :], nought, mask=mask)


class Workspace:
    """Partial results of every part, and the counters, which every launch leaves at 0. One for all layers of a step.

    groups: the most that share a scale in a value of a packed layer; 0: no layer is packed.
    """

    def __init__(self, sequences: int, heads: Heads, processors: int, device: torch.device, groups: int = 0) -> None:
        self.parts = parts_for(sequences * heads.kv, processors, PACKED_PROGRAMS if groups else 2)
        self.gq = triton.next_power_of_2(heads.query // heads.kv)
        self.block_g = max(16, self.gq)
        self.wide = max(16, triton.next_power_of_2(heads.dim))
        count = sequences * heads.kv * self.parts
        ways = 2 if groups else 1
        self.work = torch.empty(count * ways * self.block_g * self.wide, dtype=torch.float32, device=device)
        self.sums = torch.empty(count * ways * 2 * self.block_g, dtype=torch.float32, device=device)
        self.scratch = torch.empty(
            count * int(CHUNK) * self.rows(groups) if groups else 1, dtype=torch.float32, device=device
        )
        self.lock = torch.zeros(sequences * heads.kv, dtype=torch.int32, device=device)
        self.turn = signs(heads.dim, device)

    def rows(self, groups: int) -> int:
        """Rows of a tile of queries and groups."""
        return max(16, triton.next_power_of_2(self.gq * groups))


def signs(dim: int, device: torch.device) -> Tensor:
    """The Hadamard matrix of values as float16 signs (and zeros, where it has blocks)."""
    return hadamard(dim, device).sign().half()


def parts_for(pairs: int, processors: int, programs: int) -> int:
    """The number of token ranges for so many programs on every multiprocessor, a power of two."""
    return min(MOST_PARTS, triton.next_power_of_2(max(1, programs * processors // pairs)))


def attend(q: Tensor, pages: Pages, heads: Heads, space: Workspace) -> Tensor:
    """Do ``decode_reference.attend`` in one kernel: q ``[sequences, heads, dim]`` -> ``[sequences, heads * dim]``."""
    y = torch.empty_like(q)
    precision = "ieee" if INTERPRETED else ("tf32x3" if q.dtype == torch.float32 else "")
    packed = pages.packed
    kb, vb, groups = (
        (0, 0, 1) if packed is None else (packed.keys, packed.values, packed.groups if packed.values < 16 else 1)
    )
    warps, stages = shape_of_launch(heads.dim, q.dtype, packed is not None, space.rows(groups))
    given = (pages.table, pages.pads, pages.pools) if packed is None else (packed.table, packed.done, packed.fields)
    with torch.cuda.device_of(q):
        attention_kernel[(q.shape[0] * heads.kv, space.parts)](
            q, y, y, pages.pads, pages.length, pages.table, pages.pools, *given, space.turn,
            space.work, space.sums, space.scratch, space.lock,
            heads.scaling * LOG2E, pages.window, packed.recent if packed else 0, pages.table.stride(0),
            given[0].stride(0),
            HEADS=heads.query, KV_HEADS=heads.kv, DIM=heads.dim, GQ=space.gq, BLOCK_G=space.block_g,
            BLOCK_M=space.rows(groups),
            WIDE=space.wide, PARTS=space.parts, KB=kb, VB=vb, GROUPS=groups, FIRST=packed.first if packed else 0,
            TURN=(heads.dim & -heads.dim) ** -0.5 if vb in (2, 3, 4, 8) else 0.0, PRECISION=precision, STAGES=stages,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y.view(q.shape[0], -1)


def shape_of_launch(dim: int, dtype: torch.dtype, packed: bool, rows: int = 16) -> tuple[int, int]:
    """Warps and stages that compile without spills for sm_80 and sm_90; not yet measured.

    Excepted are packed pages of float32 models, of 256 channels on sm_80 (96 bytes a thread) and of 32 queries for one
    key head (272). rows: of the tile of packed pages.
    """
    if dtype == torch.float32:
        return 8, 1
    return (8 if packed and (dim > 128 or rows > 32) else 4), 2
