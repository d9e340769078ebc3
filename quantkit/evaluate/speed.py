"""``quantkit bench``: how fast a model reads a prompt and writes an answer, and how near that is to the memory's limit."""

from __future__ import annotations

import io
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from quantkit.core.host import current_rss, peak_rss, release_free_memory, restart_peak, usable_cpus
from quantkit.core.kvscheme import cache_words
from quantkit.errors import RequestError
from quantkit.evaluate.environment import hardware, versions
from quantkit.evaluate.perplexity import Progress
from quantkit.evaluate.traffic import (
    Bandwidth,
    Held,
    held,
    kv_bytes_per_step,
    measure_bandwidth,
    wait,
    weight_bytes_per_step,
)

if TYPE_CHECKING:
    from quantkit.core.kvscheme import Scales
    from quantkit.runtime.model import Model


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch size and prompt length; medians over the repeats, seconds and bytes.

    inter_token_latency_p50, _p99: over all steps of all repeats. decode_tokens_per_second: of the whole batch.
    bytes_per_step: weights and cached keys and values that a decode step reads, at the middle of the answer; bytes_per_token is
    its share of one sequence. gb_per_s: bytes_per_step / the median latency. share_of_bandwidth: of the best measured one.
    kv_cache_bytes: pages in use at the end, whole batch. activation_bytes: peak of the process (or device) above weights and
    pages during the run; None where the system does not tell.
    """

    batch: int
    prompt: int
    new_tokens: int
    repeats: int
    time_to_first_token: float
    prefill_tokens_per_second: float
    inter_token_latency_p50: float
    inter_token_latency_p99: float
    decode_tokens_per_second: float
    bytes_per_step: int
    bytes_per_token: float
    gb_per_s: float
    share_of_bandwidth: float
    kv_cache_bytes: int
    activation_bytes: int | None


@dataclass(frozen=True, slots=True)
class Speed:
    """A benchmark: the cells, what was held in memory, and all that decides the figures. decoding: see ``Model.decoding``."""

    model: str
    device: str
    dtype: str
    kv_bits: int | str
    kv_scales: str | None
    kv_stored_bits: float
    kernel: str
    head_bits: int | None
    keep_dense: bool
    decoding: str
    layouts: dict[str, int]
    threads: int
    seed: int
    load_seconds: float
    load_average: float | None
    bandwidth: Bandwidth
    memory: Held
    cells: list[Cell]
    versions: dict[str, str]
    hardware: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field. Bytes, seconds, bytes per second; ``gb_per_s`` in 1e9 bytes."""
        return asdict(self)

    def table(self, *, color: bool = False) -> str:
        """For people. color: with terminal styles."""
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("batch", "prompt", "first token", "prefill tok/s", "p50", "p99", "decode tok/s", "MB/token", "GB/s", "of peak", "KV MB", "scratch MB"):  # fmt: skip
            grid.add_column(name, justify="right", no_wrap=True, header_style="bold" if color else "")
        for cell in self.cells:
            grid.add_row(*_row(cell))
        console = Console(file=io.StringIO(), force_terminal=color, width=1000, highlight=False)  # the terminal wraps
        console.print(grid)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join([*(line.rstrip() for line in text.splitlines()), *self._notes()])

    def _notes(self) -> list[str]:
        held, band = self.memory, self.bandwidth
        layouts = ", ".join(f"{count} x {name}" for name, count in self.layouts.items()) or "no packed weights"
        load = "" if self.load_average is None else f", load average {self.load_average:.1f}"
        read = "" if not band.read else f"read {band.read / 1e9:.1f}, "
        return [
            f"memory      codes {held.codes / 1e6:.1f} MB, scales {held.scales / 1e6:.1f} MB, dense {held.dense / 1e6:.1f} MB, "
            f"KV cache {held.kv_per_token / 1e3:.1f} kB a token ({cache_words(self.kv_bits, self.kv_scales, self.kv_stored_bits)})",
            f"bandwidth   {read}copy {band.copy / 1e9:.1f} GB/s, {self.threads} thread{'s' * (self.threads > 1)}{load}",
            f"measured    {self.model} on {self.device}, {self.dtype}, kernel {self.kernel} ({layouts}), decoding {self.decoding}, loaded in {self.load_seconds:.1f} s",
            *self._hints(),
        ]

    def _hints(self) -> list[str]:
        if self.device != "cpu" or self.dtype != "float32" or self.kernel != "auto" or "numba" in self.versions:
            return []
        return ["hint        pip install 'quantkit[cpu]' (numba) brings compiled kernels: see docs/cpu.md"]


def _row(cell: Cell) -> tuple[str, ...]:
    scratch = "-" if cell.activation_bytes is None else f"{cell.activation_bytes / 1e6:.1f}"
    return (
        str(cell.batch),
        str(cell.prompt),
        f"{cell.time_to_first_token * 1e3:.1f} ms",
        f"{cell.prefill_tokens_per_second:.0f}",
        f"{cell.inter_token_latency_p50 * 1e3:.2f} ms",
        f"{cell.inter_token_latency_p99 * 1e3:.2f} ms",
        f"{cell.decode_tokens_per_second:.1f}",
        f"{cell.bytes_per_token / 1e6:.1f}",
        f"{cell.gb_per_s:.2f}",
        f"{100 * cell.share_of_bandwidth:.0f} %",
        f"{cell.kv_cache_bytes / 1e6:.2f}",
        scratch,
    )


def whole_numbers(text: str, option: str) -> list[int]:
    """``"1,8"`` -> ``[1, 8]``. Raises RequestError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise RequestError(f"{option} {text!r}: expected whole numbers above 0, separated by commas: {option} 1,8")
    return list(dict.fromkeys(int(part) for part in parts))


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
    kv_scales: Scales | None = None,
    kernel: str | None = None,
    head_bits: int | None = None,
    keep_dense: bool = False,
    graphs: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
) -> Speed:
    """Load a model and time it over a grid of batch sizes and prompt lengths. Prompts are random token ids, decoding is greedy
    and goes on past end tokens, through the same engine as ``generate``.

    batch, prompt: numbers separated by commas. new_tokens: of each answer, 2 at least. repeat: runs of each cell after one
    that is not counted. threads: of torch; None leaves them. kv_bits, kv_scales, kernel, head_bits, keep_dense, graphs: as in ``load``.
    Raises RequestError for an option that is wrong or a cell that does not fit the model's context.
    """
    batches, prompts = whole_numbers(batch, "--batch"), whole_numbers(prompt, "--prompt")
    _check(new_tokens, repeat, threads, seed)
    from quantkit.runtime.load import load

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        start = time.perf_counter()
        loaded = load(
            model,
            device=device,
            dtype=dtype,
            kv_bits=kv_bits,
            kv_scales=kv_scales,
            kernel=kernel,
            head_bits=head_bits,
            keep_dense=keep_dense,
            graphs=graphs,
        )
        if kernel is not None and not loaded.layouts():
            raise RequestError(f"--kernel {kernel} has no effect: no weight of {model} is quantized. Leave it out.")
        how: dict[str, Any] = {
            "load_seconds": time.perf_counter() - start,
            "head_bits": head_bits,
            "keep_dense": keep_dense,
        }
        how.update(model=str(model), kernel=kernel or "auto")
        return _bench(loaded, batches, prompts, new_tokens, repeat, seed, progress, how)
    finally:
        torch.set_num_threads(before)


def _check(new_tokens: int, repeat: int, threads: int | None, seed: int) -> None:
    for name, value, least in (
        ("--new-tokens", new_tokens, 2),
        ("--repeat", repeat, 1),
        ("--threads", threads, 1),
        ("--seed", seed, 0),
    ):
        if value is not None and value < least:
            raise RequestError(f"{name} {value}: expected {least} or more.")
    if threads is not None and threads > usable_cpus():  # threads that spin for each other's cores: minutes for a token
        raise RequestError(f"--threads {threads}: this process may use {usable_cpus()} CPUs. Use that many at most.")


def _bench(
    model: Model,
    batches: list[int],
    prompts: list[int],
    new_tokens: int,
    repeat: int,
    seed: int,
    progress: Progress | None,
    how: dict[str, Any],
) -> Speed:
    for length in prompts:
        if model.context is not None and length + new_tokens > model.context:
            raise RequestError(
                f"--prompt {length} and --new-tokens {new_tokens} are together more than the model's context of {model.context}. "
                "Make one of them smaller."
            )
    bandwidth = measure_bandwidth(model.device)
    cells: list[Cell] = []
    for size in batches:
        for length in prompts:
            if progress is not None:
                progress("bench", len(cells), len(batches) * len(prompts))
            cells.append(measure_cell(model, size, length, new_tokens, repeat, seed, bandwidth))
    if progress is not None:
        progress("bench", len(cells), len(cells))
    return Speed(
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_bits=model.kv_bits,
        kv_scales=model.kv_plan.kind,
        kv_stored_bits=model.kv_stored_bits,
        decoding=model.decoding,
        layouts=model.layouts(),
        threads=torch.get_num_threads(),
        seed=seed,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        bandwidth=bandwidth,
        memory=held(model),
        cells=cells,
        versions=versions(),
        hardware=hardware(),
        **how,
    )


def measure_cell(
    model: Model, batch: int, prompt: int, new_tokens: int, repeat: int, seed: int, bandwidth: Bandwidth
) -> Cell:
    """Time one batch size and prompt length of a loaded model."""
    rows = _prompts(model, batch, prompt, seed)
    _run(model, rows, min(new_tokens, 4))  # the first run pays for page faults, threads and compiled kernels
    release_free_memory()
    follows = _peak_follows(model.device)
    base = _used(model.device)
    first, latencies, cache = [], [], 0
    for _ in range(repeat):
        done = _run(model, rows, new_tokens)
        first.append(done[0].time_to_first_token)
        latencies += done[0].inter_token_latencies
        cache = sum(one.kv_cache_bytes for one in done)
    peak = _peak(model.device) - base - cache if follows else None
    latencies.sort()
    step = median(latencies)
    read = weight_bytes_per_step(model, batch) + kv_bytes_per_step(model, prompt + new_tokens / 2, batch)
    return Cell(
        batch=batch,
        prompt=prompt,
        new_tokens=new_tokens,
        repeats=repeat,
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
    vocab = int(model.module.config.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = torch.randint(0, vocab, (batch, length), generator=generator).tolist()
    return rows


def _run(model: Model, rows: list[list[int]], new_tokens: int) -> list[Any]:
    from quantkit.runtime.engine import run
    from quantkit.runtime.sampling import GenerationOptions

    options = GenerationOptions(max_tokens=new_tokens, ignore_eos=True)
    wait(model.device)
    pieces = run(model, rows, [options] * len(rows), end_tokens=(), context=model.context)
    return [piece.done for piece in pieces if piece.done is not None]


def _peak_follows(device: torch.device) -> bool:
    """Start the peak anew; False where the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return restart_peak()


def _peak(device: torch.device) -> int:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else peak_rss(since_restart=True)


def _used(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else current_rss()
