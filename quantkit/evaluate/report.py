"""``evaluate``: a model, measured on a text, alone or against its original; and what comes out of it."""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import NumericsError, RequestError
from quantkit.evaluate.perplexity import Progress, perplexity_of, token_losses
from quantkit.evaluate.windows import Windows, make_windows

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Source
    from quantkit.checkpoint.texts import Text
    from quantkit.evaluate.divergence import Baseline
    from quantkit.evaluate.streamed import StreamedModel
    from quantkit.runtime.load import Model


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One measurement with all that identifies it. Losses and divergences are in nats.

    Fields that end in ``stderr`` are standard errors over windows, None for a single window. The fields from
    ``baseline`` to ``top1_agreement_stderr`` are None without a baseline, ``bits_per_weight`` (quantized linears, scales
    and zeros counted) for a model that is not quantized. ``model_bits_per_weight`` is 8 x checkpoint tensor bytes /
    parameters, tied ones counted once. ``tokens`` counts BOS; ``scored_tokens`` are those with a loss. ``streamed``: one
    decoder block was in memory at a time; the figures are the same.
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
    tokenizer_sha256: str
    ids_sha256: str
    dtype: str
    runtime: bool
    streamed: bool
    device: str
    kv_bits: int
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
    seconds: float
    peak_host_bytes: int
    versions: dict[str, str]
    hardware: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with every field."""
        return asdict(self)

    def table(self, *, color: bool = False) -> str:
        """For people: the figures, and below them what they were measured on. color: with terminal styles."""
        from rich.console import Console
        from rich.table import Table

        grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        grid.add_column(style="bold" if color else "", no_wrap=True)
        grid.add_column(no_wrap=True)
        for name, value in self._rows():
            grid.add_row(name, value)
        console = Console(file=io.StringIO(), force_terminal=color, width=1000, highlight=False)  # the terminal wraps
        console.print(grid)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("perplexity", f"{self.perplexity:.4f}{_pm(self.stderr, '.2f')}")]
        if self.kl_mean is not None:
            rows += [
                ("original", f"{self.baseline_perplexity:.4f}{_pm(self.baseline_stderr, '.2f')}   ({self.baseline})"),
                (
                    "delta ln ppl",
                    f"{self.delta_ln_ppl:+.4f}{_pm(self.delta_ln_ppl_stderr, '.4f')}   (paired over windows)",
                ),
                (
                    "KL divergence",
                    f"{self.kl_mean:.4f}{_pm(self.kl_stderr, '.4f')} nats   "
                    f"median {self.kl_median:.3g}, p99 {self.kl_p99:.3g}, max {self.kl_max:.3g}",
                ),
                (
                    "same top token",
                    f"{100 * (self.top1_agreement or 0):.1f} %{_pm(_times(self.top1_agreement_stderr, 100), '.1f')}",
                ),
            ]
        size = f"{self.checkpoint_bytes / 1e6:.1f} MB, {self.model_bits_per_weight:.3f} bits per parameter"
        if self.bits_per_weight is not None:
            size += f", {self.bits_per_weight:.3f} per quantized weight (scales and zeros counted)"
        kernels = "the runtime's kernels" if self.runtime else f"weights dequantized to {self.dtype}"
        bos = "BOS first" if self.bos else "no BOS"
        return [
            *rows,
            ("size", size),
            ("KV cache", f"{self.kv_bits} bits"),
            (
                "measured on",
                f"{self.data} (sha256 {self.data_sha256[:12]}), {self.windows} windows of {self.seq_len}, stride {self.stride}, {bos}",
            ),
            (
                "",
                f"protocol {self.protocol}, {self.scored_tokens} of {self.tokens} tokens scored, {kernels}, {self.device}",
            ),
            ("", f"tokenizer {self.tokenizer_sha256[:12]}, token ids {self.ids_sha256[:12]}"),
            *self._streamed(),
            ("took", f"{self.seconds:.0f} s, peak memory {self.peak_host_bytes / 1e9:.2f} GB"),
        ]

    def _streamed(self) -> list[tuple[str, str]]:
        """A line when a model did not fit into memory, or was not to."""
        who = [name for name, yes in (("the original", self.baseline_streamed), ("the model", self.streamed)) if yes]
        return [("", f"{' and '.join(who)}: one block in memory at a time")] if who else []


def _pm(value: float | None, spec: str) -> str:
    return "" if value is None else f" ± {value:{spec}}"


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model before its weights are read: its name as it was given, where it lies, its tokenizer's hash and the windows of
    the text."""

    name: str
    source: Source
    text: Text
    tokenizer: Any
    tokenizer_sha256: str
    windows: Windows


def prepare(
    model: str | Path,
    *,
    data: str = "wikipedia-sample",
    seq_len: int | None = None,
    tokens: int | None = None,
    protocol: str = "gptq",
) -> Prepared:
    """Open a model and cut the text into windows with its tokenizer. Everything that can be wrong without weights is
    found here: raises RequestError and SourceError."""
    from quantkit.checkpoint.source import open_source
    from quantkit.checkpoint.texts import load_text
    from quantkit.checkpoint.tokenizer import check_vocabulary, load_tokenizer, wants_bos
    from quantkit.evaluate.tokens import bos_id, text_ids, tokenizer_digest

    source = open_source(model)
    text = load_text(data, split="evaluation")
    tokenizer = load_tokenizer(source)
    bos = bos_id(tokenizer) if wants_bos(tokenizer) else None
    ids = text_ids(tokenizer, text.text)
    check_vocabulary(ids, source.config, model)
    windows = make_windows(ids, protocol=protocol, seq_len=seq_len, bos_id=bos, tokens=tokens)
    limit = source.config.get("max_position_embeddings")
    if isinstance(limit, int) and windows.seq_len > limit:
        raise RequestError(
            f"--seq-len {windows.seq_len}: {model} was made for at most {limit} tokens. Lower --seq-len."
        )
    return Prepared(str(model), source, text, tokenizer, tokenizer_digest(tokenizer), windows)


def prepare_baseline(
    baseline: str | Path,
    prepared: Prepared,
    *,
    dtype: str = "float32",
    device: str = "auto",
    stream: bool | None = None,
    progress: Progress | None = None,
) -> Baseline:
    """Run an original over the windows of ``prepared`` and keep what comparisons need. Serves several ``evaluate`` calls.

    stream: one block in memory at a time; None does it when the whole original would not fit.

    Raises RequestError when the two models do not see identical token ids.
    """
    from quantkit.checkpoint.source import open_source
    from quantkit.checkpoint.tokenizer import load_tokenizer
    from quantkit.evaluate import streamed
    from quantkit.evaluate.divergence import Baseline, record_baseline
    from quantkit.evaluate.tokens import check_same_tokens
    from quantkit.runtime.load import load

    source = open_source(baseline)
    if source.quantization() is not None:
        raise RequestError(f"--baseline {baseline} is quantized itself. Name the 16- or 32-bit original.")
    check_same_tokens(prepared.tokenizer, load_tokenizer(source), prepared.text.text, prepared.name, str(baseline))
    windows, name = prepared.windows, str(baseline)
    if streamed.must_stream(source, dtype, device, stream):
        passed = streamed.stream(source, windows, dtype=dtype, device=device, what="original", progress=progress)
        return Baseline(passed, passed.scored(windows), windows, name, streamed=True)
    original = load(source.path, dequantize=True, dtype=dtype, kv_bits=16, device=device)
    return record_baseline(original, windows, name, release=_release(original), progress=progress)


def evaluate(
    model: str | Path,
    *,
    baseline: str | Path | Baseline | None = None,
    data: str = "wikipedia-sample",
    seq_len: int | None = None,
    tokens: int | None = None,
    protocol: str = "gptq",
    dtype: str | None = None,
    kv_bits: int | None = None,
    runtime: bool = False,
    device: str = "auto",
    stream: bool | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of a model on a text and, with a baseline, KL divergence, top-1 agreement and the paired difference.

    model: any model or checkpoint that ``quantkit.load`` reads. baseline: the 16- or 32-bit original, or what
    ``prepare_baseline`` returned. data: a text as ``quantkit.checkpoint.texts.load_text`` names it. seq_len: window,
    BOS counted (default 1024, ``llama.cpp``: 512). tokens: windows x seq_len at most; None is every full window.
    runtime: measure the packed kernels in their own dtype instead of dequantized weights in float32. stream: one decoder
    block in memory at a time, same figures; None does it for a model (or baseline) that would not fit.

    Raises RequestError (request), SourceError (text, files), NumericsError (a loss that is not finite).

    >>> evaluate("out", baseline="smollm2-135m", tokens=24 * 1024).kl_mean                    # doctest: +SKIP
    """
    from quantkit.evaluate.divergence import compare

    started = time.perf_counter()
    prepared = prepare(model, data=data, seq_len=seq_len, tokens=tokens, protocol=protocol)
    figures: dict[str, Any] = dict.fromkeys(_COMPARED)
    streams = _streams(prepared, dtype, kv_bits, runtime, device, stream)
    original = _baseline(baseline, prepared, dtype, device, stream, progress)
    measured = _load(prepared, dtype, kv_bits, runtime, device, streams, progress)
    if original is None:
        losses = token_losses(measured, prepared.windows, progress)
    else:
        comparison = compare(measured, original, progress)
        losses = comparison.losses
        figures.update(comparison.summary(), baseline=original.name, baseline_streamed=original.streamed)
        figures["baseline_perplexity"], figures["baseline_stderr"] = perplexity_of(comparison.baseline_losses)
    perplexity, stderr = perplexity_of(losses)
    if perplexity == float("inf"):
        raise NumericsError(
            f"{model}: perplexity is beyond any number. The model is destroyed; convert with more bits."
        )
    figures.update(perplexity=perplexity, stderr=stderr)
    return _report(model, prepared, measured, runtime, figures, started)


_COMPARED = (
    "baseline", "baseline_streamed", "baseline_perplexity", "baseline_stderr", "delta_ln_ppl", "delta_ln_ppl_stderr", "kl_mean", "kl_stderr",
    "kl_median", "kl_p99", "kl_max", "top1_agreement", "top1_agreement_stderr",
)  # fmt: skip


def _baseline(
    given: str | Path | Baseline | None, prepared: Prepared, dtype: str | None, device: str, stream: bool | None,
    progress: Progress | None,
) -> Baseline | None:  # fmt: skip
    from quantkit.evaluate.divergence import Baseline

    if given is None:
        return None
    if not isinstance(given, Baseline):
        return prepare_baseline(
            given, prepared, dtype=dtype or "float32", device=device, stream=stream, progress=progress
        )
    if given.windows.digest() != prepared.windows.digest() or given.windows.first != prepared.windows.first:
        raise RequestError(f"{given.name} was run over other tokens than those of this evaluation. Prepare it again.")
    return given


def _streams(
    prepared: Prepared, dtype: str | None, kv_bits: int | None, runtime: bool, device: str, asked: bool | None
) -> bool:
    """Whether the measured model is streamed. What streaming cannot do is refused by name."""
    from quantkit.evaluate.streamed import must_stream
    from quantkit.formats.kv_scales import read_kv_scales

    if runtime:
        if asked:
            raise RequestError("--stream holds dequantized weights; --runtime measures packed ones. Leave one out.")
        return False
    if not must_stream(prepared.source, dtype or "float32", device, asked):
        return False
    path = prepared.source.path
    scales = read_kv_scales(path) if kv_bits is None and path.is_dir() else None
    bits = scales.scheme.bits if scales is not None else kv_bits or 16
    if bits < 16:
        why = "--stream" if asked else f"{path} does not fit into memory and is streamed block by block, which"
        raise RequestError(
            f"{why} does not pass through a KV cache of {bits} bits. Measure the weights with --kv-bits 16; for the cache "
            "use --no-stream, or --runtime, which keeps the weights packed."
        )
    return True


def _load(
    prepared: Prepared, dtype: str | None, kv_bits: int | None, runtime: bool, device: str,
    streams: bool, progress: Progress | None,
) -> Model | StreamedModel:  # fmt: skip
    from quantkit.evaluate.streamed import stream
    from quantkit.runtime.linear import use_packed_kernels
    from quantkit.runtime.load import load

    chosen = dtype or ("auto" if runtime else "float32")
    if streams:
        return stream(
            prepared.source, prepared.windows, dtype=chosen, device=device, what="the model", progress=progress
        )
    loaded = load(prepared.source.path, dequantize=not runtime, dtype=chosen, kv_bits=kv_bits, device=device)
    if runtime:  # windows are longer than the crossover, beyond which weights would be dequantized after all
        use_packed_kernels(loaded.module)
    return loaded


def _release(model: Model) -> Callable[[], None]:
    """Lets go of the decoder blocks; embedding, final norm and head stay."""

    def release() -> None:
        from quantkit.model.skeleton import find_blocks

        del find_blocks(model.module).modules[:]
        gc.collect()

    return release


def _report(
    model: str | Path,
    prepared: Prepared,
    measured: Model | StreamedModel,
    runtime: bool,
    figures: dict[str, Any],
    started: float,
) -> Evaluation:
    from quantkit.core.host import peak_rss
    from quantkit.evaluate.environment import hardware, versions
    from quantkit.evaluate.sizes import measure_sizes
    from quantkit.evaluate.streamed import StreamedModel

    windows = prepared.windows
    sizes = measure_sizes(prepared.source)
    return Evaluation(
        model=str(model),
        tokens=windows.ids.numel(),
        scored_tokens=windows.count * windows.scored,
        windows=windows.count,
        seq_len=windows.seq_len,
        stride=windows.stride,
        protocol=windows.protocol,
        bos=windows.bos,
        data=prepared.text.name,
        data_sha256=prepared.text.sha256,
        tokenizer_sha256=prepared.tokenizer_sha256,
        ids_sha256=windows.digest(),
        dtype=str(measured.dtype).removeprefix("torch."),
        runtime=runtime,
        streamed=isinstance(measured, StreamedModel),
        device=measured.device.type,
        kv_bits=measured.kv_bits,
        bits_per_weight=sizes.bits_per_weight,
        model_bits_per_weight=sizes.model_bits_per_weight,
        checkpoint_bytes=sizes.checkpoint_bytes,
        seconds=time.perf_counter() - started,
        peak_host_bytes=peak_rss(),
        versions=versions(),
        hardware=hardware(),
        **figures,
    )
