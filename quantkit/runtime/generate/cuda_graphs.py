"""Decode ahead of the host: each step is captured once in a CUDA graph, its tokens are read a few steps later.

Tokens are chosen and fed back on the device. A ``Slot`` holds the static tensors of a batch size and the graphs that
run on them: token ids, positions, block tables, the addresses of the pages, options and random numbers of the sampler.
A step is one replay. Its tokens are copied to pinned memory behind it, and the host reads those of ``LAG`` steps
before, so the device never waits for the host: what was computed beyond an end or stop token is thrown away. Pages for
the whole answer are reserved beforehand (``kv_cache/reserve_ahead.py``).

On a CPU (Triton's interpreter, tests) nothing is captured; everything else is the same code.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.errors import QuantkitWarning
from quantkit.runtime.decode.gpu_step import GpuStep, State
from quantkit.runtime.generate.device_sampling import DeviceSampler, SamplingMode
from quantkit.runtime.generate.sampling import GenerationOptions, Sampler
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.device_tables import DeviceTables
from quantkit.runtime.kv_cache.paged_layer import LayerSpec
from quantkit.runtime.kv_cache.reserve_ahead import commit

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # sequences; a batch runs in the next larger one
LAG = 3  # steps that the host is behind
FIRST_TOKENS = 2048  # positions that a slot has tables for, at least; then powers of two


class Answering(Protocol):
    """One request while it is decoded: its sampler, its options, and the tokens answered so far."""

    sampler: Sampler
    options: GenerationOptions
    tokens: list[int]


class Mailbox:
    """Tokens on their way from the device: ``put`` does not wait, ``get`` waits until that step is done."""

    def __init__(self, sequences: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host_tokens = torch.zeros(LAG + 2, sequences, dtype=torch.int64, pin_memory=self._cuda)
        self._done = [torch.cuda.Event() for _ in range(LAG + 2)] if self._cuda else []

    def put(self, number: int, tokens: Tensor) -> None:
        """Start copying the tokens of a step to the host, without waiting."""
        index = number % (LAG + 2)
        self._host_tokens[index].copy_(tokens, non_blocking=True)
        if self._cuda:
            self._done[index].record(torch.cuda.current_stream(tokens.device))

    def get(self, number: int) -> list[int]:
        """Return the tokens of a step, once it is done."""
        index = number % (LAG + 2)
        if self._cuda:
            self._done[index].synchronize()
        tokens: list[int] = self._host_tokens[index].tolist()
        return tokens


class Slot:
    """Static tensors for a number of sequences, and a graph for each ``SamplingMode``.

    sequences: how many.
    tokens: positions that the longest may have.
    """

    def __init__(self, sequences: int, tokens: int, step: GpuStep, head: Any, specs: Sequence[LayerSpec]) -> None:
        device = step.device
        self.sequences, self.tokens, self.step, self.head = sequences, tokens, step, head
        self.tables = DeviceTables(sequences, tokens, specs, step.heads.dim, device)
        ids = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
        self.state = State(ids, self.tables, step.workspace(sequences, specs), step.reach(tokens))
        self.choices = DeviceSampler(sequences, device)
        self.uniform = torch.zeros(sequences, tokens, dtype=torch.float64, device=device)
        self.chosen = torch.zeros(1, dtype=torch.int64, device=device)  # tokens chosen since ``fill``
        self.mailbox = Mailbox(sequences, device)
        self.graphs: dict[SamplingMode, Any] = {}

    def run(self, mode: SamplingMode) -> None:
        """Run one step: read the tokens in ``ids``, choose those after them."""
        logits = self.head(self.step.forward(self.state))[:, -1]
        self.tables.length.add_(1)
        self.take(logits, mode)

    def take(self, logits: Tensor, mode: SamplingMode) -> None:
        """Choose tokens from logits ``[sequences, vocab]``, for the next step to read."""
        uniform = self.uniform.index_select(1, self.chosen)[:, 0] if mode.draws else self.uniform[:, 0]
        tokens = self.choices.choose(logits, uniform, mode)
        self.state.ids.copy_(tokens[:, None])
        self.chosen.add_(1)

    def replay(self, mode: SamplingMode) -> None:
        """Replay the captured step, or run it where none was captured."""
        graph = self.graphs.get(mode)
        if graph is None:
            self.run(mode)
            return
        with torch.cuda.device_of(self.chosen):  # a graph runs on the stream of the device that is current
            graph.replay()

    def fill(self, cache: KVCache, live: Sequence[Answering], draws: Sequence[Tensor], until: int) -> None:
        """Fill the static tensors from a cache and its requests.

        cache: of the batch.
        live: the requests, one per sequence.
        draws: random numbers that each sequence has not used yet.
        until: reserve pages for positions up to here.
        """
        self.tables.fill(cache, until)
        self.choices.fill([request.options for request in live])
        for row, numbers in enumerate(draws):
            self.uniform[row, : len(numbers)] = numbers.to(self.uniform)
        self.chosen.zero_()

    def remember(self, live: Sequence[Answering], vocab: int) -> None:
        """Set the tokens of prompt and answer that each sequence's repetition penalty reads."""
        self.choices.remember([[*request.sampler.seen, *request.tokens] for request in live], vocab)


class GraphDecoder:
    """The captured decode steps of a model; ``begin`` starts a batch. One batch at a time: another one finds it busy.

    head: hidden states -> logits.
    specs: of the model's caches.
    capture: whether steps are captured (a CUDA device).
    """

    def __init__(self, step: GpuStep, head: Any, specs: Sequence[LayerSpec], vocab: int, *, capture: bool) -> None:
        self.step, self.head, self.specs, self.vocab, self.capture = step, head, specs, vocab, capture
        self.broken = ""  # why nothing can be captured
        self.guard = threading.Lock()
        self._slots: dict[int, Slot] = {}
        self._tokens = FIRST_TOKENS
        self._stream: Any = None
        self._pool: Any = None

    def prepare(self, options: Sequence[GenerationOptions], until: int) -> None:
        """Capture what a batch needs, if it is not captured yet.

        That takes some seconds, once for each batch size and way of sampling.

        options: of each sequence.
        until: tokens of the longest sequence at the end.
        """
        if self.takes(len(options)) and self.guard.acquire(blocking=False):
            try:
                self.slot(options, until)
            finally:
                self.guard.release()

    def takes(self, sequences: int) -> bool:
        """Tell whether so many sequences can be decoded by captured steps."""
        return sequences <= BUCKETS[-1] and not self.broken and self.step.reads(self.specs)

    def begin(self, cache: KVCache, live: Sequence[Answering], logits: Tensor, until: int) -> Run | None:
        """Start decoding after a prompt; return None where steps must be run one by one.

        cache: holds the prompts.
        live: the requests, one per sequence.
        logits: ``[sequences, vocab]`` of the prompts' last tokens.
        until: tokens of the longest sequence at the end.
        """
        if not self.takes(len(live)) or not self.guard.acquire(blocking=False):
            return None
        run = None
        try:
            slot = self.slot([request.options for request in live], until)
            if not self.broken:
                run = Run(self, slot, cache, live, logits, until)
        finally:
            if run is None:  # refused, or out of memory
                self.guard.release()
        return run

    def slot(self, options: Sequence[GenerationOptions], until: int) -> Slot:
        """Return the slot for these requests, with its graph.

        There is no graph where capturing failed (``broken``): the slot then launches kernel by kernel.

        options: of each sequence.
        until: tokens of the longest sequence at the end.
        """
        mode = SamplingMode.of(options)
        sequences = bucket(len(options))
        self._tokens = max(self._tokens, 1 << (until - 1).bit_length())
        slot = self._slots.get(sequences)
        if slot is None or slot.tokens < until:
            slot = self._slots[sequences] = Slot(sequences, self._tokens, self.step, self.head, self.specs)
        if mode.penalizes and slot.choices.seen is None:
            slot.choices.remember([], self.vocab)
        if self.capture and not self.broken and mode not in slot.graphs:
            try:
                slot.graphs[mode] = self._captured(slot, mode)
            except RuntimeError as error:
                self.broken = (str(error) or type(error).__name__).splitlines()[0]
                warnings.warn(
                    f"the decode step cannot be captured in a CUDA graph ({self.broken}): it is launched kernel by"
                    " kernel.",
                    QuantkitWarning,
                    stacklevel=2,
                )
        return slot

    def _captured(self, slot: Slot, mode: SamplingMode) -> Any:
        """Run the step twice on no sequence (kernels are compiled, workspaces made), then record it."""
        slot.tables.pads.fill_(-1)
        slot.chosen.zero_()
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self.step.device), torch.cuda.graph_pool_handle()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.step.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                slot.run(mode)
        torch.cuda.current_stream(self.step.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            slot.run(mode)
        return graph


class Run:
    """One batch being decoded: a source of tokens as ``loop.run`` takes them. Holds the decoder until ``close``."""

    def __init__(
        self, loop: GraphDecoder, slot: Slot, cache: KVCache, live: Sequence[Answering], logits: Tensor, until: int
    ) -> None:  # fmt: skip
        self.loop, self.slot, self.cache, self.live, self.until = loop, slot, cache, list(live), until
        self.mode = SamplingMode.of([request.options for request in live])
        self._draws = [request.sampler.uniforms(request.options.max_tokens) for request in live]
        self._live_indices = list(range(len(live)))  # of the slot, of the sequences that still answer
        self._launched = self._read = (
            0  # steps since ``_start``, the one that is not a step (the prompt's logits) included
        )
        self._start()
        whole = logits.new_zeros(slot.sequences, logits.shape[-1])
        whole[: len(live)] = logits
        slot.take(whole, self.mode)
        self._post()

    def _start(self) -> None:
        self._lengths = self.cache.lengths
        self._base = max(self._lengths)
        left = [draws[len(request.tokens) :] for draws, request in zip(self._draws, self.live, strict=True)]
        self.slot.fill(self.cache, self.live, left, self.until)
        if self.mode.penalizes:
            self.slot.remember(self.live, self.loop.vocab)

    def _post(self) -> None:
        self.slot.mailbox.put(self._launched, self.slot.state.ids[:, 0])
        self._launched += 1

    def cached_bytes(self) -> int:
        """Return the cache bytes of the sequences that still answer, as far as the host has read.

        Pages of sequences that left stay until the slot shrinks.
        """
        read = self._read - 1
        return sum(self.cache.sequence_bytes(self._lengths[index] + read) for index in self._live_indices)

    def next(self) -> list[int]:
        """Return the next token of every sequence."""
        smaller = bucket(len(self._live_indices)) < self.slot.sequences
        if smaller and self._launched == self._read:
            self._shrink()
            smaller = False
        while not smaller and self._launched - self._read <= LAG and self._base + self._launched < self.until:
            self.slot.replay(self.mode)
            self._post()
        tokens = self.slot.mailbox.get(self._read)
        self._read += 1
        return [tokens[index] for index in self._live_indices]

    def keep(self, kept: Sequence[int]) -> None:
        """Go on with these sequences only."""
        self._live_indices = [self._live_indices[i] for i in kept]
        self.live = [self.live[i] for i in kept]
        self._draws = [self._draws[i] for i in kept]

    def _shrink(self) -> None:
        """Move into a smaller slot: all steps that were launched have been read."""
        steps = self._launched - 1
        for layer in self.cache.layers:
            commit(layer, [length + steps for length in self._lengths])
        indices = torch.tensor(self._live_indices, device=self.slot.chosen.device)
        last = self.slot.state.ids[indices]
        self.cache.select(self._live_indices)
        self.until -= self._base + steps - self.cache.length  # the longest sequence may have left
        self._live_indices = [*range(len(indices))]
        self._launched = self._read = 1
        self.mode = SamplingMode.of([request.options for request in self.live])
        self.slot = self.loop.slot([request.options for request in self.live], self.until)
        self._start()
        self.slot.state.ids[: len(indices)] = last

    def close(self) -> None:
        """Let another batch begin."""
        self.loop.guard.release()


def bucket(sequences: int) -> int:
    """Return the batch size that so many sequences run in."""
    return next(size for size in BUCKETS if size >= sequences)
