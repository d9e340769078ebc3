"""``Evaluation``: one measurement with all that identifies it, as JSON and as a table for people."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.core.kvscheme import cache_words
from quantkit.evaluate.by_position import Band
from quantkit.evaluate.kv_cache.greedy_text import GreedyAgreement
from quantkit.evaluate.kv_cache.planted_facts import PlantedFacts


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measurement with all that identifies it. Losses and divergences are in nats.

    Fields that end in ``stderr`` are standard errors over windows, None for a single window. The fields from
    ``baseline`` to ``top1_agreement_stderr`` are None without a baseline, ``bits_per_weight`` (quantized linears,
    scales and zeros counted) for a model that is not quantized. ``model_bits_per_weight`` is 8 x checkpoint tensor
    bytes / parameters, tied ones counted once. ``tokens`` counts BOS; ``scored_tokens`` are those with a loss.
    ``streamed``: one decoder block was in memory at a time; the figures are the same. ``data_whole``: False if the text
    goes on beyond what was read; the hash is that of what was read.

    ``kv_bits``: of the cache, as the command line takes them; ``kv_scales``: "online", "static" or "fp8", None at 16
    bits; ``kv_bits_per_number``: what a cached number takes once it is packed, scales counted, the newest tokens (16
    bits) not; the run-time dtype's bits for a cache that is not quantized. ``by_position``: bands of the windows.
    ``planted_fact`` and ``greedy``: where asked for. ``kv_exact``: 0 where every token of the cache was rounded as it
    was stored, else None.
    """

    model: str
    perplexity: float
    stderr: float | None
    tokens: int
    scored_tokens: int
    windows: int
    seq_len: int
    stride: int
    protocol: str
    bos: bool
    data: str
    data_sha256: str
    data_whole: bool
    tokenizer_sha256: str
    ids_sha256: str
    dtype: str
    runtime: bool
    streamed: bool
    device: str
    kv_bits: int | str
    kv_scales: str | None
    kv_bits_per_number: float
    bits_per_weight: float | None
    model_bits_per_weight: float
    checkpoint_bytes: int
    baseline: str | None
    baseline_streamed: bool | None
    baseline_perplexity: float | None
    baseline_stderr: float | None
    delta_ln_ppl: float | None
    delta_ln_ppl_stderr: float | None
    kl_mean: float | None
    kl_stderr: float | None
    kl_median: float | None
    kl_p99: float | None
    kl_max: float | None
    top1_agreement: float | None
    top1_agreement_stderr: float | None
    by_position: list[Band]
    planted_fact: PlantedFacts | None
    greedy: GreedyAgreement | None
    seconds: float
    peak_host_bytes: int
    versions: dict[str, str]
    hardware: dict[str, Any]
    kv_exact: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)

    def table(self, *, color: bool = False, bands: bool = False) -> str:
        """Show the figures for people, and below them what they were measured on.

        color: with terminal styles. bands: with a line for each band of positions.
        """
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        grid.add_column(style="bold" if color else "", no_wrap=True)
        grid.add_column(no_wrap=True)
        for name, value in self._rows(bands):
            grid.add_row(name, value)
        console = Console(file=io.StringIO(), force_terminal=color, width=1000, highlight=False)  # the terminal wraps
        console.print(grid)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _rows(self, bands: bool) -> list[tuple[str, str]]:
        size = f"{self.checkpoint_bytes / 1e6:.1f} MB, {self.model_bits_per_weight:.3f} bits per parameter"
        if self.bits_per_weight is not None:
            size += f", {self.bits_per_weight:.3f} per quantized weight (scales and zeros counted)"
        kernels = "the runtime's kernels" if self.runtime else f"weights dequantized to {self.dtype}"
        bos = "BOS first" if self.bos else "no BOS"
        half = ", the half for evaluation" if self.data == "wikipedia-sample" else ""
        half += "" if self.data_whole else ", its beginning"
        return [
            ("perplexity", f"{self.perplexity:.4f}{_pm(self.stderr, '.2f')}"),
            *self._compared(),
            *(self._bands() if bands else []),
            *self._cache_rows(),
            ("size", size),
            ("KV cache", self._cache()),
            (
                "measured on",
                (
                    f"{self.data}{half} (sha256 {self.data_sha256[:12]}), {self.windows} windows of {self.seq_len},"
                    f" stride {self.stride}, {bos}"
                ),
            ),
            (
                "",
                (
                    f"protocol {self.protocol}, {self.scored_tokens} of {self.tokens} tokens scored, {kernels},"
                    f" {self.device}"
                ),
            ),
            ("", f"tokenizer {self.tokenizer_sha256[:12]}, token ids {self.ids_sha256[:12]}"),
            *self._streamed(),
            ("took", f"{self.seconds:.0f} s, peak memory {self.peak_host_bytes / 1e9:.2f} GB"),
        ]

    def _compared(self) -> list[tuple[str, str]]:
        """Rows for the difference from the baseline."""
        if self.kl_mean is None:
            return []
        return [
            ("original", f"{self.baseline_perplexity:.4f}{_pm(self.baseline_stderr, '.2f')}   ({self.baseline})"),
            ("delta ln ppl", f"{self.delta_ln_ppl:+.4f}{_pm(self.delta_ln_ppl_stderr, '.4f')}   (paired over windows)"),
            (
                "KL divergence",
                (
                    f"{self.kl_mean:.4f}{_pm(self.kl_stderr, '.4f')} nats   "
                    f"median {self.kl_median:.3g}, p99 {self.kl_p99:.3g}, max {self.kl_max:.3g}"
                ),
            ),
            (
                "same top token",
                f"{100 * (self.top1_agreement or 0):.1f} %{_pm(_times(self.top1_agreement_stderr, 100), '.1f')}",
            ),
        ]

    def _bands(self) -> list[tuple[str, str]]:
        """Rows for the figures by position in the window."""
        rows: list[tuple[str, str]] = []
        for band in self.by_position:
            text = f"{f'{band.start} - {band.stop}':<13} perplexity {band.perplexity:.4f}"
            if band.kl_mean is not None:
                text += (
                    f"   delta ln ppl {band.delta_ln_ppl:+.4f}   KL {band.kl_mean:.4f}{_pm(band.kl_stderr, '.4f')} nats"
                    f"   same top token {100 * (band.top1_agreement or 0):.1f} %"
                )
            rows.append(("by position" if not rows else "", text))
        return rows

    def _cache_rows(self) -> list[tuple[str, str]]:
        """Rows for what the quantized cache changes beside the 16-bit one, with the same weights."""
        rows: list[tuple[str, str]] = []
        if self.planted_fact is not None:
            p = self.planted_fact
            rows += [
                (
                    "planted facts",
                    (
                        f"ln p(answer) {p.log_prob:.3f}, with a 16-bit cache {p.log_prob_16_bit:.3f}:"
                        f" {p.difference:+.4f}{_pm(p.difference_stderr, '.4f')}   (paired, {p.facts} facts in {p.texts}"
                        f" texts of {p.context})"
                    ),
                ),
                ("", f"answered {100 * p.answered:.0f} %, with a 16-bit cache {100 * p.answered_16_bit:.0f} %"),
            ]
        if self.greedy is not None:
            g = self.greedy
            rows.append(
                (
                    "greedy text",
                    (
                        f"{100 * g.share:.1f} %{_pm(_times(g.share_stderr, 100), '.1f')} of {g.tokens} tokens equal to"
                        f" those with a 16-bit cache before the first difference, {100 * g.identical:.0f} % of"
                        f" {g.prompts} texts identical"
                    ),
                )
            )
        return rows

    def _cache(self) -> str:
        words = cache_words(self.kv_bits, self.kv_scales, self.kv_bits_per_number if self.kv_scales else None)
        return words if self.kv_exact is None else f"{words}; no token exact, as in other engines"

    def _streamed(self) -> list[tuple[str, str]]:
        """A row where a model did not fit into memory, or was not to."""
        who = [name for name, yes in (("the original", self.baseline_streamed), ("the model", self.streamed)) if yes]
        return [("", f"{' and '.join(who)}: one block in memory at a time")] if who else []


def _pm(value: float | None, spec: str) -> str:
    return "" if value is None else f" ± {value:{spec}}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
