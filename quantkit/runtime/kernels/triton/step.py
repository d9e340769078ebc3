"""The kernels between the matrices of a decode step: additions with norms, rotary with the cache write, activation.

``add_norm_kernel``: one program a token. ``x += [after] delta``, then ``x * weight / sqrt(mean x^2 + eps)``; sums in
float32, x (the residual) in float32 too. Bytes: 8 hidden for x, 2 hidden each for delta and y, 4 hidden for every norm
weight (from the cache). About 12 operations a number.

``rotary_cache_kernel``: one program a head and token. Query heads: [norm], rotary, written for the attention. Key
heads: the same, then into the exact page that the position falls into; value heads: as they come. The first tokens of a
layer that packs its pages go beside them too. Bytes: 2 a channel read, 2 written. The partner of a channel is read
again rather than exchanged between threads.

``activate_kernel``: ``act(gate) * up`` where gate and up are no pair that ``linear_pair`` joins. 6 bytes a number.

All three are bound by their launch (some 2 us in a captured graph, against 10 ns for their bytes at 4.3 TB/s and one
token of 4096): the floor is that there are few of them. Which page, which position, how long: all of it is read from
device memory, so a captured graph serves every step and every cache. The definitions are in ``decode_reference.py``;
results agree up to the order of float32 sums and one rounding. Not yet measured on a GPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"
# (functions under triton.jit are not Python)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.runtime.kernels.decode_reference import PAGE, Heads, Pages
from quantkit.runtime.kernels.triton.gemm import activate

SLOTS = tl.constexpr(PAGE)


@triton.jit
def add_norm_kernel(
    residual, delta, after, weight, y, width, eps, stride_delta,
    DELTA: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual float32 ``[tokens, width]``, changed in place if ``DELTA``; y ``[tokens, width]``. Grid: (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < width
    x = tl.load(residual + token * width + at, mask=live, other=0.0)
    if DELTA:
        more = tl.load(delta + token * stride_delta + at, mask=live, other=0.0).to(tl.float32)
        if AFTER:
            root = tl.rsqrt(tl.sum(more * more, 0) / width + eps)
            more = more * root * tl.load(after + at, mask=live, other=0.0)
        x += more
        tl.store(residual + token * width + at, x, mask=live)
    root = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    value = x * root * tl.load(weight + at, mask=live, other=0.0)
    tl.store(y + token * width + at, value.to(y.dtype.element_ty), mask=live)


@triton.jit
def activate_kernel(gate, up, y, width, stride_gate, stride_up, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """``act(gate) * up`` of ``[tokens, width]`` each. Grid: (tokens, blocks)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < width
    left = tl.load(gate + token * stride_gate + at, mask=live, other=0.0).to(tl.float32)
    right = tl.load(up + token * stride_up + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y + token * width + at, activate(left, right, ACT).to(y.dtype.element_ty), mask=live)


@triton.jit
def turned(x, weight, root, cos, sin, at, DIM: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr):
    """Load channels ``at`` of a head and apply norm and rotary, in float32.

    The first TURN channels turn, in pairs TURN / 2 apart.
    """
    live = at < DIM
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    partner = tl.where(at < TURN // 2, at + TURN // 2, at - TURN // 2)
    inside = at < TURN
    other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        value *= root * tl.load(weight + at, mask=live, other=0.0)
        other *= root * tl.load(weight + partner, mask=inside, other=0.0)
    other = tl.where(at < TURN // 2, -other, other)
    return value * tl.load(cos + at, mask=inside, other=1.0) + other * tl.load(sin + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["stride_table"])
def rotary_cache_kernel(
    q, k, v, out, q_norm, k_norm, cos, sin, pads, length, table, pools, fields,
    eps, stride_q, stride_k, stride_v, stride_table,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply [norm] and rotary to q and k, and write k and v of one token a sequence into its pages.

    Grid: (sequences, HEADS + 2 KV_HEADS). FIRST: tokens that are written beside the pages too.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pad = tl.load(pads + row)
    at = tl.arange(0, BLOCK)
    if pad >= 0:
        now = tl.load(length) - pad
        angle = now.to(tl.int64) * TURN
        if head < HEADS:
            x = q + row * stride_q + head * DIM
            root = head_root(x, at, eps, DIM, NORM)
            value = turned(x, q_norm, root, cos + angle, sin + angle, at, DIM, TURN, NORM).to(dtype)
            tl.store(out + (row * HEADS + head) * DIM + at, value, mask=at < DIM)
        else:
            which = (head - HEADS) // KV_HEADS  # 0: keys, 1: values
            inner = (head - HEADS) % KV_HEADS
            page = tl.load(table + row * stride_table + now // SLOTS).to(tl.int64)
            place = tl.load(pools + which) + ((page * KV_HEADS + inner) * SLOTS + now % SLOTS) * (DIM * size)
            if which == 0:
                x = k + row * stride_k + inner * DIM
                root = head_root(x, at, eps, DIM, NORM)
                value = turned(x, k_norm, root, cos + angle, sin + angle, at, DIM, TURN, NORM).to(dtype)
            else:
                value = tl.load(v + row * stride_v + inner * DIM + at, mask=at < DIM, other=0.0).to(dtype)
            tl.store(place.to(tl.pointer_type(dtype)) + at, value, mask=at < DIM)
            if now < FIRST:
                beside = tl.load(fields + 4 + which) + ((row * KV_HEADS + inner) * FIRST + now) * (DIM * size)
                tl.store(beside.to(tl.pointer_type(dtype)) + at, value, mask=at < DIM)


@triton.jit
def head_root(x, at, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """``1 / sqrt(mean x^2 + eps)`` of a head, or 1."""
    root = 1.0
    if NORM:
        value = tl.load(x + at, mask=at < DIM, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    return root


def add_norm(
    residual: Tensor, delta: Tensor | None, after: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Do ``decode_reference.add_norm`` in one kernel.

    Changes ``residual`` (float32 ``[tokens, hidden]``) in place, returns ``[tokens, hidden]``.
    """
    tokens, width = residual.shape
    assert residual.dtype == torch.float32
    assert residual.is_contiguous()
    y = torch.empty(tokens, width, dtype=dtype, device=residual.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(residual):
        add_norm_kernel[(tokens,)](
            residual, residual if delta is None else delta, weight if after is None else after, weight, y, width, eps,
            0 if delta is None else delta.stride(0),
            DELTA=delta is not None, AFTER=after is not None, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return y


def warps_for(block: int) -> int:
    """Choose warps: at most 32 numbers a thread, 4 warps at least."""
    return min(16, max(4, block // 512))


def activated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Compute ``act(gate) * up``, ``[tokens, width]`` each; rows may have strides of their own."""
    tokens, width = gate.shape
    y = torch.empty(tokens, width, dtype=gate.dtype, device=gate.device)
    block = min(1024, triton.next_power_of_2(width))
    with torch.cuda.device_of(gate):
        activate_kernel[(tokens, triton.cdiv(width, block))](
            gate, up, y, width, gate.stride(0), up.stride(0), ACT=act, BLOCK=block, num_warps=4
        )
    return y


def rotary_and_cache(
    q: Tensor, k: Tensor, v: Tensor, norms: tuple[Tensor | None, Tensor | None], angles: tuple[Tensor, Tensor],
    pages: Pages, heads: Heads, eps: float,
) -> Tensor:  # fmt: skip
    """Do ``decode_reference.rotary_and_cache`` in one kernel.

    q, k, v ``[sequences, heads * dim]``, last stride 1; returns q ``[sequences, heads, dim]``.
    """
    out = torch.empty(q.shape[0], heads.query, heads.dim, dtype=q.dtype, device=q.device)
    cos, sin = angles
    packed = pages.packed
    with torch.cuda.device_of(q):
        rotary_cache_kernel[(q.shape[0], heads.query + 2 * heads.kv)](
            q, k, v, out, cos if norms[0] is None else norms[0], cos if norms[1] is None else norms[1], cos, sin,
            pages.pads, pages.length, pages.table, pages.pools, pages.pools if packed is None else packed.fields,
            eps, q.stride(0), k.stride(0), v.stride(0), pages.table.stride(0),
            HEADS=heads.query, KV_HEADS=heads.kv, DIM=heads.dim, TURN=cos.shape[1], NORM=norms[0] is not None,
            FIRST=0 if packed is None else packed.first, BLOCK=triton.next_power_of_2(heads.dim), num_warps=1,
        )  # fmt: skip
    return out
