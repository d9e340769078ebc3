"""Pools of cache pages: every page is held by one or more sequences, and free again when the last one drops it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class PagePool:
    """Tensors ``[pages, *shape]``, one for each field, that grow together.

    A tensor that grows gets another address: keep none.
    """

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self.fields: dict[str, Tensor] = {
            name: torch.zeros(0, *shape, dtype=dtype, device=device) for name, (shape, dtype) in fields.items()
        }
        self._free: list[int] = []
        self._holders: Counter[int] = Counter()

    @property
    def pages(self) -> int:
        """Number of pages, free ones included."""
        return next(iter(self.fields.values())).shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all fields."""
        return sum(f[:1].nbytes if len(f) else f.new_empty(1, *f.shape[1:]).nbytes for f in self.fields.values())

    def in_use(self) -> int:
        """Return how many pages some sequence holds, each counted once."""
        return self.pages - len(self._free)

    def reserve(self, pages: int) -> None:
        """Make sure that so many pages are free."""
        missing = pages - len(self._free)
        if missing <= 0:
            return
        first = self.pages
        for name, f in self.fields.items():
            fresh = f.new_zeros(missing, *f.shape[1:])
            self.fields[name] = torch.cat([f, fresh]) if first else fresh
        self._free += range(first, first + missing)

    def take(self, count: int) -> list[int]:
        """Take free pages, held once each; their content is old.

        Pages taken together lie beside each other where they can.

        count: how many.
        """
        self.reserve(count)
        taken, self._free = self._free[:count], self._free[count:]
        self._holders.update(taken)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Count one more sequence that holds these pages."""
        self._holders.update(pages)

    def drop(self, pages: Iterable[int]) -> None:
        """Count one sequence less that holds these pages."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)

    def own(self, pages: list[int]) -> list[int]:
        """Return the same pages to write into: those that others hold too are replaced by copies."""
        shared = [page for page in pages if self._holders[page] > 1]
        if not shared:
            return pages
        copies = dict(zip(shared, self.copy(shared), strict=True))
        self.drop(shared)
        return [copies.get(page, page) for page in pages]

    def references(self) -> int:
        """Return the number of holders of all pages together."""
        return self._holders.total()

    def shrink(self, spare: int) -> dict[int, int]:
        """Free the memory of free pages but ``spare`` of them.

        Returns the new numbers of the pages that are held, by their old ones.

        spare: free pages that stay.
        """
        held = sorted(self._holders)
        kept = held + self._free[:spare]
        self.fields = {name: f[kept] for name, f in self.fields.items()}
        moved = {old: new for new, old in enumerate(held)}
        self._holders = Counter({moved[page]: count for page, count in self._holders.items()})
        self._free = list(range(len(held), len(kept)))
        return moved

    def copy(self, pages: list[int]) -> list[int]:
        """Take new pages with the same content."""
        fresh = self.take(len(pages))
        for f in self.fields.values():
            f[fresh] = f[pages]
        return fresh
