"""Pages lent to a kernel that goes ahead of the host, and the account afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.runtime.paged import PagedLayer, Row


def lease(layer: PagedLayer, until: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pages for a kernel that goes on by itlayer, up to these lengths: int64 ``[batch, pages]`` of exact and of packed pages, by the page's number
    in its sequence (0 where there is none). Pages come round again where a window or packing frees them: the kernel packs page
    ``(n + 1 - recent) // 64 - 1`` before the query at position n. ``settle`` tells how far it went; nothing else may be called before."""
    columns = max(-(-n // PAGE_TOKENS) for n in until)
    tables = torch.zeros(2, layer.batch, columns, dtype=torch.int64)
    for b, (row, length) in enumerate(zip(layer.rows, until, strict=True)):
        pages = -(-length // PAGE_TOKENS)
        exact_ring, packed_ring = _rings(layer, row, pages)
        exact = layer.pool()
        row.exact_pages += exact.take(max(0, exact_ring - len(row.exact_pages)))
        if layer.packed is not None:
            row.packed_pages += layer.packed.take(max(0, packed_ring - len(row.packed_pages)))
        for table, held, first in ((tables[0], row.exact_pages, row.base), (tables[1], row.packed_pages, row.dropped)):
            for page in range(first, pages if held else 0):
                table[b, page] = held[(page - first) % len(held)]
    device = layer.pool().fields["keys"].device
    return tables[0].to(device), tables[1].to(device)


def _rings(layer: PagedLayer, row: Row, pages: int) -> tuple[int, int]:
    """Exact and packed pages that a lease needs."""
    window, packing = layer.spec.window, layer.spec.packing
    reach = pages if window is None else (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1
    if packing is None:
        return min(pages - row.base, reach), 0
    tail = -(-packing.scheme.recent // PAGE_TOKENS) + 1
    return min(pages - row.base, tail, reach), min(pages - row.dropped, reach)


def settle(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Count the tokens that were written into leased pages up to these lengths; pages beyond, and those left behind, become free."""
    packing, window, exact = layer.spec.packing, layer.spec.window, layer.pool()
    for row, length in zip(layer.rows, lengths, strict=True):
        last = -(-length // PAGE_TOKENS)
        done = row.packed if packing is None else max(row.packed, (length - packing.scheme.recent) // PAGE_TOKENS)
        gone = row.dropped if window is None else max(row.dropped, (length - window + 1) // PAGE_TOKENS)
        ring, base = row.exact_pages, row.base
        first = max(done, gone)
        row.exact_pages = [ring[(page - base) % len(ring)] for page in range(first, last)] if ring else []
        exact.drop(set(ring) - set(row.exact_pages))
        if layer.packed is not None:
            ring = row.packed_pages
            row.packed_pages = [ring[(page - row.dropped) % len(ring)] for page in range(gone, done)] if ring else []
            layer.packed.drop(set(ring) - set(row.packed_pages))
        row.length, row.packed, row.dropped = length, done, gone
    layer.trim()
