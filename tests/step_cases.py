"""A layer's pages with everything a decode step may meet, for the kernels of a step.

They run in the interpreter (tests/contract) and on a device (tests/gpu).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.core.kvscheme import KVScheme
from quantkit.runtime.kernels import decode_reference
from quantkit.runtime.kernels.decode_reference import FIELDS, PAGE, Heads, PackedPages, PackJob, Pages, PageTensors
from quantkit.runtime.kv_cache.packed_page import Packing


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pages_of(
    pads: list[int], length: int, heads: Heads, dtype: torch.dtype, device: str, *, window: int = 0
) -> tuple[Pages, PageTensors]:  # fmt: skip
    """Filled pages in random order for positions up to ``length`` of the longest.

    Those that a window has left are 0 in the table.
    """
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
    return pages, PageTensors(keys, values)


def packed_of(
    pads: list[int],
    length: int,
    heads: Heads,
    dtype: torch.dtype,
    device: str,
    scheme: KVScheme,
    *,
    window: int = 0,
    done: int = 0,
) -> tuple[Pages, PageTensors]:
    """``pages_of`` with packed pages too, of random keys and values, and exact first tokens."""
    pages, stored = pages_of(pads, length, heads, dtype, device, window=window)
    count, dim = len(stored.keys), heads.dim
    k, v = (noise(count, heads.kv, PAGE, dim, seed=seed).to(dtype) for seed in (6, 7))
    found = Packing(scheme, dtype).encode(k * (1 + torch.arange(dim) % 5), v, 0)
    packed = {name: x.contiguous().to(device) for name, x in found.items()}
    shape = (len(pads), heads.kv, scheme.first, dim)
    first = noise(*shape, seed=8).to(device, dtype), noise(*shape, seed=9).to(device, dtype)
    addresses = [packed[name].data_ptr() if name in packed else 0 for name in FIELDS]
    table = pages.table.flip(1) if not window else pages.table
    about = PackedPages(
        table.contiguous(), torch.full((len(pads),), done, dtype=torch.int32, device=device),
        torch.tensor(addresses + [x.data_ptr() for x in first], device=device),
        scheme.keys, scheme.values, scheme.groups(dim), scheme.recent, scheme.first,
    )  # fmt: skip
    return replace(pages, packed=about), PageTensors(stored.keys, stored.values, packed, first)


def check_pack(scheme: KVScheme, dim: int, dtype: torch.dtype, device: str) -> None:
    """Of four sequences one has a page that becomes old, one its first page, one none, and one is none.

    Codes may differ by one where a sum in another order turns a half, 1 in 500; ranges where it turns a search, 1 in 50
    (then what the page gives back is no worse).
    """
    from quantkit.runtime.kernels.triton.attention import signs
    from quantkit.runtime.kernels.triton.pack_page import pack

    heads = Heads(1, 1, dim, 1.0)
    length = scheme.recent - 1 + 4 * PAGE
    pages, stored = packed_of([0, 3 * PAGE, 7, -1], length, heads, dtype, device, scheme)
    about = pages.packed
    assert about is not None
    assert stored.packed is not None
    before = {name: x.clone() for name, x in stored.packed.items()}
    expected = {name: x.clone() for name, x in stored.packed.items()}
    decode_reference.pack(pages, PageTensors(stored.keys, stored.values, expected))
    one = [x[None] for x in (pages.table, about.table, about.done, pages.pools, about.fields)]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    bits = about.keys, about.values, about.groups, about.recent, about.first
    pack(PackJob(zero, pages.pads, pages.length, *one, zero, *bits), heads, dtype, signs(dim, torch.device(device)))
    target = {int(about.table[0, 3]), int(about.table[1, 0])}
    for page in range(len(pages.table.flatten())):
        if page not in target:
            assert all(torch.equal(stored.packed[name][page], x[page]) for name, x in before.items())
    for name, wanted in expected.items():
        found = stored.packed[name]
        assert not torch.equal(wanted, before[name])
        assert float((found != wanted).float().mean()) < (0.02 if min(scheme.keys, scheme.values) <= 3 else 0.002), name
    chosen = sorted(target)
    packing = Packing(scheme, dtype)
    ours, theirs = (packing.decode({n: x[chosen] for n, x in f.items()}, (dim, dim)) for f in (stored.packed, expected))
    source = [int(pages.table[0, 3]), int(pages.table[1, 0])]
    source = source if chosen[0] == int(about.table[0, 3]) else source[::-1]
    for pool, mine, reference in zip((stored.keys, stored.values), ours, theirs, strict=True):
        error, least = ((x.float() - pool[source].float()).square().sum() for x in (mine, reference))
        assert float(error) <= 1.001 * float(least) + 1e-6


def check_rotary(dim: int, width: int, norm: bool, dtype: torch.dtype, device: str, close: dict[str, float]) -> None:
    """Rotary with the cache write against its definition."""
    from quantkit.runtime.kernels.triton.step import rotary_and_cache

    heads = Heads(4, 2, dim, 1.0)
    q, k, v = (noise(3, count * dim, seed=seed).to(device, dtype) for count, seed in ((4, 1), (2, 2), (2, 3)))
    norms = (noise(dim, seed=4).to(device), noise(dim, seed=5).to(device)) if norm else (None, None)
    angles = noise(150, width, seed=6).to(device), noise(150, width, seed=7).to(device)
    pages, stored = pages_of([0, 9, 77], 130, heads, dtype, device)
    written = PageTensors(stored.keys.clone(), stored.values.clone())
    expected = decode_reference.rotary_and_cache(q, k, v, norms, angles, pages, heads, 1e-5, written)
    found = rotary_and_cache(q, k, v, norms, angles, pages, heads, 1e-5)
    torch.testing.assert_close(found, expected, **close)
    for pool, wanted in ((stored.keys, written.keys), (stored.values, written.values)):
        torch.testing.assert_close(pool, wanted, **close, equal_nan=True)
