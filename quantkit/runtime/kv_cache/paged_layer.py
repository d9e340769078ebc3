"""One layer of the KV cache: pages of 64 tokens, 16-bit or packed, behind one interface. Pure torch; knows no model.

Every sequence has its own length, and its pages begin at its own first token: its result does not depend on what else
is in the batch, and pages can be shared, parked and taken back. In a layer, sequence b holds::

    positions     0 ................ 64 packed[b] ............. lengths[b]
                  | dropped[b] pages | packed pages | exact pages |
                    behind a window    Packing        ``dtype``, the newest tokens (all of them in a 16-bit layer)
    first         [batch, kv_heads, first, head_dim]    the first tokens, which stay exact when their page is packed

A page is packed when all of it is older than the newest ``recent`` tokens: for a query at position n, pages that end at
or before n + 1 - recent. Attention of a step reads the tokens of that step exactly as they came. For a model that wants
one rectangle per batch, ``read`` aligns the sequences at their ends (left padding). Sharing, taking back and parking
are in ``sequences.py``, pages reserved for kernels that run ahead of the host in ``reserve_ahead.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS, KVScheme, LayerScales
from quantkit.errors import RequestError
from quantkit.runtime.kv_cache.packed_page import Packing
from quantkit.runtime.kv_cache.page_pool import PagePool


@dataclass(frozen=True)
class LayerSpec:
    """How one layer is cached.

    dtype: the run-time dtype.
    window: sliding window in tokens (None: all are kept).
    packing: None for a 16-bit layer.
    """

    dtype: torch.dtype
    window: int | None = None
    packing: Packing | None = None

    @property
    def scheme(self) -> KVScheme:
        """The scheme of the layer's packed pages."""
        return KVScheme() if self.packing is None else self.packing.scheme


def layer_spec(
    scheme: KVScheme, static: LayerScales | None, dtype: torch.dtype, device: torch.device, window: int | None
) -> LayerSpec:
    """Return the spec of a layer; static scales are moved to the device."""
    if not scheme.quantized:
        return LayerSpec(dtype, window)
    if static is not None:
        static = LayerScales(*(getattr(static, name).to(device) for name in static.__slots__))
    return LayerSpec(dtype, window, Packing(scheme, dtype, static))


@dataclass
class SequencePages:
    """The pages of one sequence.

    length: tokens.
    packed: pages that were packed, from the first one of the sequence on.
    dropped: pages that a window has left, from the first one on.
    """

    length: int = 0
    packed: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        self.exact_pages: list[int] = []  # from page ``base`` on
        self.packed_pages: list[int] = []  # from page ``dropped`` on

    @property
    def base(self) -> int:
        """The first page that is exact."""
        return max(self.packed, self.dropped)


class PagedLayer:
    """Keys and values of one layer for a batch of sequences.

    capacity: tokens of a sequence to reserve pages for at the first ``append``; more are taken when it is exceeded.
    """

    def __init__(self, spec: LayerSpec, capacity: int = 0) -> None:
        self.spec = spec
        self.capacity = capacity
        self.sequences: list[SequencePages] = []
        self.head_dim = (0, 0)  # of keys, of values
        self.exact: PagePool | None = None  # fields keys, values: [pages, kv_heads, 64, head_dim]
        self.packed: PagePool | None = None  # fields of ``Packing``
        self.first: tuple[Tensor, Tensor] | None = None
        self.coming = (0, 0)
        self._counts: Sequence[int] | None = None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [sequence.length for sequence in self.sequences]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def start(self) -> int:
        """The position where ``read`` begins, counted in the longest sequence.

        Before it every sequence is padded, or dropped by a window.
        """
        longest = self.length
        return min(
            (longest - sequence.length + sequence.dropped * PAGE_TOKENS for sequence in self.sequences), default=0
        )

    def expect(self, counts: Sequence[int] | None, tokens: int) -> None:
        """Announce the next ``append``; ``coming`` then has what ``length`` and ``start`` will be.

        counts: of its ``tokens``, the last ``counts[b]`` belong to sequence b (None: all).
        tokens: columns of the step, padding included.
        """
        self._counts = counts
        self.coming = (tokens if counts is None else max(counts)), 0
        if not self.sequences:
            return
        each = counts or [tokens] * self.batch
        after = [sequence.length + count for sequence, count in zip(self.sequences, each, strict=True)]
        longest = max(after)
        gone = (longest - n + sequence.dropped * PAGE_TOKENS for sequence, n in zip(self.sequences, after, strict=True))
        self.coming = longest, min(gone)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store new tokens exactly as they come, or rounded where none stays exact. Call ``trim`` after the read.

        k: keys ``[batch, kv_heads, tokens, head_dim]``.
        v: values, in the same shape.
        """
        tokens = k.shape[2]
        counts, self._counts = list(self._counts or [tokens] * k.shape[0]), None
        if self.spec.packing is not None:
            k, v = self.spec.packing.round_tokens(k, v)
        if self.exact is None:
            self.begin(k, v)
        exact = self.pool()
        self.reserve([sequence.length + count for sequence, count in zip(self.sequences, counts, strict=True)])
        shift = torch.tensor(
            [sequence.length - tokens + count for sequence, count in zip(self.sequences, counts, strict=True)]
        )
        position = shift[:, None] + torch.arange(tokens)
        table, base = self.exact_table(), torch.tensor([sequence.base for sequence in self.sequences])
        pages = table.gather(1, (position // PAGE_TOKENS - base[:, None]).clamp(min=0))
        slots = position % PAGE_TOKENS
        real = position >= torch.tensor(self.lengths)[:, None]
        everything = min(counts) == tokens
        for f, x in ((exact.fields["keys"], k), (exact.fields["values"], v)):
            # Two index tensors around a slice put batch and tokens first: [batch, tokens, kv_heads, head_dim].
            given = x.to(f.dtype).transpose(1, 2)
            if everything:
                f[pages.to(f.device), :, slots.to(f.device)] = given
            else:
                f[pages[real].to(f.device), :, slots[real].to(f.device)] = given[real.to(f.device)]
        self._keep_first(k, v, position, real)
        for sequence, count in zip(self.sequences, counts, strict=True):
            sequence.length += count

    def _keep_first(self, k: Tensor, v: Tensor, position: Tensor, real: Tensor) -> None:
        if self.first is None or not (real & (position < self.spec.scheme.first)).any():
            return
        sequences, at = (real & (position < self.spec.scheme.first)).nonzero(as_tuple=True)
        slot = position[sequences, at]
        for kept, x in zip(self.first, (k, v), strict=True):
            where = [i.to(kept.device) for i in (sequences, slot, at)]
            kept[where[0], :, where[1]] = x.to(kept.dtype).transpose(1, 2)[where[0], where[2]]

    def read(self) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[batch, kv_heads, length - start, head_dim]`` as attention sees them.

        Sequences are aligned at their ends.
        """
        shapes = {(sequence.length, sequence.packed, sequence.dropped) for sequence in self.sequences}
        if len(shapes) == 1:
            return self._dense(range(self.batch))
        exact = self.pool()
        dense = []
        for index, field in enumerate(("keys", "values")):
            f = exact.fields[field]
            dense.append(f.new_zeros(self.batch, f.shape[1], self.length - self.start, self.head_dim[index]))
        for b in range(self.batch):
            for whole, part in zip(dense, self._dense([b]), strict=True):
                whole[b, :, whole.shape[2] - part.shape[2] :] = part[0]
        return dense[0], dense[1]

    def _dense(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read sequences of equal length and equal numbers of packed and dropped pages."""
        sequence, exact, packing = self.sequences[sequences[0]], self.pool(), self.spec.packing
        index = torch.tensor(
            [self.sequences[b].exact_pages for b in sequences], dtype=torch.int64, device=exact.fields["keys"].device
        )
        parts = []
        for field in ("keys", "values"):
            pages = exact.fields[field][index.view(len(sequences), -1)].transpose(
                1, 2
            )  # [sequences, kv_heads, pages, 64, head_dim]
            parts.append(pages.flatten(2, 3)[:, :, : max(0, sequence.length - sequence.base * PAGE_TOKENS)])
        if packing is None or self.packed is None or sequence.packed <= sequence.dropped:
            return parts[0], parts[1]
        index = torch.tensor([self.sequences[b].packed_pages for b in sequences], device=index.device)
        stored = packing.decode({name: f[index] for name, f in self.packed.fields.items()}, self.head_dim)
        whole = [
            torch.cat([old.transpose(1, 2).flatten(2, 3), new], dim=2) for old, new in zip(stored, parts, strict=True)
        ]
        if self.first is not None and not sequence.dropped:
            for x, kept in zip(whole, self.first, strict=True):
                x[:, :, : kept.shape[2]] = kept[list(sequences)]
        return whole[0], whole[1]

    def advance(self, tokens: int) -> None:
        """Count tokens that a kernel has written into reserved pages itself.

        Then pages that have become old are packed or freed.
        """
        for sequence in self.sequences:
            sequence.length += tokens
        self.trim()

    def trim(self) -> None:
        """Free the pages that a sliding window has left, and pack those that have left the newest tokens.

        The next token sees the last ``window - 1`` tokens and itself.
        """
        exact, window = self.pool(), self.spec.window
        for sequence in self.sequences:
            gone = 0 if window is None else max(0, (sequence.length - window + 1) // PAGE_TOKENS - sequence.dropped)
            if gone:
                base = sequence.base
                sequence.dropped += gone
                if self.packed is not None:
                    self.packed.drop(sequence.packed_pages[:gone])
                    sequence.packed_pages = sequence.packed_pages[gone:]
                exact.drop(sequence.exact_pages[: sequence.base - base])
                sequence.exact_pages = sequence.exact_pages[sequence.base - base :]
        self._pack()

    def _pack(self) -> None:
        exact, packing = self.pool(), self.spec.packing
        if packing is None or self.packed is None:
            return
        jobs = [
            (sequence, page)
            for sequence in self.sequences
            for page in range(sequence.base, (sequence.length + 1 - packing.scheme.recent) // PAGE_TOKENS)
        ]
        for leading in (True, False):  # keys of a first page leave the first tokens out of their range
            chosen = [(sequence, page) for sequence, page in jobs if (page == 0) == leading]
            if not chosen:
                continue
            sources = [sequence.exact_pages[page - sequence.base] for sequence, page in chosen]
            k, v = exact.fields["keys"][sources], exact.fields["values"][sources]
            targets = self.packed.take(len(chosen))
            for name, x in packing.encode(k, v, packing.scheme.first if leading else 0).items():
                self.packed.fields[name][targets] = x
            for (sequence, _), target in zip(chosen, targets, strict=True):
                sequence.packed_pages.append(target)
        for sequence in {id(sequence): sequence for sequence, _ in jobs}.values():
            count = sum(owner is sequence for owner, _ in jobs)
            exact.drop(sequence.exact_pages[:count])
            sequence.exact_pages = sequence.exact_pages[count:]
        for sequence in self.sequences:
            sequence.packed = max(sequence.packed, (sequence.length + 1 - packing.scheme.recent) // PAGE_TOKENS)

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences only, each at most once; the pages of the others become free."""
        kept = set(sequences)
        for b, sequence in enumerate(self.sequences):
            if b not in kept:
                self._release(sequence)
        self.sequences = [self.sequences[b] for b in sequences]
        if self.first is not None:
            self.first = (self.first[0][list(sequences)], self.first[1][list(sequences)])

    def nbytes(self) -> int:
        """Return the bytes of the pages in use, shared ones once, and of the first tokens."""
        exact = self.pool()
        used = len({page for sequence in self.sequences for page in sequence.exact_pages}) * exact.page_bytes
        if self.packed is not None:
            used += (
                len({page for sequence in self.sequences for page in sequence.packed_pages}) * self.packed.page_bytes
            )
        return used + (0 if self.first is None else self.first[0].nbytes + self.first[1].nbytes)

    def sequence_bytes(self, length: int) -> int:
        """Return the bytes that one sequence of that length needs, by the formula."""
        exact, scheme = self.pool(), self.spec.scheme
        pages = -(-length // PAGE_TOKENS)
        window = self.spec.window
        gone = 0 if window is None else max(0, length - window + 1) // PAGE_TOKENS
        if self.packed is None or self.first is None:
            return (pages - gone) * exact.page_bytes
        packed = max(0, length + 1 - scheme.recent) // PAGE_TOKENS
        first = (self.first[0].nbytes + self.first[1].nbytes) // max(1, self.batch)
        return max(0, packed - gone) * self.packed.page_bytes + (pages - max(packed, gone)) * exact.page_bytes + first

    def reserved_bytes(self) -> int:
        """Return the bytes of the pools, free pages included."""
        pools = [pool for pool in (self.exact, self.packed) if pool is not None]
        return sum(pool.pages * pool.page_bytes for pool in pools)

    def compact(self) -> None:
        """Free the memory of exact pages that only a long step needed, but for one page a sequence.

        Does nothing where another layer shares the pool.
        """
        exact = self.pool()
        if exact.references() != sum(len(sequence.exact_pages) for sequence in self.sequences):
            return
        if self.spec.scheme.quantized or self.spec.window is not None:
            moved = exact.shrink(self.batch)
            for sequence in self.sequences:
                sequence.exact_pages = [moved[page] for page in sequence.exact_pages]

    def begin(self, k: Tensor, v: Tensor) -> None:
        """Make the pools for keys and values like these, and an empty sequence for each sequence."""
        batch, heads = k.shape[:2]
        self.head_dim = (k.shape[3], v.shape[3])
        self.sequences = [SequencePages() for _ in range(batch)]
        shapes = [(heads, PAGE_TOKENS, dim) for dim in self.head_dim]
        fields = {name: (shape, self.spec.dtype) for name, shape in zip(("keys", "values"), shapes, strict=True)}
        self.exact = PagePool(fields, k.device)
        packing = self.spec.packing
        if packing is not None:
            self.packed = PagePool(packing.fields(heads, *self.head_dim), k.device)
            sizes = [(batch, heads, packing.scheme.first, dim) for dim in self.head_dim]
            first = [torch.zeros(size, dtype=self.spec.dtype, device=k.device) for size in sizes]
            self.first = (first[0], first[1])
        self.reserve_capacity()

    def reserve_capacity(self) -> None:
        """Reserve pages for ``capacity`` tokens of each sequence, at once: a pool that grows is copied."""
        exact, packing, tokens = self.pool(), self.spec.packing, self.capacity
        if self.spec.window is not None:
            tokens = min(tokens, self.spec.window + 2 * PAGE_TOKENS)
        pages = -(-tokens // PAGE_TOKENS)
        if packing is not None and self.packed is not None:
            most = max(0, pages - packing.scheme.recent // PAGE_TOKENS)
            self.packed.reserve(sum(max(0, most - len(sequence.packed_pages)) for sequence in self.sequences))
            pages = min(pages, packing.scheme.recent // PAGE_TOKENS + 2)
        exact.reserve(sum(max(0, pages - len(sequence.exact_pages)) for sequence in self.sequences))

    def reserve(self, lengths: Sequence[int]) -> None:
        """Reserve exact pages for that many tokens of each sequence. Only after the first ``append``."""
        exact = self.pool()
        missing = [
            max(0, -(-length // PAGE_TOKENS) - sequence.base - len(sequence.exact_pages))
            for sequence, length in zip(self.sequences, lengths, strict=True)
        ]
        exact.reserve(sum(missing))
        for sequence, count in zip(self.sequences, missing, strict=True):
            if count:
                sequence.exact_pages += exact.take(count)

    def exact_table(self) -> Tensor:
        """Return exact pages from each sequence's ``base`` on: int64 ``[batch, pages]`` on the host, padded with 0."""
        return _table([sequence.exact_pages for sequence in self.sequences])

    def pool(self) -> PagePool:
        """Return the pool of exact pages.

        Raises RequestError before the first ``append``.
        """
        if self.exact is None:
            raise RequestError("this cache holds nothing yet.")
        return self.exact

    def _release(self, sequence: SequencePages) -> None:
        self.pool().drop(sequence.exact_pages)
        if self.packed is not None:
            self.packed.drop(sequence.packed_pages)


def _table(pages: Sequence[Sequence[int]]) -> Tensor:
    widest = max((len(numbers) for numbers in pages), default=0)
    return torch.tensor([[*numbers, *[0] * (widest - len(numbers))] for numbers in pages], dtype=torch.int64).view(
        len(pages), -1
    )
