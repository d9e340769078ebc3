"""A layer's pages with everything a decode step may meet, for the kernels of a step: interpreter (tests/contract), device (tests/gpu)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.kernels.step import PAGE, Heads, Pages

Pools = tuple[Tensor, Tensor]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pages_of(
    pads: list[int], length: int, heads: Heads, dtype: torch.dtype, device: str, *, window: int = 0, bits: int = 16, start: int = 0
) -> tuple[Pages, Pools]:  # fmt: skip
    """Filled pages in random order for positions up to ``length``; those before page ``start`` are not held any more."""
    held = length // PAGE + 1 - start
    order = torch.randperm(len(pads) * held + 1, generator=torch.Generator().manual_seed(3))[: len(pads) * held]
    width = heads.dim if bits != 4 else heads.dim // 2
    shape = (len(pads) * held + 1, heads.kv, PAGE, width)
    scales = None
    if bits == 16:
        pools = noise(*shape, seed=4).to(dtype), noise(*shape, seed=5).to(dtype)
    else:
        make = torch.Generator().manual_seed(6)
        pools = tuple(torch.randint(0, 256, shape, dtype=torch.uint8, generator=make) for _ in range(2))
        groups, middle = 2, (1 << bits) / 2
        numbers = [torch.rand(heads.kv, groups, generator=make) * 4 / middle + 0.01 for _ in range(2)]
        zeros = [(torch.rand(heads.kv, groups, generator=make) * 4 + middle - 2).round() for _ in range(2)]
        scales = tuple(t.to(device) for t in (numbers[0], zeros[0], numbers[1], zeros[1]))
    pools = tuple(pool.to(device) for pool in pools)
    pages = Pages(
        torch.tensor(pads, dtype=torch.int32, device=device),
        torch.tensor([length], dtype=torch.int32, device=device),
        order.view(len(pads), held).to(device),
        torch.tensor([start], dtype=torch.int32, device=device),
        torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=device),
        window,
        bits,
        scales,
    )
    return pages, pools
