"""What can happen to sequences of a layer besides growing: they share a beginning, take tokens back, leave for host memory and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.errors import RequestError
from quantkit.runtime.paged import PagedLayer, Row


@dataclass
class Parked:
    """One sequence of one layer in host memory."""

    row: Row
    exact: dict[str, Tensor]
    packed: dict[str, Tensor]
    first: tuple[Tensor, Tensor]


def fork(layer: PagedLayer, rows: Sequence[int]) -> PagedLayer:
    """A layer whose sequences begin as these do (a row may come several times). Full pages are shared, the last one is copied where tokens
    will be written."""
    exact = layer.pool()
    other = PagedLayer(layer.spec, layer.capacity)
    other.head_dim, other.exact, other.packed = layer.head_dim, layer.exact, layer.packed
    for b in rows:
        row = layer.rows[b]
        whole, end = (max(0, n - row.base) for n in (row.length // PAGE_TOKENS, -(-row.length // PAGE_TOKENS)))
        exact.share(row.exact_pages[:whole])
        if layer.packed is not None:
            layer.packed.share(row.packed_pages)
        twin = Row(row.length, row.packed, row.dropped)
        twin.exact_pages = row.exact_pages[:whole] + exact.copy(row.exact_pages[whole:end])
        twin.packed_pages = list(row.packed_pages)
        other.rows.append(twin)
    if layer.first is not None:
        other.first = (layer.first[0][list(rows)], layer.first[1][list(rows)])
    other.reserve_capacity()
    return other


def check_truncate(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Raises what ``truncate`` would, and changes nothing."""
    window = layer.spec.window
    for row, length in zip(layer.rows, lengths, strict=True):
        if not 0 <= length <= row.length:
            raise RequestError(f"cannot take a sequence of {row.length} tokens back to {length}.")
        if row.dropped and window is not None and length - window + 1 < row.dropped * PAGE_TOKENS:
            raise RequestError(
                f"cannot take a sequence of {row.length} tokens back to {length}: the sliding window of {window} has dropped what it would see."
            )


def truncate(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Take back tokens, down to these lengths. Within the newest ``recent`` tokens nothing is lost; a page that must be opened again
    holds what it was packed to. Raises RequestError where a sliding window has dropped what would be seen again."""
    check_truncate(layer, lengths)
    exact = layer.pool()
    for b, length in enumerate(lengths):
        row = layer.rows[b]
        keep = -(-length // PAGE_TOKENS)
        if length < row.packed * PAGE_TOKENS:
            _reopen(layer, b, length)
        exact.drop(row.exact_pages[keep - row.base :] if keep >= row.base else row.exact_pages)
        row.exact_pages = row.exact_pages[: max(0, keep - row.base)]
        if length % PAGE_TOKENS:  # written into next
            row.exact_pages[-1:] = exact.own(row.exact_pages[-1:])
        row.length = length


def _reopen(layer: PagedLayer, b: int, length: int) -> None:
    """Packed pages from the one that ``length`` lies in on are dropped; that one becomes exact, if it holds a token still."""
    row, exact, packing = layer.rows[b], layer.pool(), layer.spec.packing
    if packing is None or layer.packed is None:
        raise RequestError("a 16-bit layer has no packed pages.")
    page = length // PAGE_TOKENS
    exact.drop(row.exact_pages)
    opened = row.packed_pages[page - row.dropped]
    keys, values = packing.decode({name: f[[opened]] for name, f in layer.packed.fields.items()}, layer.head_dim)
    row.exact_pages = exact.take(1)
    if page == 0 and layer.first is not None:
        for x, kept in zip((keys, values), layer.first, strict=True):
            x[0, :, : kept.shape[2]] = kept[b]
    exact.fields["keys"][row.exact_pages], exact.fields["values"][row.exact_pages] = keys, values
    layer.packed.drop(row.packed_pages[page - row.dropped :])
    row.packed_pages, row.packed = row.packed_pages[: page - row.dropped], page


def park(layer: PagedLayer, b: int) -> Parked:
    """Copy one sequence to host memory. ``select`` frees its pages, ``unpark`` brings it back."""
    row, exact = layer.rows[b], layer.pool()
    held = {name: f[row.exact_pages].cpu() for name, f in exact.fields.items()}
    packed = {} if layer.packed is None else {n: f[row.packed_pages].cpu() for n, f in layer.packed.fields.items()}
    none = torch.empty(0)
    first = (none, none) if layer.first is None else (layer.first[0][b].cpu(), layer.first[1][b].cpu())
    return Parked(Row(row.length, row.packed, row.dropped), held, packed, first)


def unpark(layer: PagedLayer, parked: Parked) -> None:
    """Add a parked sequence at the end of the batch."""
    exact = layer.pool()
    row = Row(parked.row.length, parked.row.packed, parked.row.dropped)
    row.exact_pages = exact.take(len(parked.exact["keys"]))
    for name, x in parked.exact.items():
        exact.fields[name][row.exact_pages] = x.to(exact.fields[name].device)
    if layer.packed is not None:
        row.packed_pages = layer.packed.take(len(parked.packed["keys"]))
        for name, x in parked.packed.items():
            layer.packed.fields[name][row.packed_pages] = x.to(layer.packed.fields[name].device)
    layer.rows.append(row)
    if layer.first is not None:
        joined = [torch.cat([a, b[None].to(a.device)]) for a, b in zip(layer.first, parked.first, strict=True)]
        layer.first = (joined[0], joined[1])
