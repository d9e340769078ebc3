"""What a benchmark found: one cell for each batch size and prompt length, as JSON and as a table for people."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.core.kvscheme import cache_words
from quantkit.evaluate.speed.traffic import Bandwidth, ModelMemory


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch size and prompt length; medians over the repeats, seconds and bytes.

    inter_token_latency_p50, _p99: over all steps of all repeats. decode_tokens_per_second: of the whole batch.
    bytes_per_step: weights and cached keys and values that a decode step reads, at the middle of the answer;
    bytes_per_token is its share of one sequence. gb_per_s: bytes_per_step / the median latency. share_of_bandwidth:
    of the best measured one. kv_cache_bytes: pages in use at the end, whole batch. activation_bytes: peak of the
    process (or device) above weights and pages during the run; None where the system does not tell.
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
    """A benchmark: the cells, what was held in memory, and all that decides the figures.

    decoding: see ``Model.decoding``. head_bits: in how many bits the head is held. path: how tokens are computed, in
    words.
    """

    model: str
    device: str
    dtype: str
    kv_bits: int | str
    kv_scales: str | None
    kv_stored_bits: float
    kernel: str
    head_bits: int | None
    path: str
    keep_dense: bool
    decoding: str
    layouts: dict[str, int]
    threads: int
    seed: int
    load_seconds: float
    load_average: float | None
    bandwidth: Bandwidth
    memory: ModelMemory
    cells: list[Cell]
    versions: dict[str, str]
    hardware: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every field. Bytes, seconds, bytes per second; ``gb_per_s`` in 1e9 bytes."""
        return asdict(self)

    def table(self, *, color: bool = False) -> str:
        """Show the cells for people. color: with terminal styles."""
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("batch", "prompt", "first token", "prefill tok/s", "p50", "p99", "decode tok/s", "MB/token",
        "GB/s", "of peak", "KV MB", "scratch MB"):  # fmt: skip
            grid.add_column(name, justify="right", no_wrap=True, header_style="bold" if color else "")
        for cell in self.cells:
            grid.add_row(*_row(cell))
        console = Console(file=io.StringIO(), force_terminal=color, width=1000, highlight=False)  # the terminal wraps
        console.print(grid)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join([*(line.rstrip() for line in text.splitlines()), *self._notes()])

    def _notes(self) -> list[str]:
        memory, band = self.memory, self.bandwidth
        load = "" if self.load_average is None else f", load average {self.load_average:.1f}"
        read = "" if not band.read else f"read {band.read / 1e9:.1f}, "
        return [
            (
                f"memory      codes {memory.codes / 1e6:.1f} MB, scales {memory.scales / 1e6:.1f} MB, dense"
                f" {memory.dense / 1e6:.1f} MB, KV cache {memory.kv_per_token / 1e3:.1f} kB a token"
                f" ({cache_words(self.kv_bits, self.kv_scales, self.kv_stored_bits)})"
            ),
            f"bandwidth   {read}copy {band.copy / 1e9:.1f} GB/s, {self.threads} thread{'s' * (self.threads > 1)}{load}",
            f"measured    {self.model}, kernel {self.kernel}, loaded in {self.load_seconds:.1f} s",
            f"runs on     {self.path}",
        ]


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
