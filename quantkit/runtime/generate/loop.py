"""The generation loop: prefill, then decode, for a batch of prompts over the paged cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import RequestError
from quantkit.runtime.generate.feeds import Feed, Separate, Together
from quantkit.runtime.generate.prefill import Beside, Steps, prefill
from quantkit.runtime.generate.sampling import GenerationOptions, Sampler
from quantkit.runtime.generate.text_stream import TextStream


@dataclass(frozen=True)
class Generation:
    """One answer and how long it took.

    text: the answer, without a stop string.
    tokens: generated ids, the end token excluded, those of a stop string included.
    finish_reason: "stop" (end token, stop token or stop string) or "length" (max_tokens).
    prompt_tokens: tokens of the prompt.
    time_to_first_token: in seconds, as this prompt saw it (a batch shares it).
    inter_token_latencies: in seconds, in the same way.
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
        """Speed of the decode phase, of this sequence alone; 0 for a single token."""
        spent = sum(self.inter_token_latencies)
        return len(self.inter_token_latencies) / spent if spent else 0.0


@dataclass(frozen=True)
class Piece:
    """A step of one sequence: text that is now certain, and the finished answer with the last piece."""

    row: int
    text: str
    done: Generation | None = None


@dataclass
class _Sequence:
    """One sequence while it is generated."""

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
        """Accept a token and return text that is certain; set ``reason`` at the end."""
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
    beside: Sequence[Beside] = (),
    *,
    end_tokens: Sequence[int],
    context: int | None,
) -> Iterator[Piece]:
    """Generate for a batch of prompts, one ``Piece`` for each sequence and step.

    Prompts of different lengths are padded on the left and masked; sequences that end leave the batch.

    model: what reads prompts and runs steps.
    prompts: token ids.
    options: one per prompt.
    beside: images of each prompt; none at all: no prompt has any.
    end_tokens: ids that end an answer.
    context: tokens that the model can attend to, None without a limit.

    Raises RequestError for an empty prompt or one that does not fit the context with its ``max_tokens``.
    """
    for prompt, one in zip(prompts, options, strict=True):
        check_length(len(prompt), one.max_tokens, context)
    most = max(one.max_tokens for one in options)
    if model.graph_decoder is not None and not any(beside) and not any(one.deterministic for one in options):
        model.graph_decoder.prepare(
            options, max(map(len, prompts)) + most
        )  # compiled and captured before any clock runs
    start = time.perf_counter()
    live = [
        _sequence(model, row, prompt, one, end_tokens)
        for row, (prompt, one) in enumerate(zip(prompts, options, strict=True))
    ]
    feed = _feed(model, live, prompts, beside, max(map(len, prompts)) + most)
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


def _feed(
    model: Steps, live: list[_Sequence], prompts: Sequence[Sequence[int]], beside: Sequence[Beside], until: int
) -> Feed:
    """Read the prompts, and return captured steps where there are any, else one step after the other."""
    samplers = [sequence.sampler for sequence in live]
    if model.alone or any(beside) or _deterministic(live):
        return Separate(model, samplers, prompts, until, beside)
    cache, logits = prefill(model, prompts, until)
    if model.graph_decoder is not None:
        run: Feed | None = model.graph_decoder.begin(cache, live, logits, until)
        if run is not None:
            return run
    return Together(model, samplers, cache, logits.unbind())


def _deterministic(live: Sequence[_Sequence]) -> bool:
    """Tell whether no sequence may change a bit of another: if only one of them asks, all are computed so."""
    return any(sequence.options.deterministic for sequence in live)


def _sequence(
    model: Steps, row: int, ids: Sequence[int], options: GenerationOptions, end_tokens: Sequence[int]
) -> _Sequence:
    ends = frozenset(options.stop_tokens) | (frozenset() if options.ignore_eos else frozenset(end_tokens))
    stream = TextStream(model.tokenizer, ids, options.stop)
    return _Sequence(row, Sampler(options, list(ids)), stream, options, len(ids), ends)


def check_length(prompt: int, max_tokens: int, context: int | None) -> None:
    """Check that a prompt is not empty, and that prompt and answer fit the context.

    prompt: number of its tokens.
    max_tokens: new tokens at most.
    context: tokens that the model can attend to, None without a limit.

    Raises RequestError if not.
    """
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
