"""``quantkit bench``: how fast a model prefills and decodes, and how near that is to the memory's bandwidth."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from quantkit.core.host import current_rss, peak_rss, release_free_memory, restart_peak, usable_cpus
from quantkit.errors import RequestError
from quantkit.evaluate.environment import hardware, versions
from quantkit.evaluate.perplexity import OnProgress
from quantkit.evaluate.speed.result import Cell, Speed
from quantkit.evaluate.speed.traffic import (
    Bandwidth,
    kv_bytes_per_step,
    measure_bandwidth,
    model_memory,
    wait,
    weight_bytes_per_step,
)
from quantkit.model.language import text_config

if TYPE_CHECKING:
    from quantkit.core.kvscheme import KVScales
    from quantkit.runtime.model import Model


def whole_numbers(text: str, option: str) -> list[int]:
    """Read ``"1,8"`` as ``[1, 8]``. Raises RequestError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise RequestError(f"{option} {text!r}: expected whole numbers above 0, separated by commas: {option} 1,8")
    return list(dict.fromkeys(int(part) for part in parts))


@dataclass(frozen=True, slots=True)
class Workload:
    """What is timed: every batch size with every prompt length, in tokens.

    new_tokens: of each answer. repeat: runs of each cell after one that is not counted. seed: of the random prompts.
    """

    batches: list[int]
    prompts: list[int]
    new_tokens: int
    repeat: int
    seed: int


def bench(
    model: str | Path,
    *,
    batch: str = "1",
    prompt: str = "128",
    new_tokens: int = 64,
    repeat: int = 3,
    threads: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    kv_bits: int | str | None = None,
    kv_scales: KVScales | None = None,
    kernel: str | None = None,
    head_bits: int | None = None,
    keep_dense: bool = False,
    graphs: bool = True,
    seed: int = 0,
    progress: OnProgress | None = None,
) -> Speed:
    """Load a model and time it over a grid of batch sizes and prompt lengths.

    Prompts are random token ids; decoding is greedy and goes on past end tokens, through the same loop as ``generate``.

    batch, prompt: numbers separated by commas. new_tokens: of each answer, 2 at least. repeat: runs of each cell after
    one that is not counted. threads: of torch; None leaves them. kv_bits, kv_scales, kernel, head_bits, keep_dense,
    graphs: as in ``load``.

    Raises RequestError for an option that is wrong or a cell that does not fit the model's context.
    """
    work = Workload(whole_numbers(batch, "--batch"), whole_numbers(prompt, "--prompt"), new_tokens, repeat, seed)
    _check(work, threads)
    from quantkit.runtime.load import load

    with _torch_threads(threads):
        start = time.perf_counter()
        loaded = load(
            model, device=device, dtype=dtype, kv_bits=kv_bits, kv_scales=kv_scales, kernel=kernel,
            head_bits=head_bits, keep_dense=keep_dense, graphs=graphs,
        )  # fmt: skip
        if kernel is not None and not loaded.layouts():
            raise RequestError(f"--kernel {kernel} has no effect: no weight of {model} is quantized. Leave it out.")
        how = {
            "model": str(model),
            "kernel": kernel or "auto",
            "load_seconds": time.perf_counter() - start,
            "keep_dense": keep_dense,
        }
        return _bench(loaded, work, progress, how)


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads meanwhile; None leaves them."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(work: Workload, threads: int | None) -> None:
    for name, value, least in (
        ("--new-tokens", work.new_tokens, 2),
        ("--repeat", work.repeat, 1),
        ("--threads", threads, 1),
        ("--seed", work.seed, 0),
    ):
        if value is not None and value < least:
            raise RequestError(f"{name} {value}: expected {least} or more.")
    if threads is not None and threads > usable_cpus():  # threads that spin for each other's cores: minutes for a token
        raise RequestError(f"--threads {threads}: this process may use {usable_cpus()} CPUs. Use that many at most.")


def _bench(model: Model, work: Workload, progress: OnProgress | None, how: dict[str, Any]) -> Speed:
    """Time a loaded model. how: the fields of ``Speed`` that say how it was loaded."""
    from quantkit.runtime.path_words import path_words

    for length in work.prompts:
        if model.context is not None and length + work.new_tokens > model.context:
            raise RequestError(
                f"--prompt {length} and --new-tokens {work.new_tokens} are together more than the model's context of"
                f" {model.context}. Make one of them smaller."
            )
    bandwidth = measure_bandwidth(model.device)
    cells: list[Cell] = []
    for size in work.batches:
        for length in work.prompts:
            if progress is not None:
                progress("bench", len(cells), len(work.batches) * len(work.prompts))
            cells.append(_measure_cell(model, size, length, work, bandwidth))
    if progress is not None:
        progress("bench", len(cells), len(cells))
    return Speed(
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_bits=model.kv_bits,
        kv_scales=model.kv_plan.kind,
        kv_stored_bits=model.kv_stored_bits,
        decoding=model.decoding,
        head_bits=model.head_bits,
        path=path_words(model),
        layouts=model.layouts(),
        threads=torch.get_num_threads(),
        seed=work.seed,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        bandwidth=bandwidth,
        memory=model_memory(model),
        cells=cells,
        versions=versions(),
        hardware=hardware(),
        **how,
    )


def _measure_cell(model: Model, batch: int, prompt: int, work: Workload, bandwidth: Bandwidth) -> Cell:
    """Time one batch size and prompt length of a loaded model."""
    sequences = _prompts(model, batch, prompt, work.seed)
    # The first run pays for page faults, threads and compiled kernels.
    _run(model, sequences, min(work.new_tokens, 4))
    release_free_memory()
    follows = _peak_follows(model.device)
    base = _used(model.device)
    first, latencies, cache = [], [], 0
    for _ in range(work.repeat):
        answers = _run(model, sequences, work.new_tokens)
        first.append(answers[0].time_to_first_token)
        latencies += answers[0].inter_token_latencies
        cache = sum(answer.kv_cache_bytes for answer in answers)
    peak = _peak(model.device) - base - cache if follows else None
    latencies.sort()
    step = median(latencies)
    read = weight_bytes_per_step(model, batch) + kv_bytes_per_step(model, prompt + work.new_tokens / 2, batch)
    return Cell(
        batch=batch,
        prompt=prompt,
        new_tokens=work.new_tokens,
        repeats=work.repeat,
        time_to_first_token=median(first),
        prefill_tokens_per_second=batch * prompt / median(first),
        inter_token_latency_p50=step,
        inter_token_latency_p99=latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
        decode_tokens_per_second=batch * len(latencies) / sum(latencies),
        bytes_per_step=read,
        bytes_per_token=read / batch,
        gb_per_s=read / step / 1e9,
        share_of_bandwidth=read / step / bandwidth.best,
        kv_cache_bytes=cache,
        activation_bytes=None if peak is None else max(0, peak),
    )


def _prompts(model: Model, batch: int, length: int, seed: int) -> list[list[int]]:
    """Draw random token ids: ``batch`` sequences of ``length``."""
    vocab = int(text_config(model.module).vocab_size)
    generator = torch.Generator().manual_seed(seed)
    sequences: list[list[int]] = torch.randint(0, vocab, (batch, length), generator=generator).tolist()
    return sequences


def _run(model: Model, sequences: list[list[int]], new_tokens: int) -> list[Any]:
    """Return the finished answers to a batch of prompts."""
    from quantkit.runtime.generate.loop import run
    from quantkit.runtime.generate.sampling import GenerationOptions

    options = GenerationOptions(max_tokens=new_tokens, ignore_eos=True)
    wait(model.device)
    pieces = run(model, sequences, [options] * len(sequences), end_tokens=(), context=model.context)
    return [piece.done for piece in pieces if piece.done is not None]


def _peak_follows(device: torch.device) -> bool:
    """Start measuring the peak memory anew; False where the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return restart_peak()


def _peak(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else peak_rss(since_restart=True)


def _used(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else current_rss()
