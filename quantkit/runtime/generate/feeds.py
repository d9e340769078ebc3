"""The source of a batch's tokens, a step at a time: all sequences together, or each computed as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quantkit.runtime.generate.prefill import PREFILL_TOKENS, Beside, Steps, read, shared_tokens
from quantkit.runtime.generate.sampling import Sampler
from quantkit.runtime.kv_cache.cache import KVCache, joined
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache


class Feed(Protocol):
    """A source of tokens, a step at a time."""

    def next(self) -> list[int]:
        """Return the next token of every sequence that is left."""

    def keep(self, kept: Sequence[int]) -> None:
        """Go on with these sequences only.

        kept: their places in the last ``next``.
        """

    def cached_bytes(self) -> int:
        """Return the bytes of the cache's pages, all sequences."""

    def close(self) -> None: ...


class Together:
    """All sequences in one step; each token is chosen on the host, then the next step is started."""

    def __init__(self, model: Steps, samplers: Sequence[Sampler], cache: KVCache, logits: Sequence[Tensor]) -> None:
        self._model, self._cache, self._paged_cache = model, cache, transformers_cache(cache)
        self._samplers = list(samplers)
        self._logits: Sequence[Tensor] | None = logits
        self._chosen: list[int] = []

    def next(self) -> list[int]:
        """Run a step, unless the prompt's logits wait, and choose the next tokens."""
        logits, self._logits = self._logits, None
        if logits is None:
            logits = self._head(self._model.step(self._ids(), self._paged_cache))
        self._chosen = [sampler(row) for sampler, row in zip(self._samplers, logits, strict=True)]
        return self._chosen

    def _ids(self) -> Tensor:
        return torch.tensor([[token] for token in self._chosen], device=self._model.device)

    def _head(self, hidden: Tensor) -> Sequence[Tensor]:
        """Return logits ``[vocab]`` of each sequence's last token, from hidden states ``[batch, tokens, hidden]``."""
        return self._model.head(hidden)[:, -1].unbind()

    def __len__(self) -> int:
        return len(self._samplers)

    def keep(self, kept: Sequence[int]) -> None:
        if not kept:
            return
        self._cache.select(kept)
        self._samplers = [self._samplers[i] for i in kept]
        self._chosen = [self._chosen[i] for i in kept]

    def cached_bytes(self) -> int:
        return self._cache.nbytes()

    def close(self) -> None:
        """Do nothing: nothing is held."""


class _Group(Together):
    """Sequences whose steps, as the model states, do not change a bit of one another's numbers."""

    def _head(self, hidden: Tensor) -> Sequence[Tensor]:
        logits = [self._model.head(rows)[:, -1] for rows in hidden.split(self._model.invariant_head)]
        # each in memory of its own: how a row is aligned may decide which instructions read it
        return [row.clone() for rows in logits for row in rows]


class Separate:
    """Every sequence computed as if it were alone (``GenerationOptions.deterministic``).

    A matrix product rounds differently for another number of rows, and so does much else in torch (attention over
    padding, the ends of vectors, the share of a thread). So torch computes nothing that depends on the others:
    prompts are read one by one, and a step takes as many sequences as the model states (``invariant_step``), one
    if it states nothing.
    """

    def __init__(
        self,
        model: Steps,
        samplers: Sequence[Sampler],
        prompts: Sequence[Sequence[int]],
        until: int,
        beside: Sequence[Beside] = (),
    ) -> None:
        """Read the prompts. beside: images of each; none at all: no prompt has any."""
        self._groups: list[_Group] = []
        images = any(beside)
        # whole pieces alone are read by the very calls that would read them for one prompt
        shared = 0 if model.alone or images else shared_tokens(prompts, PREFILL_TOKENS)
        prefix = model.new_cache(until)
        if shared:
            read(model, prefix, [prompts[0][:shared]])
        together = 1 if images else model.invariant_step  # what a model keeps of images is kept of one sequence
        for first in range(0, len(prompts), together):
            rows = range(len(prompts))[first : first + together]
            caches, logits = [], []
            for row in rows:
                cache = prefix.fork([0]) if shared else model.new_cache(until)
                hidden = read(model, cache, [prompts[row][shared:]], beside[row] if images else None)
                logits.append(model.head(hidden)[0, -1])
                caches.append(cache)
            self._groups.append(_Group(model, [samplers[row] for row in rows], joined(caches), logits))
        if shared:
            prefix.select([])

    def next(self) -> list[int]:
        return [token for group in self._groups for token in group.next()]

    def keep(self, kept: Sequence[int]) -> None:
        first, left = 0, []
        for group in self._groups:
            places = [place - first for place in kept if first <= place < first + len(group)]
            first += len(group)
            group.keep(places)
            if places:
                left.append(group)
        self._groups = left

    def cached_bytes(self) -> int:
        return sum(group.cached_bytes() for group in self._groups)

    def close(self) -> None:
        """Do nothing: nothing is held."""
