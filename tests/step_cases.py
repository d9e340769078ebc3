"""A layer's pages with everything a decode step may meet, for the kernels of a step: interpreter (tests/contract), device (tests/gpu)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.runtime.kernels import step
from quantkit.runtime.kernels.step import PAGE, Heads, Pages, Stored


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pages_of(
    pads: list[int], length: int, heads: Heads, dtype: torch.dtype, device: str, *, window: int = 0
) -> tuple[Pages, Stored]:  # fmt: skip
    """Filled pages in random order for positions up to ``length`` of the longest; those that a window has left are 0 in the table."""
    columns = length // PAGE + 1
    order = torch.randperm(len(pads) * columns, generator=torch.Generator().manual_seed(3)) + 1
    table = order.view(len(pads), columns)
    if window:
        for b, pad in enumerate(pads):
            table[b, : max(0, length - pad - window + 1) // PAGE] = 0
    shape = (len(pads) * columns + 1, heads.kv, PAGE, heads.dim)
    keys, values = (noise(*shape, seed=seed).to(device, dtype) for seed in (4, 5))
    for pool in (keys, values):
        pool[0] = torch.nan  # nothing of it is read
    pages = Pages(
        torch.tensor(pads, dtype=torch.int32, device=device),
        torch.tensor([length], dtype=torch.int32, device=device),
        table.to(device),
        torch.tensor([keys.data_ptr(), values.data_ptr()], device=device),
        window,
    )
    return pages, Stored(keys, values)


def check_rotary(dim: int, width: int, norm: bool, dtype: torch.dtype, device: str, close: dict[str, float]) -> None:
    """Rotary with the cache write against its definition."""
    from quantkit.runtime.kernels.triton_step import rotary_and_cache

    heads = Heads(4, 2, dim, 1.0)
    q, k, v = (noise(3, count * dim, seed=seed).to(device, dtype) for count, seed in ((4, 1), (2, 2), (2, 3)))
    norms = (noise(dim, seed=4).to(device), noise(dim, seed=5).to(device)) if norm else (None, None)
    angles = noise(150, width, seed=6).to(device), noise(150, width, seed=7).to(device)
    pages, stored = pages_of([0, 9, 77], 130, heads, dtype, device)
    written = Stored(stored.keys.clone(), stored.values.clone())
    expected = step.rotary_and_cache(q, k, v, norms, angles, pages, heads, 1e-5, written)
    found = rotary_and_cache(q, k, v, norms, angles, pages, heads, 1e-5)
    torch.testing.assert_close(found, expected, **close)
    for pool, wanted in ((stored.keys, written.keys), (stored.values, written.values)):
        torch.testing.assert_close(pool, wanted, **close, equal_nan=True)
