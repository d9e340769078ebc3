"""A layer's pages with everything a decode step may meet, for the kernels of a step: interpreter (tests/contract), device (tests/gpu)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.kernels import step
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


def check_rotary(
    dim: int, width: int, norm: bool, bits: int, dtype: torch.dtype, device: str, close: dict[str, float], other_codes: float = 0.0
) -> None:  # fmt: skip
    """Rotary with the cache write against its definition. other_codes: the share of integer codes that may differ."""
    from quantkit.runtime.kernels.triton_step import rotary_and_cache

    heads = Heads(4, 2, dim, 1.0)
    q, k, v = (noise(3, count * dim, seed=seed).to(device, dtype) for count, seed in ((4, 1), (2, 2), (2, 3)))
    norms = (noise(dim, seed=4).to(device), noise(dim, seed=5).to(device)) if norm else (None, None)
    angles = noise(150, width, seed=6).to(device), noise(150, width, seed=7).to(device)
    pages, pools = pages_of([0, 9, 77], 130, heads, dtype, device, bits=bits, start=1)
    written = pools[0].clone(), pools[1].clone()
    expected = step.rotary_and_cache(q, k, v, norms, angles, pages, heads, 1e-5, written)
    found = rotary_and_cache(q, k, v, norms, angles, pages, heads, 1e-5)
    torch.testing.assert_close(found, expected, **close)
    for pool, wanted in zip(pools, written, strict=True):
        if bits == 16:
            torch.testing.assert_close(pool, wanted, **close)
        else:
            assert float((pool != wanted).float().mean()) <= other_codes
