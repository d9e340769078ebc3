"""Operations on the sequences of a layer besides growing: fork, truncate, park in host memory, unpark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.errors import RequestError
from quantkit.runtime.kv_cache.paged_layer import PagedLayer, SequencePages


@dataclass
class Parked:
    """One sequence of one layer in host memory."""

    sequence: SequencePages
    exact: dict[str, Tensor]
    packed: dict[str, Tensor]
    first: tuple[Tensor, Tensor]


def fork(layer: PagedLayer, sequences: Sequence[int]) -> PagedLayer:
    """Return a layer whose sequences begin as these do.

    Full pages are shared, the last one is copied where tokens will be written.

    layer: of the cache.
    sequences: numbers in the batch; one may come several times.
    """
    exact = layer.pool()
    other = PagedLayer(layer.spec, layer.capacity)
    other.head_dim, other.exact, other.packed = layer.head_dim, layer.exact, layer.packed
    for b in sequences:
        sequence = layer.sequences[b]
        whole, end = (
            max(0, n - sequence.base) for n in (sequence.length // PAGE_TOKENS, -(-sequence.length // PAGE_TOKENS))
        )
        exact.share(sequence.exact_pages[:whole])
        if layer.packed is not None:
            layer.packed.share(sequence.packed_pages)
        twin = SequencePages(sequence.length, sequence.packed, sequence.dropped)
        twin.exact_pages = sequence.exact_pages[:whole] + exact.copy(sequence.exact_pages[whole:end])
        twin.packed_pages = list(sequence.packed_pages)
        other.sequences.append(twin)
    if layer.first is not None:
        other.first = (layer.first[0][list(sequences)], layer.first[1][list(sequences)])
    other.reserve_capacity()
    return other


def check_truncate(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Raise what ``truncate`` would raise, and change nothing."""
    window = layer.spec.window
    for sequence, length in zip(layer.sequences, lengths, strict=True):
        if not 0 <= length <= sequence.length:
            raise RequestError(f"cannot take a sequence of {sequence.length} tokens back to {length}.")
        if sequence.dropped and window is not None and length - window + 1 < sequence.dropped * PAGE_TOKENS:
            raise RequestError(
                f"cannot take a sequence of {sequence.length} tokens back to {length}: the sliding window of {window}"
                " has dropped what it would see."
            )


def truncate(layer: PagedLayer, lengths: Sequence[int]) -> None:
    """Take back tokens.

    Within the newest ``recent`` tokens nothing is lost; a page that must be opened again holds what it was packed to.

    layer: of the cache.
    lengths: tokens of each sequence afterwards.

    Raises RequestError where a sliding window has dropped tokens that would be visible again.
    """
    check_truncate(layer, lengths)
    exact = layer.pool()
    for b, length in enumerate(lengths):
        sequence = layer.sequences[b]
        keep = -(-length // PAGE_TOKENS)
        if length < sequence.packed * PAGE_TOKENS:
            _reopen(layer, b, length)
        exact.drop(sequence.exact_pages[keep - sequence.base :] if keep >= sequence.base else sequence.exact_pages)
        sequence.exact_pages = sequence.exact_pages[: max(0, keep - sequence.base)]
        if length % PAGE_TOKENS:  # written into next
            sequence.exact_pages[-1:] = exact.own(sequence.exact_pages[-1:])
        sequence.length = length


def _reopen(layer: PagedLayer, b: int, length: int) -> None:
    """Drop packed pages from the one that ``length`` lies in on; that one becomes exact, if it still holds a token."""
    sequence, exact, packing = layer.sequences[b], layer.pool(), layer.spec.packing
    if packing is None or layer.packed is None:
        raise RequestError("a 16-bit layer has no packed pages.")
    page = length // PAGE_TOKENS
    exact.drop(sequence.exact_pages)
    opened = sequence.packed_pages[page - sequence.dropped]
    keys, values = packing.decode({name: f[[opened]] for name, f in layer.packed.fields.items()}, layer.head_dim)
    sequence.exact_pages = exact.take(1)
    if page == 0 and layer.first is not None:
        for x, kept in zip((keys, values), layer.first, strict=True):
            x[0, :, : kept.shape[2]] = kept[b]
    exact.fields["keys"][sequence.exact_pages], exact.fields["values"][sequence.exact_pages] = keys, values
    layer.packed.drop(sequence.packed_pages[page - sequence.dropped :])
    sequence.packed_pages, sequence.packed = sequence.packed_pages[: page - sequence.dropped], page


def park(layer: PagedLayer, b: int) -> Parked:
    """Copy one sequence to host memory. ``select`` frees its pages, ``unpark`` brings it back."""
    sequence, exact = layer.sequences[b], layer.pool()
    held = {name: f[sequence.exact_pages].cpu() for name, f in exact.fields.items()}
    packed = {} if layer.packed is None else {n: f[sequence.packed_pages].cpu() for n, f in layer.packed.fields.items()}
    none = torch.empty(0)
    first = (none, none) if layer.first is None else (layer.first[0][b].cpu(), layer.first[1][b].cpu())
    return Parked(SequencePages(sequence.length, sequence.packed, sequence.dropped), held, packed, first)


def unpark(layer: PagedLayer, parked: Parked) -> None:
    """Add a parked sequence at the end of the batch."""
    exact = layer.pool()
    sequence = SequencePages(parked.sequence.length, parked.sequence.packed, parked.sequence.dropped)
    sequence.exact_pages = exact.take(len(parked.exact["keys"]))
    for name, x in parked.exact.items():
        exact.fields[name][sequence.exact_pages] = x.to(exact.fields[name].device)
    if layer.packed is not None:
        sequence.packed_pages = layer.packed.take(len(parked.packed["keys"]))
        for name, x in parked.packed.items():
            layer.packed.fields[name][sequence.packed_pages] = x.to(layer.packed.fields[name].device)
    layer.sequences.append(sequence)
    if layer.first is not None:
        joined = [torch.cat([a, b[None].to(a.device)]) for a, b in zip(layer.first, parked.first, strict=True)]
        layer.first = (joined[0], joined[1])
