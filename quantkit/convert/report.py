"""What a conversion did: per-layer errors, sizes, times; for people a table, for programs JSON, for the folder a manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.calibrate.products import WORDS
from quantkit.convert.allocated import allocation_lines
from quantkit.convert.cache import label_words, summary_lines
from quantkit.convert.engines import Verdict, verdict_lines
from quantkit.convert.options import method_words


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear. relative_output_error: ``sqrt(tr(D H Dᵀ) / tr(W H Wᵀ))``, None without data (H is then unknown).
    relative_weight_error is None after a repack, which does not see the original."""

    name: str
    scheme: str
    relative_weight_error: float | None
    relative_output_error: float | None
    weights: int
    bits: int  # stored, scales and zeros counted
    damping: float | None = None
    fallback: str | None = None
    raised_scales: int = 0  # groups whose scale was raised to the smallest normal fp16
    tokens: int = 0  # calibration tokens behind its statistics, 0 without data
    dropped_tokens: int = 0  # tokens that were left out because they were not finite

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scheme": self.scheme,
            "relative_weight_error": _short(self.relative_weight_error),
            "relative_output_error": _short(self.relative_output_error),
            "bits_per_weight": _short(self.bits / self.weights),
            "damping": self.damping,
            "fallback": self.fallback,
            "raised_scales": self.raised_scales,
            "tokens": self.tokens,
            "dropped_tokens": self.dropped_tokens,
        }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


@dataclass
class ConvertReport:
    """The result of ``convert``."""

    out: Path
    method: str
    format: str
    scheme: str
    kv_bits: int | str
    preset: str | None = None  # that was asked for
    method_options: dict[str, Any] = field(default_factory=dict)  # see ConvertOptions
    layers: list[LayerReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of this process
    resumed: bool = False  # others worked on it before
    peak_host_bytes: int = 0
    predicted_host_bytes: int = 0
    peak_device_bytes: int = 0
    source_bytes: int = 0
    output_bytes: int = 0
    verified_tensors: int = 0
    sample: dict[str, str] | None = None  # what the written model made of a prompt, see sample.py
    engines: list[Verdict] = field(default_factory=list)
    repacked_from: str | None = None  # the source's format, when nothing was quantized
    notes: list[str] = field(default_factory=list)  # what happened on the way, see BlockResult
    allocation: dict[str, Any] | None = None  # of bits chosen within a size, see convert.settle.Settled.summary
    tuning: dict[str, dict[str, float]] = field(default_factory=dict)  # by block, see BlockResult
    distilled: dict[str, Any] | None = None  # see BlockResult
    drawn: bool = False  # random tokens stood in for a calibration text
    rotated: float | None = None  # what model.rotate.prove found, if the weights were rotated
    products: str | None = None  # in which the model ran, see calibrate.products; None if it did not
    cache: dict[str, Any] | None = None  # of a quantized KV cache, see convert.cache.summary

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of the quantized linears, scales and zeros counted, per weight; layers weighted equally by size."""
        return sum(layer.bits for layer in self.layers) / max(sum(layer.weights for layer in self.layers), 1)

    @property
    def dropped_tokens(self) -> int:
        """Tokens left out of statistics, summed over layers."""
        return sum(layer.dropped_tokens for layer in self.layers)

    def to_store(self) -> dict[str, Any]:
        """What a resumed job cannot find out again once the parts are gone."""
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
        """What the folder tells of how it came about, beside the job's identity: no times and no paths."""
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
        """What was learned: ``tuning`` if the method learns, ``distilled`` if there was an end-to-end pass."""
        tuning = {"tuning": self.tuning} if self.tuning else {}
        return {**tuning, **({} if self.distilled is None else {"distilled": self.distilled})}

    def restore(self, stored: dict[str, Any]) -> None:
        """Undo ``to_store``."""
        self.verified_tensors, self.sample, self.notes = stored["verified_tensors"], stored["sample"], stored["notes"]
        self.kv_bits, self.cache = stored["kv_bits"], stored["cache"]
        self.allocation, self.distilled = stored["allocation"], stored["distilled"]
        self.tuning, self.rotated = stored["tuning"], stored["rotated"]
        self.layers = [LayerReport(**layer) for layer in stored["layers"]]

    def to_json(self) -> dict[str, Any]:
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
            "products": self.products,
            "seconds": round(self.seconds, 1),
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
        """A few lines for people: what was written, how well, the worst layers. warned: the plan's warnings were shown before."""
        did = method_words(self.method, self.method_options, self.preset)
        if self.repacked_from is not None:
            did = f"repacked from {self.repacked_from}, no code changed"
        lines = [
            f"{self.out}: {did}, {self.scheme}, {self.format}"
            + (f", {label_words(self.kv_bits)}" if self.kv_bits != 16 else ""),
            f"  size      {_mb(self.source_bytes)} -> {_mb(self.output_bytes)} "
            f"({_change(self.source_bytes, self.output_bytes)}), {self.bits_per_weight:.3f} bits per quantized weight",
            f"  time      {self.seconds:.0f} s{' since it was resumed' if self.resumed else ''}, peak memory {_mb(self.peak_host_bytes)} (predicted {_mb(self.predicted_host_bytes)})",
            *([] if self.products is None else [f"  ran in    {WORDS[self.products]}"]),
            f"  checked   {self.verified_tensors} tensors read back and equal to what was decided",
        ]
        schemes = Counter(layer.scheme for layer in self.layers)
        if len(schemes) > 1 and self.allocation is None:
            lines.insert(
                1, f"  schemes   {', '.join(f'{scheme} x {count}' for scheme, count in schemes.most_common())}"
            )
        if self.sample is not None:
            shown = f"{self.sample['prompt']} -> {self.sample['text']}"
            lines.append(f"  sample    {' '.join(shown.split())}")
        measured = [layer for layer in self.layers if layer.relative_output_error is not None]
        if measured:
            worst = sorted(measured, key=lambda layer: -(layer.relative_output_error or 0))[:3]
            shown = ", ".join(f"{layer.name} {layer.relative_output_error:.1%}" for layer in worst)
            mean = sum(layer.relative_output_error or 0 for layer in measured) / len(measured)
            weighed = " (tokens weighed)" if self.method_options.get("guided") else ""
            lines.append(
                f"  error     relative output error on {'random tokens' if self.drawn else 'the calibration text'}{weighed} {mean:.1%} on average; largest: {shown}"
            )
        if self.rotated is not None:
            lines.append(
                f"  rotated   residual stream and values; two blocks' logits differ by {self.rotated:.1e} of their standard deviation at most"
            )
        if self.allocation is not None:
            lines += allocation_lines(self.allocation)
        if self.tuning:
            ends = [sum(one[key] for one in self.tuning.values()) / len(self.tuning) for key in ("before", "after")]
            kept = sum(not one["step"] for one in self.tuning.values())
            lines.append(
                f"  learned   squared error of a block's output on text held back, weighted by channel and relative to its size, {ends[0]:.3g} -> {ends[1]:.3g} on average"
                + (
                    f"; {kept} of {len(self.tuning)} blocks stay as they started, which was better (more --tune-steps may help)"
                    if kept
                    else ""
                )
            )
        if self.distilled is not None:
            d = self.distilled
            lines.append(
                f"  distilled divergence on windows kept back ({d['windows_kept_back']}) {_kl(d['kl_before'])} -> {_kl(d['kl_after'])}; learned from "
                f"{d['windows_learned']} others ({d['tokens_learned']} tokens) in {d['steps']} steps{'' if d['kept'] else ' (thrown away)'}; the errors above are those before it"
            )
        if self.cache is not None:
            lines += summary_lines(self.cache)
        lines += self._trouble()
        lines += [f"  loads in  {line}" for line in verdict_lines(self.engines)]
        lines += [f"  note      {warning}" for warning in [*([] if warned else self.warnings), *self.notes]]
        return "\n".join(lines)

    def _trouble(self) -> list[str]:
        """Layers that were not solved as asked: many with one reason share a line."""
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


def _kl(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _change(before: int, after: int) -> str:
    """In which direction a size went, and how far."""
    if after > before:
        return f"{after / max(before, 1):.2f} x larger"
    return f"{before / max(after, 1):.2f} x smaller"


def _mb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
