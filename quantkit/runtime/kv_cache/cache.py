"""The cache of a batch: pages for each attention module (``paged_layer.py``), all of equal lengths, and what else
layers keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantkit.runtime.kv_cache.layer_kinds import LayerKind
from quantkit.runtime.kv_cache.paged_layer import LayerSpec, PagedLayer
from quantkit.runtime.kv_cache.sequences import Parked, check_truncate, fork, park, truncate, unpark


class KVCache:
    """The layers of one batch.

    specs: of the layers with keys and values.
    capacity: tokens per sequence to reserve pages for.
    kinds: what every layer keeps; None for keys and values alone. Where it is more, the batch is one sequence.
    """

    def __init__(self, specs: Sequence[LayerSpec], capacity: int = 0, kinds: Sequence[LayerKind] | None = None) -> None:
        self.layers = [PagedLayer(spec, capacity) for spec in specs]
        self.kinds = tuple(kinds) if kinds is not None else tuple(LayerKind(True) for _ in specs)
        self.seam: Any = None  # these layers as transformers takes them, made at first use (``transformers_cache``)
        self.positions = True  # the model is told each token's position
        # What the model keeps of a sequence's images in attributes of its own: {name: value}.
        self.remembered: dict[str, Any] = {}
        self._read = 0  # tokens, where no layer has keys to count

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, in every layer."""
        return self.layers[-1].lengths if self.layers else [self._read] * bool(self._read)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def expect(self, counts: Sequence[int] | None, tokens: int) -> list[int]:
        """Announce a step of ``tokens`` tokens; return the lengths after it.

        counts: sequence b has the last ``counts[b]`` of them; None: all. The first step takes None only.
        tokens: columns of the step, padding included.
        """
        for layer in self.layers:
            layer.expect(counts, tokens)
        given = [tokens] * self.batch if counts is None else list(counts)
        if not self.layers:
            self._read += tokens
            return [self._read]
        return [n + count for n, count in zip(self.lengths or [0] * len(given), given, strict=True)]

    @property
    def quantized(self) -> bool:
        """Whether any layer packs its pages."""
        return any(layer.spec.packing is not None for layer in self.layers)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def select(self, sequences: Sequence[int]) -> None:
        """Keep these sequences only."""
        for layer in self.layers:
            layer.select(sequences)
        if not sequences:
            self.seam, self._read = None, 0

    def fork(self, sequences: Sequence[int]) -> KVCache:
        """Return a cache whose sequences begin as these do, sharing their pages: one prefix, many continuations."""
        other = KVCache([], kinds=self.kinds)
        other.positions = self.positions
        other.layers = [fork(layer, sequences) for layer in self.layers]
        return other

    def truncate(self, lengths: Sequence[int]) -> None:
        """Take back the newest tokens (see ``sequences.truncate``).

        lengths: tokens of each sequence afterwards.

        Raises RequestError as ``sequences.truncate`` does; no layer has changed then.
        """
        for layer in self.layers:
            check_truncate(layer, lengths)
        for layer in self.layers:
            truncate(layer, lengths)

    def park(self, b: int) -> list[Parked]:
        """Move one sequence to host memory: its pages are free, and it leaves the batch.

        b: the number of the sequence in the batch.
        """
        parked = [park(layer, b) for layer in self.layers]
        self.select([i for i in range(self.batch) if i != b])
        return parked

    def unpark(self, parked: Sequence[Parked]) -> None:
        """Bring a parked sequence back, at the end of the batch."""
        for layer, pages in zip(self.layers, parked, strict=True):
            unpark(layer, pages)

    def nbytes(self) -> int:
        """Return the bytes of the pages in use."""
        return sum(layer.nbytes() for layer in self.layers)

    def sequence_bytes(self, length: int) -> int:
        """Return the bytes that one sequence of that length needs, by the formula."""
        return sum(layer.sequence_bytes(length) for layer in self.layers)

    def reserved_bytes(self) -> int:
        """Return the bytes of all pools."""
        return sum(layer.reserved_bytes() for layer in self.layers)


def joined(caches: Sequence[KVCache]) -> KVCache:
    """Join caches of a single sequence each into the first one, and return it."""
    first, *others = caches
    for other in others:
        first.unpark(other.park(0))
    for layer in first.layers:
        layer.reserve_capacity()
    return first
