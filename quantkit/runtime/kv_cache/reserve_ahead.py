"""Pages reserved ahead for a kernel that runs ahead of the host, and counting its tokens afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.runtime.kv_cache.page_pool import PagePool
from quantkit.runtime.kv_cache.paged_layer import PagedLayer, SequencePages


def reserve_ahead(layer: PagedLayer, until: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Reserve pages for a kernel that goes on by itself, up to these lengths.

    Returns int64 ``[batch, pages]`` of exact and of packed pages, by the page's number in its sequence (0 where there
    is none), packed ones as far as the kernel packs. Pages are reused where a window or packing frees them: the
    kernel packs page ``(n + 1 - recent) // 64 - 1`` before the query at position n. Call ``commit`` with the reached
    lengths, and nothing else before.

    layer: of the cache.
    until: length of each sequence at the end.
    """
    columns = max(-(-n // PAGE_TOKENS) for n in until)
    exact, packed = layer.pool(), layer.packed
    tables: tuple[list[list[int]], list[list[int]]] = ([], [])
    for sequence, length in zip(layer.sequences, until, strict=True):
        pages, rings = -(-length // PAGE_TOKENS), _rings(layer, sequence, length)
        sequence.exact_pages = _ring(exact, sequence.exact_pages, rings[0], pages - sequence.base)
        tables[0].append(_around(sequence.exact_pages, sequence.base, pages, columns))
        done = 0 if packed is None else max(sequence.packed, _packed(layer, length))
        if packed is not None:
            sequence.packed_pages = _ring(packed, sequence.packed_pages, rings[1], done - sequence.dropped)
        tables[1].append(_around(sequence.packed_pages, sequence.dropped, done, columns))
    device = exact.fields["keys"].device
    return torch.tensor(tables[0], device=device), torch.tensor(tables[1], device=device)


def _ring(pool: PagePool, held: list[int], size: int, pages: int) -> list[int]:
    """Return at least ``size`` pages, for ``pages`` of a sequence.

    Where they are reused they are written into, so none is shared then.
    """
    held = held + pool.take(max(0, size - len(held)))
    return held if pages <= len(held) else pool.own(held)


def _around(held: list[int], first: int, last: int, columns: int) -> list[int]:
    """Return a sequence's row of a table: pages ``first`` to ``last``, over and over."""
    around = [held[(page - first) % len(held)] for page in range(first, last)] if held else []
    return [*[0] * first, *around, *[0] * columns][:columns]


def _packed(layer: PagedLayer, length: int) -> int:
    """Return how many pages the kernel has packed when it has written so many tokens."""
    return max(0, length - layer.spec.scheme.recent) // PAGE_TOKENS


def _rings(layer: PagedLayer, sequence: SequencePages, length: int) -> tuple[int, int]:
    """Return the number of exact and of packed pages to reserve for a sequence."""
    pages = -(-length // PAGE_TOKENS)
    window, packing = layer.spec.window, layer.spec.packing
    reach = pages if window is None else (window + PAGE_TOKENS - 2) // PAGE_TOKENS + 1
    if packing is None:
        return min(pages - sequence.base, reach), 0
    tail = -(-packing.scheme.recent // PAGE_TOKENS) + 1
    return min(pages - sequence.base, tail, reach), min(_packed(layer, length) - sequence.dropped, reach)


def commit(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Count the tokens that were written into reserved pages, and free the other pages.

    layer: of the cache.
    lengths: reached length of each sequence.
    """
    packing, window, exact = layer.spec.packing, layer.spec.window, layer.pool()
    for sequence, length in zip(layer.sequences, lengths, strict=True):
        last = -(-length // PAGE_TOKENS)
        done = sequence.packed if packing is None else max(sequence.packed, _packed(layer, length))
        gone = sequence.dropped if window is None else max(sequence.dropped, (length - window + 1) // PAGE_TOKENS)
        ring, base = sequence.exact_pages, sequence.base
        first = max(done, gone)
        sequence.exact_pages = [ring[(page - base) % len(ring)] for page in range(first, last)] if ring else []
        exact.drop(set(ring) - set(sequence.exact_pages))
        if layer.packed is not None:
            ring = sequence.packed_pages
            sequence.packed_pages = (
                [ring[(page - sequence.dropped) % len(ring)] for page in range(gone, done)] if ring else []
            )
            layer.packed.drop(set(ring) - set(sequence.packed_pages))
        sequence.length, sequence.packed, sequence.dropped = length, done, gone
    layer.trim()
