"""Pages lent to a kernel that goes ahead of the host, and the account afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.runtime.paged import PagedLayer, Row
from quantkit.runtime.pool import Pool


def lease(layer: PagedLayer, until: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pages for a kernel that goes on by itself, up to these lengths: int64 ``[batch, pages]`` of exact and of packed pages, by the page's number
    in its sequence (0 where there is none), packed ones as far as the kernel packs. Pages come round again where a window or packing frees them: the kernel packs page
    ``(n + 1 - recent) // 64 - 1`` before the query at position n. ``settle`` tells how far it went; nothing else may be called before."""
    columns = max(-(-n // PAGE_TOKENS) for n in until)
    exact, packed = layer.pool(), layer.packed
    tables: tuple[list[list[int]], list[list[int]]] = ([], [])
    for row, length in zip(layer.rows, until, strict=True):
        pages, rings = -(-length // PAGE_TOKENS), _rings(layer, row, length)
        row.exact_pages = _ring(exact, row.exact_pages, rings[0], pages - row.base)
        tables[0].append(_around(row.exact_pages, row.base, pages, columns))
        done = 0 if packed is None else max(row.packed, _packed(layer, length))
        if packed is not None:
            row.packed_pages = _ring(packed, row.packed_pages, rings[1], done - row.dropped)
        tables[1].append(_around(row.packed_pages, row.dropped, done, columns))
    device = exact.fields["keys"].device
    return torch.tensor(tables[0], device=device), torch.tensor(tables[1], device=device)


def _ring(pool: Pool, held: list[int], size: int, pages: int) -> list[int]:
    """``size`` pages at least, for ``pages`` of a sequence. Where they come round they are written into, so none is shared then."""
    held = held + pool.take(max(0, size - len(held)))
    return held if pages <= len(held) else pool.own(held)


def _around(held: list[int], first: int, last: int, columns: int) -> list[int]:
    """A row of a table: pages ``first`` to ``last`` of a sequence, over and over."""
    found = [held[(page - first) % len(held)] for page in range(first, last)] if held else []
    return [*[0] * first, *found, *[0] * columns][:columns]


def _packed(layer: PagedLayer, length: int) -> int:
    """Pages that the kernel has packed when it has written so many tokens."""
    return max(0, length - layer.spec.scheme.recent) // PAGE_TOKENS


def _rings(layer: PagedLayer, row: Row, length: int) -> tuple[int, int]:
    """Exact and packed pages that a lease needs."""
    pages = -(-length // PAGE_TOKENS)
    window, packing = layer.spec.window, layer.spec.packing
    reach = pages if window is None else (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1
    if packing is None:
        return min(pages - row.base, reach), 0
    tail = -(-packing.scheme.recent // PAGE_TOKENS) + 1
    return min(pages - row.base, tail, reach), min(_packed(layer, length) - row.dropped, reach)


def settle(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Count the tokens that were written into leased pages up to these lengths; pages beyond, and those left behind, become free."""
    packing, window, exact = layer.spec.packing, layer.spec.window, layer.pool()
    for row, length in zip(layer.rows, lengths, strict=True):
        last = -(-length // PAGE_TOKENS)
        done = row.packed if packing is None else max(row.packed, _packed(layer, length))
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
