"""``evaluate``: measure a model on a text, alone or against its original."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.core.interrupt import interruptible
from quantkit.errors import NumericsError, RequestError
from quantkit.evaluate.evaluation import Evaluation
from quantkit.evaluate.perplexity import OnProgress, perplexity_of, token_losses
from quantkit.evaluate.prepare import Prepared, prepare, prepare_baseline
from quantkit.evaluate.windows import EvaluationWindows

if TYPE_CHECKING:
    from quantkit.core.kvscheme import KVPlan, KVScales
    from quantkit.evaluate.divergence import Baseline
    from quantkit.evaluate.streamed import StreamedModel
    from quantkit.runtime.load import Model

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, slots=True)
class _How:
    """How the model under test is run; the fields are those of ``evaluate``."""

    dtype: str | None
    kv_bits: int | str | None
    kv_scales: KVScales | None
    kv_exact: int | None
    runtime: bool
    device: str
    stream: bool | None

    def cache(self, prepared: Prepared) -> KVPlan:
        """Return the KV cache that attention will read.

        Raises RequestError for bits or scales that are none, and for bits asked for in windows too short for a page to
        be packed.
        """
        from quantkit.evaluate.kv_cache.compare import packs_a_page, shortest_window
        from quantkit.formats.kv_scales import read_kv_plan
        from quantkit.runtime.kv_cache.choose import kv_plan

        path, seq_len = prepared.source.path, prepared.windows.seq_len
        plan = kv_plan(read_kv_plan(path) if path.is_dir() else None, self.kv_bits, self.kv_scales)
        if self.kv_bits is not None and plan.quantized and not packs_a_page(plan, seq_len):
            raise RequestError(
                f"--kv-bits {self.kv_bits} has no effect on windows of {seq_len} tokens: the newest tokens stay at 16"
                f" bits. Raise --seq-len to {shortest_window(plan)} at least; 1024 or more say something about a cache."
            )
        if self.kv_exact is None:
            return plan
        if self.kv_exact != 0:
            raise RequestError(f"kv_exact={self.kv_exact} (--kv-exact): 0, or leave it out.")
        return plan.rounded_at_once()


@interruptible()
def evaluate(
    model: str | Path,
    *,
    baseline: str | Path | Baseline | None = None,
    data: str = "wikipedia-sample",
    seq_len: int | None = None,
    tokens: int | None = None,
    protocol: str = "gptq",
    dtype: str | None = None,
    kv_bits: int | str | None = None,
    kv_scales: KVScales | None = None,
    kv_exact: int | None = None,
    planted_fact: bool = False,
    greedy: int | None = None,
    runtime: bool = False,
    device: str = "auto",
    stream: bool | None = None,
    progress: OnProgress | None = None,
) -> Evaluation:
    """Measure perplexity on a text and, with a baseline, KL divergence, top-1 agreement and the paired difference.

    model: any model or checkpoint that ``quantkit.load`` reads. baseline: the 16- or 32-bit original, or what
    ``prepare_baseline`` returned, always with a 16-bit cache; a quantized model may be its own where its cache is
    quantized. data: a text as ``quantkit.checkpoint.texts.load_text`` names it. seq_len: window, BOS counted (default
    1024, ``llama.cpp``: 512). tokens: windows x seq_len at most; None is every full window. kv_bits, kv_scales: as
    ``quantkit.load`` takes them. kv_exact: 0 rounds every token of an fp8 cache as it is stored, as other engines do.
    planted_fact: also ask for facts planted in texts of ``seq_len`` tokens. greedy: also
    write so many tokens after the beginnings of windows; both compare the quantized cache with a 16-bit one over the
    same weights. runtime: measure the packed kernels in their own dtype instead of dequantized weights in float32.
    stream: one decoder block in memory at a time, same figures; None does it for a model (or baseline) that would not
    fit.

    Raises RequestError (request), SourceError (text, files), NumericsError (a loss that is not finite).

    >>> evaluate("out", baseline="smollm2-135m", tokens=24 * 1024).kl_mean                    # doctest: +SKIP
    >>> evaluate("smollm2-135m", kv_bits="k4v2", planted_fact=True).planted_fact.difference   # doctest: +SKIP
    """
    from quantkit.evaluate.kv_cache.compare import CacheChecks

    started = time.perf_counter()
    how = _How(dtype, kv_bits, kv_scales, kv_exact, runtime, device, stream)
    prepared = prepare(model, data=data, seq_len=seq_len, tokens=tokens, protocol=protocol)
    quantized = how.cache(prepared).quantized
    checks = CacheChecks.of(prepared, planted_fact, greedy, quantized)
    streams = _streams(prepared, how, quantized)
    original = _baseline(baseline, prepared, how, quantized, progress)
    measured = _load(prepared, how, streams, progress)
    figures = _measure(model, measured, prepared.windows, original, progress)
    figures.update(checks.run(measured, progress))
    return _report(model, prepared, measured, runtime, figures, started)


def _measure(
    model: str | Path, measured: Model | StreamedModel, windows: EvaluationWindows, original: Baseline | None,
    progress: OnProgress | None
) -> dict[str, Any]:  # fmt: skip
    """Return the losses, and their difference from the original's, by the names of ``Evaluation``."""
    from quantkit.evaluate.by_position import by_position
    from quantkit.evaluate.divergence import compare

    figures: dict[str, Any] = dict.fromkeys(_COMPARED)
    comparison = None if original is None else compare(measured, original, progress)
    losses = token_losses(measured, windows, progress) if comparison is None else comparison.losses
    if comparison is not None and original is not None:
        figures.update(comparison.summary(), baseline=original.name, baseline_streamed=original.streamed)
        figures["baseline_perplexity"], figures["baseline_stderr"] = perplexity_of(comparison.baseline_losses)
    perplexity, stderr = perplexity_of(losses)
    if perplexity == float("inf"):
        raise NumericsError(
            f"{model}: perplexity is beyond any number. The model is destroyed; convert with more bits."
        )
    bands = by_position(losses, windows.first, comparison)
    return {**figures, "perplexity": perplexity, "stderr": stderr, "by_position": bands}


_COMPARED = (
    "baseline", "baseline_streamed", "baseline_perplexity", "baseline_stderr", "delta_ln_ppl", "delta_ln_ppl_stderr",
    "kl_mean", "kl_stderr",
    "kl_median", "kl_p99", "kl_max", "top1_agreement", "top1_agreement_stderr",
)  # fmt: skip


def _baseline(
    given: str | Path | Baseline | None, prepared: Prepared, how: _How, cache_only: bool, progress: OnProgress | None
) -> Baseline | None:
    """Return the original, run over the windows unless the caller did that."""
    from quantkit.evaluate.divergence import Baseline

    if given is None:
        return None
    if not isinstance(given, Baseline):
        dtype, stream = how.dtype or "float32", how.stream
        return prepare_baseline(
            given, prepared, dtype=dtype, device=how.device, stream=stream, cache_only=cache_only, progress=progress
        )
    if given.windows.digest() != prepared.windows.digest() or given.windows.first != prepared.windows.first:
        raise RequestError(f"{given.name} was run over other tokens than those of this evaluation. Prepare it again.")
    return given


def _streams(prepared: Prepared, how: _How, quantized_cache: bool) -> bool:
    """Return whether the measured model is streamed.

    Raises RequestError, naming it, for what streaming cannot do.
    """
    from quantkit.evaluate.streamed import must_stream

    if how.runtime:
        if how.stream:
            raise RequestError("--stream holds dequantized weights; --runtime measures packed ones. Leave one out.")
        return False
    if not must_stream(prepared.source, how.dtype or "float32", how.device, how.stream):
        return False
    if quantized_cache:
        path = prepared.source.path
        why = "--stream" if how.stream else f"{path} does not fit into memory and is streamed block by block, which"
        raise RequestError(
            f"{why} does not pass through a quantized KV cache. Measure the weights with --kv-bits 16; for the cache "
            "use --no-stream, or --runtime, which keeps the weights packed."
        )
    return True


def _load(prepared: Prepared, how: _How, streams: bool, progress: OnProgress | None) -> Model | StreamedModel:
    """Load the model under test; one that is streamed runs over the windows here."""
    from quantkit.evaluate.kv_cache.compare import with_cache
    from quantkit.evaluate.streamed import stream
    from quantkit.runtime.layers.linear import use_packed_kernels
    from quantkit.runtime.load import load

    chosen = how.dtype or ("auto" if how.runtime else "float32")
    if streams:
        return stream(
            prepared.source, prepared.windows, dtype=chosen, device=how.device, what="the model", progress=progress
        )
    loaded = load(
        prepared.source, dequantize=not how.runtime, dtype=chosen, kv_bits=how.kv_bits, kv_scales=how.kv_scales,
        device=how.device,
    )  # fmt: skip
    if how.runtime:  # windows are longer than the crossover, beyond which weights would be dequantized after all
        use_packed_kernels(loaded.module)
    return loaded if how.kv_exact is None else with_cache(loaded, how.cache(prepared))


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
    from quantkit.evaluate.kv_cache.compare import cache_facts
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
        data_whole=prepared.text.whole,
        tokenizer_sha256=prepared.tokenizer_sha256,
        ids_sha256=windows.digest(),
        dtype=str(measured.dtype).removeprefix("torch."),
        runtime=runtime,
        streamed=isinstance(measured, StreamedModel),
        device=measured.device.type,
        **cache_facts(measured),
        bits_per_weight=sizes.bits_per_weight,
        model_bits_per_weight=sizes.model_bits_per_weight,
        checkpoint_bytes=sizes.checkpoint_bytes,
        seconds=time.perf_counter() - started,
        peak_host_bytes=peak_rss(),
        versions=versions(),
        hardware=hardware(),
        **figures,
    )
