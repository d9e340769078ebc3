"""The report of a conversion: errors by layer, sizes, times; as a table, as JSON, and what the manifest takes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.calibrate.matmul_precision import WORDS
from quantkit.checkpoint.storage.record import Either, as_record
from quantkit.convert.engines.verdict import Verdict, verdict_lines
from quantkit.convert.options.kv_request import label_words
from quantkit.convert.options.options import method_words
from quantkit.convert.report.bit_budget import ALLOCATION, allocation_lines
from quantkit.convert.report.kv_cache import SUMMARY, check_summary, summary_lines
from quantkit.convert.results import DISTILLED, LAYER, TUNED, LayerReport

LONG_JOB, LONG_STAGE = 60.0, 0.05  # seconds from which stages are told, and of which share of the time
STAGE_WORDS = {"blocks": "load", "read": "check weights", "self": "write text", "measure": "sensitivity"}
# what ``ConvertReport.to_store`` stores, as checkpoint/storage/record.py checks it
STORED = {
    "verified_tensors": int,
    "sample": Either(None, {"prompt": str, "text": str}),
    "notes": [str],
    "kv_bits": Either(int, str),
    "cache": Either(None, SUMMARY),
    "allocation": Either(None, ALLOCATION),
    "tuning": {str: TUNED},
    "distilled": Either(None, DISTILLED),
    "rotated": Either(None, float),
    "layers": [LAYER],
}


@dataclass(kw_only=True)
class ConvertReport:
    """The result of ``convert``."""

    out: Path
    method: str
    format: str
    scheme: str
    kv_bits: int | str
    # that was asked for
    preset: str | None = None
    # see ConvertOptions
    method_options: dict[str, Any] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # of this process
    seconds: float = 0.0
    # of each stage of it, see convert.progress.StageClock
    stage_seconds: dict[str, float] = field(default_factory=dict)
    # other processes worked on it before
    resumed: bool = False
    peak_host_bytes: int = 0
    predicted_host_bytes: int = 0
    peak_device_bytes: int = 0
    source_bytes: int = 0
    output_bytes: int = 0
    verified_tensors: int = 0
    # what the written model made of a prompt, see output/smoke_test.py
    sample: dict[str, str] | None = None
    engines: list[Verdict] = field(default_factory=list)
    # the source's format, when nothing was quantized
    repacked_from: str | None = None
    # what happened on the way, see BlockResult
    notes: list[str] = field(default_factory=list)
    # of bits chosen within a size, see report.bit_budget.summary
    allocation: dict[str, Any] | None = None
    # by block, see BlockResult
    tuning: dict[str, dict[str, float]] = field(default_factory=dict)
    # see BlockResult
    distilled: dict[str, Any] | None = None
    # random tokens stood in for a calibration text
    drawn: bool = False
    # what model.rotate.prove found, if the weights were rotated
    rotated: float | None = None
    # in which the model ran, see calibrate.matmul_precision; None if it did not
    matmul_precision: str | None = None
    # of a quantized KV cache, see report.kv_cache.summary
    cache: dict[str, Any] | None = None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of the quantized linears per weight, scales and zeros counted; larger layers count for more."""
        return sum(layer.bits for layer in self.layers) / max(sum(layer.weights for layer in self.layers), 1)

    @property
    def dropped_tokens(self) -> int:
        """Tokens left out of statistics, summed over layers."""
        return sum(layer.dropped_tokens for layer in self.layers)

    def to_store(self) -> dict[str, Any]:
        """Return what a resumed job cannot find out again once the parts are gone."""
        layers = [asdict(layer) for layer in self.layers]
        return {
            "verified_tensors": self.verified_tensors,
            "sample": self.sample,
            "notes": self.notes,
            "kv_bits": self.kv_bits,
            "cache": self.cache,
            "allocation": self.allocation,
            "tuning": self.tuning,
            "distilled": self.distilled,
            "rotated": self.rotated,
            "layers": layers,
        }

    def for_manifest(self) -> dict[str, Any]:
        """Return the results that the manifest records beside the job's identity: no times and no paths."""
        layers = [layer.to_json() for layer in self.layers]
        return {
            "preset": self.preset,
            "notes": self.notes,
            "cache": self.cache,
            **({} if self.allocation is None else {"allocation": self.allocation}),
            **self.learned(),
            "layers": layers,
        }

    def learned(self) -> dict[str, Any]:
        """Return what was learned: ``tuning`` if the method learns, ``distilled`` if there was an end-to-end pass."""
        tuning = {"tuning": self.tuning} if self.tuning else {}
        return {**tuning, **({} if self.distilled is None else {"distilled": self.distilled})}

    def restore(self, stored: dict[str, Any], path: Path) -> None:
        """Undo ``to_store``.

        stored: what ``to_store`` returned.
        path: the record that it was read from.

        Raises WorkFolderError for anything that ``to_store`` does not return.
        """
        as_record(stored, STORED, path)
        check_summary(stored["cache"], path)
        self.verified_tensors, self.sample, self.notes = stored["verified_tensors"], stored["sample"], stored["notes"]
        self.kv_bits, self.cache = stored["kv_bits"], stored["cache"]
        self.allocation, self.distilled = stored["allocation"], stored["distilled"]
        self.tuning, self.rotated = stored["tuning"], stored["rotated"]
        self.layers = [LayerReport(**layer) for layer in stored["layers"]]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON for ``--json``."""
        return {
            "out": str(self.out),
            "method": self.method,
            "method_options": self.method_options,
            "preset": self.preset,
            "format": self.format,
            "repacked_from": self.repacked_from,
            "scheme": self.scheme,
            "kv_bits": self.kv_bits,
            "cache": self.cache,
            "allocation": self.allocation,
            "distilled": self.distilled,
            "rotated": self.rotated,
            "products": self.matmul_precision,
            "seconds": round(self.seconds, 1),
            "stage_seconds": {stage: round(seconds, 1) for stage, seconds in self.stage_seconds.items()},
            "resumed": self.resumed,
            "peak_host_bytes": self.peak_host_bytes,
            "predicted_host_bytes": self.predicted_host_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "bits_per_weight": round(self.bits_per_weight, 4),
            "verified_tensors": self.verified_tensors,
            "dropped_tokens": self.dropped_tokens,
            "sample": self.sample,
            "engines": [verdict.to_json() for verdict in self.engines],
            "warnings": self.warnings,
            "notes": self.notes,
            **self.learned(),
            "layers": [layer.to_json() for layer in self.layers],
        }

    def __str__(self) -> str:
        return self.table()

    def table(self, *, warned: bool = False) -> str:
        """Return a few lines for people: the output, its errors, and the worst layers.

        warned: the plan's warnings were shown before.
        """
        lines = [*self._written(), *self._error(), *self._model_changes()]
        if self.cache is not None:
            lines += summary_lines(self.cache)
        lines += self._trouble()
        lines += verdict_lines(self.engines)
        lines += [f"  note      {warning}" for warning in [*([] if warned else self.warnings), *self.notes]]
        return "\n".join(lines)

    def _stages(self) -> list[str]:
        """Tell where the time of a longer job went: its stages of a twentieth of it and more."""
        long = {stage: spent for stage, spent in self.stage_seconds.items() if spent >= LONG_STAGE * self.seconds}
        if self.seconds < LONG_JOB or not long:
            return []
        shown = [f"{STAGE_WORDS.get(stage, stage)} {spent:.0f} s" for stage, spent in long.items()]
        rest = self.seconds - sum(long.values())
        return [f"  of that   {', '.join([*shown, f'rest {rest:.0f} s'])}"]

    def _written(self) -> list[str]:
        """Describe the output, its size, the time and memory it took, and the checks."""
        did = method_words(self.method, self.method_options, self.preset)
        if self.repacked_from is not None:
            did = f"repacked from {self.repacked_from}, no code changed"
        if self.method == "dequantize":
            did = f"dequantized from {self.format}"
        cache = f", {label_words(self.kv_bits)}" if self.kv_bits != 16 else ""
        lines = [f"{self.out}: {did}, {self.scheme}, {'dense' if self.method == 'dequantize' else self.format}{cache}"]
        schemes = Counter(layer.scheme for layer in self.layers)
        if len(schemes) > 1 and self.allocation is None:
            shown = ", ".join(f"{scheme} x {count}" for scheme, count in schemes.most_common())
            lines.append(f"  schemes   {shown}")
        bits = f", {self.bits_per_weight:.3f} bits per quantized weight" if self.layers else ""
        lines += [
            (
                f"  size      {_mb(self.source_bytes)} -> {_mb(self.output_bytes)}"
                f" ({_change(self.source_bytes, self.output_bytes)}){bits}"
            ),
            (
                f"  time      {self.seconds:.0f} s{' since it was resumed' if self.resumed else ''}, peak memory"
                f" {_mb(self.peak_host_bytes)} (predicted {_mb(self.predicted_host_bytes)})"
            ),
            *self._stages(),
            *([] if self.matmul_precision is None else [f"  ran in    {WORDS[self.matmul_precision]}"]),
            f"  checked   {self.verified_tensors} tensors read back and equal to what was decided",
        ]
        if self.sample is not None:
            shown = f"{self.sample['prompt']} -> {self.sample['text']}"
            lines.append(f"  sample    {' '.join(shown.split())}")
        return lines

    def _error(self) -> list[str]:
        """Describe the mean relative output error, and the largest ones; nothing without calibration data."""
        measured = [layer for layer in self.layers if layer.relative_output_error is not None]
        if not measured:
            return []
        worst = sorted(measured, key=lambda layer: -(layer.relative_output_error or 0))[:3]
        shown = ", ".join(f"{layer.name} {layer.relative_output_error:.1%}" for layer in worst)
        mean = sum(layer.relative_output_error or 0 for layer in measured) / len(measured)
        weighed = " (tokens weighed)" if self.method_options.get("guided") else ""
        text = "random tokens" if self.drawn else "the calibration text"
        return [
            f"  error     relative output error on {text}{weighed} {mean:.1%} on average; largest: {shown}",
        ]

    def _model_changes(self) -> list[str]:
        """Describe other changes of the model: rotation, bits chosen within a size, learning."""
        lines = []
        if self.rotated is not None:
            lines.append(
                f"  rotated   residual stream and values; two blocks' logits differ by {self.rotated:.1e} of their"
                " standard deviation at most"
            )
        if self.allocation is not None:
            lines += allocation_lines(self.allocation)
        if self.tuning:
            lines.append(_tuning_line(list(self.tuning.values())))
        if self.distilled is not None:
            facts = self.distilled
            lines.append(
                f"  distilled divergence on windows kept back ({facts['windows_kept_back']}) {_kl(facts['kl_before'])}"
                f" -> {_kl(facts['kl_after'])}; learned from {facts['windows_learned']} others"
                f" ({facts['tokens_learned']} tokens) in {facts['steps']} steps"
                f"{'' if facts['kept'] else ' (thrown away)'}; the errors above are those before it"
            )
        return lines

    def _trouble(self) -> list[str]:
        """List layers that were not solved as asked; many with one reason share a line."""
        by_reason: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.fallback:
                by_reason.setdefault(f"  fallback  {{}}: {layer.fallback}", []).append(layer.name)
            if layer.dropped_tokens:
                reason = f"{layer.dropped_tokens} of {layer.tokens + layer.dropped_tokens} calibration tokens"
                by_reason.setdefault(f"  trouble   {{}}: {reason} were not finite and are left out", []).append(
                    layer.name
                )
        return [
            line.format(names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more")
            for line, names in by_reason.items()
        ]


def _tuning_line(blocks: Sequence[Mapping[str, float]]) -> str:
    """Describe the gain of learning block by block.

    blocks: of ``ConvertReport.tuning``.
    """
    before, after = (sum(block[key] for block in blocks) / len(blocks) for key in ("before", "after"))
    unchanged = sum(not block["step"] for block in blocks)
    line = (
        "  learned   squared error of a block's output on text held back, weighted by channel and relative to its size,"
        f" {before:.3g} -> {after:.3g} on average"
    )
    if not unchanged:
        return line
    better = f"{unchanged} of {len(blocks)} blocks stay as they started, which was better"
    return f"{line}; {better} (more --tune-steps may help)"


def _kl(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _change(before: int, after: int) -> str:
    """Describe in which direction a size changed, and how far."""
    if abs(after - before) <= before / 1000:
        return "the same"
    if after > before:
        return f"{after / max(before, 1):.2f} x larger"
    return f"{before / max(after, 1):.2f} x smaller"


def _mb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
