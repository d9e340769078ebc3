"""Read prompts into the paged cache, in pieces; a beginning that all share is read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache

Beside = Mapping[str, Tensor]  # what a model reads beside a prompt's tokens: images, by the names of its arguments
PREFILL_TOKENS = 512  # a long prompt is read in pieces of this many tokens, which bounds the memory of activations


class Steps(Protocol):
    """A model as the generation loop needs it."""

    device: torch.device

    @property
    def tokenizer(self) -> Any: ...
    def new_cache(self, capacity: int) -> KVCache: ...
    def step(
        self, ids: Tensor, cache: Any, counts: Sequence[int] | None = None, beside: Beside | None = None
    ) -> Tensor:
        """Run tokens: final hidden states ``[batch, tokens, hidden]``; keys and values are cached.

        ids: int64 ``[batch, tokens]``.
        cache: as ``transformers_cache`` returns it.
        counts: sequence b has the last ``counts[b]`` of the tokens; None: all.
        beside: images that stand among these tokens, of one sequence.
        """

    def head(self, hidden: Tensor) -> Tensor: ...

    @property
    def alone(self) -> bool:
        """Whether each sequence is computed by itself, its prompt in one piece."""

    @property
    def invariant_step(self) -> int:
        """How many sequences a decode step takes without one changing a bit of another's numbers: 1 or more."""

    @property
    def invariant_head(self) -> int:
        """How many rows of ``head`` are computed together without one changing a bit of another: 1 or more."""

    @property
    def graph_decoder(self) -> Any:
        """Captured decode steps (``cuda_graphs.GraphDecoder``), or None."""


def prefill(model: Steps, prompts: Sequence[Sequence[int]], until: int) -> tuple[KVCache, Tensor]:
    """Read the prompts; return the cache, and the logits of their last tokens ``[batch, vocab]``.

    A beginning that all prompts share is read once.

    model: what runs steps.
    prompts: token ids.
    until: tokens of the longest sequence at the end.
    """
    cache = model.new_cache(until)
    # A packed cache is read as it is when a piece begins: only whole pieces can be shared without changing what
    # follows.
    shared = shared_tokens(prompts, PREFILL_TOKENS if cache.quantized else PAGE_TOKENS)
    if shared:
        read(model, cache, [prompts[0][:shared]])
        prefix, cache = cache, cache.fork([0] * len(prompts))
        prefix.select([])  # its pages are the sequences' own now, and free when the last of them leaves
    hidden = read(model, cache, [prompt[shared:] for prompt in prompts])
    return cache, model.head(hidden)[:, -1]


def read(model: Steps, cache: KVCache, prompts: Sequence[Sequence[int]], beside: Beside | None = None) -> Tensor:
    """Read prompts into a cache; return final hidden states of the last tokens ``[batch, 1, hidden]``.

    Every prompt is cut into pieces from its own beginning, so that its result does not depend on the others.

    model: what runs steps.
    cache: gets the prompts' keys and values.
    prompts: token ids.
    beside: images of the prompt, of one only, which is then read in one piece.
    """
    paged_cache = transformers_cache(cache)
    if beside:
        return model.step(torch.tensor(prompts, device=model.device), paged_cache, None, beside)[:, -1:]
    ends: dict[int, Tensor] = {}
    longest = max(map(len, prompts))
    tokens = longest if model.alone else PREFILL_TOKENS
    for first in range(0, longest, tokens):
        pieces = [prompt[first : first + tokens] for prompt in prompts]
        ids, counts = pad_left(pieces, model.device)
        hidden = model.step(ids, paged_cache, counts)
        for row, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True)):
            if piece and first + len(piece) == len(prompt):
                ends[row] = hidden[row : row + 1, -1:]
    return torch.cat([ends[row] for row in range(len(prompts))])


def read_through_pages(model: Steps, ids: Tensor) -> Tensor:
    """Feed tokens to an empty cache so that attention reads packed pages; return all final hidden states.

    A layer's state takes several tokens only where it begins: of such a model they come one by one behind the first
    page.

    model: what runs steps.
    ids: int64 ``[batch, tokens]``; of a model whose sequences are computed by themselves, of one.
    """
    cache = transformers_cache(model.new_cache(ids.shape[1]))
    first, rest = ids[:, :PAGE_TOKENS], ids[:, PAGE_TOKENS:]
    pieces = rest.split(1 if model.alone else PAGE_TOKENS, dim=1) if rest.shape[1] else ()
    return torch.cat([model.step(piece, cache) for piece in (first, *pieces)], dim=1)


def shared_tokens(prompts: Sequence[Sequence[int]], unit: int) -> int:
    """Return the number of tokens, a multiple of ``unit``, that all prompts begin with; 0 for a single prompt.

    Each prompt has at least one token more.

    prompts: token ids.
    unit: tokens of a piece.
    """
    if len(prompts) < 2:
        return 0
    same, least = 0, min(map(len, prompts))
    while same < least - 1 and all(prompt[same] == prompts[0][same] for prompt in prompts):
        same += 1
    return same // unit * unit


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int] | None]:
    """Pad ids on the left: ``[batch, longest]``, and the number of real ones of each, None if nothing was padded.

    The value of the padding id does not matter, because it is never kept: 0 exists in every vocabulary.

    prompts: token ids.
    device: of the result.
    """
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    counts = [len(ids) for ids in prompts]
    return padded, None if min(counts) == longest else counts
