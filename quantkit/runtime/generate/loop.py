"""The generation loop: prefill, then decode, for a batch of prompts over the paged cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.kvscheme import PAGE_TOKENS
from quantkit.errors import RequestError
from quantkit.runtime.generate.sampling import GenerationOptions, Sampler
from quantkit.runtime.generate.text_stream import TextStream
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache

PREFILL_TOKENS = 512  # a long prompt is read in pieces of this many tokens, which bounds the memory of activations


@dataclass(frozen=True)
class Generation:
    """One answer and how long it took.

    tokens: generated ids, the end token excluded, those of a stop string included.
    finish_reason: "stop" (end token, stop token or stop string) or "length" (max_tokens).
    time_to_first_token, inter_token_latencies: in seconds, as this prompt saw them (a batch shares them).
    tokens_per_second: of the decode phase, this sequence alone; 0 for a single token.
    kv_cache_bytes: of cache pages in use when it ended, the mean of the sequences left then; shared pages count once.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    time_to_first_token: float
    inter_token_latencies: list[float]
    kv_cache_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        spent = sum(self.inter_token_latencies)
        return len(self.inter_token_latencies) / spent if spent else 0.0


@dataclass(frozen=True)
class Piece:
    """A step of one sequence: text that is now certain, and the finished answer with the last piece."""

    row: int
    text: str
    done: Generation | None = None


class Steps(Protocol):
    """What the generation loop needs of a model."""

    device: torch.device

    @property
    def tokenizer(self) -> Any: ...
    def new_cache(self, capacity: int) -> KVCache: ...
    def step(self, ids: Tensor, cache: Any, counts: Sequence[int] | None = None) -> Tensor:
        """Run tokens: final hidden states ``[batch, tokens, hidden]``; keys and values are cached.

        ids: ``[batch, tokens]``. counts: sequence b has the last ``counts[b]`` of them; None: all.
        """

    def head(self, hidden: Tensor) -> Tensor: ...

    @property
    def graph_decoder(self) -> Any:
        """Captured decode steps (``cuda_graphs.GraphDecoder``), or None."""


class Feed(Protocol):
    """Where tokens come from, a step at a time."""

    def next(self) -> list[int]:
        """The next token of every sequence that is left."""

    def keep(self, kept: Sequence[int]) -> None:
        """Only these, by their place in the last ``next``, go on."""

    def cached_bytes(self) -> int:
        """Bytes of the cache's pages, all sequences."""

    def close(self) -> None: ...


@dataclass
class _Sequence:
    row: int
    sampler: Sampler
    stream: TextStream
    options: GenerationOptions
    prompt_tokens: int
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reason: str | None = None

    def take(self, token: int, now: float) -> str:
        """Accept a token; returns text that is certain, sets ``reason`` at the end."""
        self.times.append(now)
        if token in self.ends:
            self.reason = "stop"
            return self.stream.finish()
        self.tokens.append(token)
        text = self.stream.push(token)
        if self.stream.stopped:
            self.reason = "stop"
        elif len(self.tokens) == self.options.max_tokens:
            text += self.stream.finish()
            # The held-back end may complete a stop string when the last character is flushed.
            self.reason = "stop" if self.stream.stopped else "length"
        return text

    def result(self, start: float, kv_bytes: int) -> Generation:
        between = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        first = self.times[0] - start
        return Generation(
            self.stream.text, self.tokens, self.reason or "length", self.prompt_tokens, first, between, kv_bytes
        )


@torch.inference_mode()  # on the generator as a whole: a `with` inside would leak to the consumer between yields
def run(
    model: Steps,
    prompts: Sequence[Sequence[int]],
    options: Sequence[GenerationOptions],
    *,
    end_tokens: Sequence[int],
    context: int | None,
) -> Iterator[Piece]:
    """Generate for a batch of prompts (token ids), one ``Piece`` for each sequence and step.

    Prompts of different lengths are padded on the left and masked; sequences that end leave the batch. Raises
    RequestError for an empty prompt or one that does not fit the context with its ``max_tokens``.
    """
    for prompt, one in zip(prompts, options, strict=True):
        check_length(len(prompt), one.max_tokens, context)
    most = max(one.max_tokens for one in options)
    if model.graph_decoder is not None:
        model.graph_decoder.prepare(
            options, max(map(len, prompts)) + most
        )  # compiled and captured before any clock runs
    start = time.perf_counter()
    live = [
        _sequence(model, row, prompt, one, end_tokens)
        for row, (prompt, one) in enumerate(zip(prompts, options, strict=True))
    ]
    feed = _feed(model, live, prompts, max(map(len, prompts)) + most)
    try:
        while live:
            raise_if_interrupted()
            chosen = feed.next()
            now = time.perf_counter()
            for sequence, token in zip(live, chosen, strict=True):
                text = sequence.take(token, now)
                done = sequence.result(start, feed.cached_bytes() // len(live)) if sequence.reason else None
                yield Piece(sequence.row, text, done)
            kept = [i for i, sequence in enumerate(live) if sequence.reason is None]
            if len(kept) < len(live):
                live = [live[i] for i in kept]
                feed.keep(kept)
    finally:
        feed.close()


def _feed(model: Steps, live: list[_Sequence], prompts: Sequence[Sequence[int]], until: int) -> Feed:
    """Read the prompts; what follows is captured steps where there are such, else one step after the other."""
    cache, logits = _prefill(model, prompts, until)
    if model.graph_decoder is not None:
        run: Feed | None = model.graph_decoder.begin(cache, live, logits, until)
        if run is not None:
            return run
    return _Stepwise(model, live, cache, transformers_cache(cache), logits)


class _Stepwise:
    """Each token is chosen on the host, then the next step is started."""

    def __init__(self, model: Steps, live: list[_Sequence], cache: KVCache, paged_cache: Any, logits: Tensor) -> None:
        self._model, self._cache, self._paged_cache = model, cache, paged_cache
        self._samplers = [sequence.sampler for sequence in live]
        self._logits: Tensor | None = logits
        self._chosen: list[int] = []

    def next(self) -> list[int]:
        logits, self._logits = self._logits, None
        if logits is None:
            step = torch.tensor([[token] for token in self._chosen], device=self._model.device)
            logits = self._model.head(self._model.step(step, self._paged_cache))[:, -1]
        self._chosen = [sampler(row) for sampler, row in zip(self._samplers, logits, strict=True)]
        return self._chosen

    def keep(self, kept: Sequence[int]) -> None:
        if not kept:
            return
        self._cache.select(kept)
        self._samplers = [self._samplers[i] for i in kept]
        self._chosen = [self._chosen[i] for i in kept]

    def cached_bytes(self) -> int:
        return self._cache.nbytes()

    def close(self) -> None:
        """Nothing is held."""


def _sequence(
    model: Steps, row: int, ids: Sequence[int], options: GenerationOptions, end_tokens: Sequence[int]
) -> _Sequence:
    ends = frozenset(options.stop_tokens) | (frozenset() if options.ignore_eos else frozenset(end_tokens))
    stream = TextStream(model.tokenizer, ids, options.stop)
    return _Sequence(row, Sampler(options, list(ids)), stream, options, len(ids), ends)


def _prefill(model: Steps, prompts: Sequence[Sequence[int]], until: int) -> tuple[KVCache, Tensor]:
    """Read the prompts: the cache, and the logits of their last tokens ``[batch, vocab]``.

    A beginning that all prompts share is read once.
    """
    cache = model.new_cache(until)
    # A packed cache is read as it is when a piece begins: only whole pieces can be shared without changing what
    # follows.
    shared = shared_tokens(prompts, PREFILL_TOKENS if cache.quantized else PAGE_TOKENS)
    if shared:
        _read(model, cache, [prompts[0][:shared]])
        prefix, cache = cache, cache.fork([0] * len(prompts))
        prefix.select([])  # its pages are the sequences' own now, and free when the last of them leaves
    hidden = _read(model, cache, [prompt[shared:] for prompt in prompts])
    return cache, model.head(hidden)[:, -1]


def _read(model: Steps, cache: KVCache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Read prompts into a cache: final hidden states of the last tokens ``[batch, 1, hidden]``.

    Every prompt is cut into pieces from its own beginning, so that its result does not depend on the others.
    """
    paged_cache = transformers_cache(cache)
    ends: dict[int, Tensor] = {}
    for first in range(0, max(map(len, prompts)), PREFILL_TOKENS):
        pieces = [prompt[first : first + PREFILL_TOKENS] for prompt in prompts]
        ids, counts = pad_left(pieces, model.device)
        hidden = model.step(ids, paged_cache, counts)
        for row, (prompt, piece) in enumerate(zip(prompts, pieces, strict=True)):
            if piece and first + len(piece) == len(prompt):
                ends[row] = hidden[row : row + 1, -1:]
    return torch.cat([ends[row] for row in range(len(prompts))])


def shared_tokens(prompts: Sequence[Sequence[int]], unit: int) -> int:
    """Number of tokens, a multiple of ``unit``, that all prompts begin with; 0 for a single prompt.

    Each prompt has at least one token more.
    """
    if len(prompts) < 2:
        return 0
    same, least = 0, min(map(len, prompts))
    while same < least - 1 and all(prompt[same] == prompts[0][same] for prompt in prompts):
        same += 1
    return same // unit * unit


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, list[int] | None]:
    """Ids ``[batch, longest]`` padded on the left, and the number of real ones of each, or None if nothing was padded.

    The value of the padding id does not matter, because it is never kept: 0 exists in every vocabulary.
    """
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    counts = [len(ids) for ids in prompts]
    return padded, None if min(counts) == longest else counts


def check_length(prompt: int, max_tokens: int, context: int | None) -> None:
    """Raises RequestError if a prompt is empty, or prompt and answer do not fit the context."""
    if not prompt:
        raise RequestError(
            "the prompt is empty (no tokens, and this model has no token for a beginning). Give some text."
        )
    if context is None or prompt + max_tokens <= context:
        return
    room = context - prompt
    remedy = f"Use --max-tokens {room} or less." if room > 0 else "Shorten the prompt."
    raise RequestError(
        f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: together more than the model's context of"
        f" {context}. {remedy}"
    )
