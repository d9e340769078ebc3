"""Block tables on the device: the pages of a batch as kernels see them.

The tensors are static, all layers of a kind above each other, filled anew for every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.runtime.kernels.decode_reference import FIELDS, PackedPages, PackJob, Pages
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.paged_layer import LayerSpec, PagedLayer
from quantkit.runtime.kv_cache.reserve_ahead import reserve_ahead


class DeviceTables:
    """Block tables and page addresses for a number of sequences of up to ``tokens`` positions.

    layers: one ``Pages`` each, views of the tensors here.
    pads: int32 ``[sequences]``, -1 where there is no sequence.
    length: int32 ``[1]``.
    exact: int64 ``[layers, sequences, pages]``, 16-bit pages.
    packed: int64 ``[layers, sequences, pages]``, packed pages.
    done: int32 ``[layers, sequences]``, packed pages of each sequence.
    pools: int64 ``[layers, 2]``, see ``kernels/decode_reference.py``.
    fields: int64 ``[layers, 6]``, see there.
    jobs: the layers whose pages may have to be packed at the beginning of a step.
    """

    def __init__(self, sequences: int, tokens: int, specs: Sequence[LayerSpec], dim: int, device: torch.device) -> None:
        count, pages = len(specs), -(-tokens // PAGE_TOKENS)
        self.pads = torch.full((sequences,), -1, dtype=torch.int32, device=device)
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.exact = torch.zeros(count, sequences, pages, dtype=torch.int64, device=device)
        self.packed = torch.zeros(count, sequences, pages, dtype=torch.int64, device=device)
        self.done = torch.zeros(count, sequences, dtype=torch.int32, device=device)
        self.pools = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.fields = torch.zeros(count, 6, dtype=torch.int64, device=device)
        self.windows = torch.tensor([spec.window or 0 for spec in specs], dtype=torch.int32).to(device)
        self.layers = [self._layer(i, spec, dim) for i, spec in enumerate(specs)]
        self.jobs = self._jobs()

    def _layer(self, i: int, spec: LayerSpec, dim: int) -> Pages:
        packed = None
        if spec.packing is not None:
            s = spec.scheme
            packed = PackedPages(
                self.packed[i], self.done[i], self.fields[i], s.keys, s.values, s.groups(dim), s.recent, s.first
            )
        return Pages(self.pads, self.length, self.exact[i], self.pools[i], spec.window or 0, packed)

    def _jobs(self) -> list[PackJob]:
        """Group the layers that are packed alike."""
        alike: dict[tuple[int, ...], list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.packed is not None:
                p = layer.packed
                alike.setdefault((p.keys, p.values, p.groups, p.recent, p.first), []).append(i)
        shared = self.pads, self.length, self.exact, self.packed, self.done, self.pools, self.fields, self.windows
        return [
            PackJob(torch.tensor(index, dtype=torch.int32).to(self.pads.device), *shared, *kind)
            for kind, index in alike.items()
        ]

    def fill(self, cache: KVCache, until: int | None = None) -> None:
        """Fill the tables from a cache.

        cache: the cache to point at.
        until: reserve pages for positions up to here of its longest sequence (``reserve_ahead.py``); None: for the next
            token only, by the cache's own bookkeeping.
        """
        lengths, longest = cache.lengths, cache.length
        pads = [longest - n for n in lengths]
        self.pads.fill_(-1)
        self.pads[: len(pads)] = torch.tensor(pads, dtype=torch.int32).to(self.pads.device)
        self.length.fill_(longest)
        if until is None:
            for layer in cache.layers:
                layer.reserve([n + 1 for n in lengths])
            tables = [held(layer, longest // PAGE_TOKENS + 1) for layer in cache.layers]
        else:
            tables = [reserve_ahead(layer, [until - pad for pad in pads]) for layer in cache.layers]
        for i, pair in enumerate(tables):
            for whole, table in zip((self.exact, self.packed), pair, strict=True):
                whole[i, : len(pads), : table.shape[1]] = table
        done = torch.tensor(
            [[sequence.packed for sequence in layer.sequences] for layer in cache.layers], dtype=torch.int32
        )
        self.done[:, : len(pads)] = done.to(self.done.device)
        self.pools.copy_(torch.tensor([_exact_addresses(layer) for layer in cache.layers]))
        self.fields.copy_(torch.tensor([_packed_addresses(layer) for layer in cache.layers]))


def held(layer: PagedLayer, pages: int) -> tuple[Tensor, Tensor]:
    """Return the exact and the packed pages that sequences hold: int64 ``[batch, pages]`` each, on the host.

    Columns are page numbers in the sequence; 0 where there is no page.

    layer: of the cache.
    pages: number of columns.
    """
    tables = []
    for name in ("exact", "packed"):
        lists = [
            (sequence.base, sequence.exact_pages) if name == "exact" else (sequence.dropped, sequence.packed_pages)
            for sequence in layer.sequences
        ]
        tables.append(torch.tensor([[*[0] * first, *own, *[0] * (pages - first - len(own))] for first, own in lists]))
    return tables[0], tables[1]


def _exact_addresses(layer: PagedLayer) -> list[int]:
    fields = layer.pool().fields
    return [fields[name].data_ptr() for name in ("keys", "values")]


def _packed_addresses(layer: PagedLayer) -> list[int]:
    if layer.packed is None or layer.first is None:
        return [0] * 6
    fields = layer.packed.fields
    addresses = [fields[name].data_ptr() if name in fields else 0 for name in FIELDS]
    return addresses + [kept.data_ptr() for kept in layer.first]
