"""``evaluate``: a model, measured on a text, alone or against its original; and what comes out of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import NumericsError, RequestError
from quantkit.evaluate.evaluation import Evaluation
from quantkit.evaluate.perplexity import Progress, perplexity_of, token_losses
from quantkit.evaluate.windows import Windows, make_windows

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Source
    from quantkit.checkpoint.texts import Text
    from quantkit.core.kvscheme import KVPlan, Scales
    from quantkit.evaluate.divergence import Baseline
    from quantkit.evaluate.streamed import StreamedModel
    from quantkit.runtime.load import Model

__all__ = ["Evaluation", "evaluate", "prepare", "prepare_baseline"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model before its weights are read: its name as it was given, where it lies, its tokenizer's hash, the ids of the text and
    the windows they make."""

    name: str
    source: Source
    text: Text
    tokenizer: Any
    tokenizer_sha256: str
    text_ids: list[int]
    bos_id: int | None
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
    return Prepared(str(model), source, text, tokenizer, tokenizer_digest(tokenizer), ids, bos, windows)


def prepare_baseline(
    baseline: str | Path,
    prepared: Prepared,
    *,
    dtype: str = "float32",
    device: str = "auto",
    stream: bool | None = None,
    cache_only: bool = False,
    progress: Progress | None = None,
) -> Baseline:
    """Run an original over the windows of ``prepared``, with a 16-bit cache, and keep what comparisons need. Serves several ``evaluate``
    calls.

    stream: one block in memory at a time; None does it when the whole original would not fit. cache_only: a quantized model will do, if it is
    the one of ``prepared``: the comparison then tells what its quantized cache costs.

    Raises RequestError when the two models do not see identical token ids.
    """
    from quantkit.checkpoint.source import open_source
    from quantkit.checkpoint.tokenizer import load_tokenizer
    from quantkit.evaluate import streamed
    from quantkit.evaluate.divergence import Baseline, record_baseline
    from quantkit.evaluate.tokens import check_same_tokens
    from quantkit.runtime.load import load

    source = open_source(baseline)
    if source.quantization() is not None and not (cache_only and source.path == prepared.source.path):
        raise RequestError(
            f"--baseline {baseline} is quantized itself. Name the 16- or 32-bit original. (A model is its own baseline, with a 16-bit cache, "
            "where --kv-bits or the checkpoint quantizes the cache.)"
        )
    check_same_tokens(prepared.tokenizer, load_tokenizer(source), prepared.text.text, prepared.name, str(baseline))
    windows, name = prepared.windows, str(baseline)
    if streamed.must_stream(source, dtype, device, stream):
        passed = streamed.stream(source, windows, dtype=dtype, device=device, what="original", progress=progress)
        return Baseline(passed, passed.scored(windows), windows, name, streamed=True)
    original = load(source.path, dequantize=True, dtype=dtype, kv_bits=16, device=device)
    return record_baseline(original, windows, name, release=_release(original), progress=progress)


@dataclass(frozen=True, slots=True)
class _How:
    """How the model under test is run; the fields are those of ``evaluate``."""

    dtype: str | None
    kv_bits: int | str | None
    kv_scales: Scales | None
    runtime: bool
    device: str
    stream: bool | None

    def cache(self, prepared: Prepared) -> KVPlan:
        """What attention will read. Raises RequestError for bits or scales that are none, and for bits asked for in windows too short for a
        page to be packed."""
        from quantkit.evaluate.cache import packs_a_page, shortest_window
        from quantkit.formats.kv_scales import read_kv_plan
        from quantkit.runtime.kv_plan import kv_plan

        path, seq_len = prepared.source.path, prepared.windows.seq_len
        plan = kv_plan(read_kv_plan(path) if path.is_dir() else None, self.kv_bits, self.kv_scales)
        if self.kv_bits is not None and plan.quantized and not packs_a_page(plan, seq_len):
            raise RequestError(
                f"--kv-bits {self.kv_bits} has no effect on windows of {seq_len} tokens: the newest tokens stay at 16 bits. Raise --seq-len "
                f"to {shortest_window(plan)} at least; 1024 or more say something about a cache."
            )
        return plan


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
    kv_scales: Scales | None = None,
    planted_fact: bool = False,
    greedy: int | None = None,
    runtime: bool = False,
    device: str = "auto",
    stream: bool | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Perplexity of a model on a text and, with a baseline, KL divergence, top-1 agreement and the paired difference.

    model: any model or checkpoint that ``quantkit.load`` reads. baseline: the 16- or 32-bit original, or what ``prepare_baseline``
    returned, always with a 16-bit cache; a quantized model may be its own where its cache is quantized. data: a text as
    ``quantkit.checkpoint.texts.load_text`` names it. seq_len: window, BOS counted (default 1024, ``llama.cpp``: 512). tokens: windows x
    seq_len at most; None is every full window. kv_bits, kv_scales: as ``quantkit.load`` takes them. planted_fact: also ask for facts planted
    in texts of ``seq_len`` tokens. greedy: also write so many tokens after the beginnings of windows; both compare the quantized cache with
    a 16-bit one over the same weights. runtime: measure the packed kernels in their own dtype instead of dequantized weights in float32.
    stream: one decoder block in memory at a time, same figures; None does it for a model (or baseline) that would not fit.

    Raises RequestError (request), SourceError (text, files), NumericsError (a loss that is not finite).

    >>> evaluate("out", baseline="smollm2-135m", tokens=24 * 1024).kl_mean                    # doctest: +SKIP
    >>> evaluate("smollm2-135m", kv_bits="k4v2", planted_fact=True).planted_fact.difference   # doctest: +SKIP
    """
    from quantkit.evaluate.cache import CacheProbes

    started = time.perf_counter()
    how = _How(dtype, kv_bits, kv_scales, runtime, device, stream)
    prepared = prepare(model, data=data, seq_len=seq_len, tokens=tokens, protocol=protocol)
    quantized = how.cache(prepared).quantized
    probes = CacheProbes.of(prepared, planted_fact, greedy, quantized)
    streams = _streams(prepared, how, quantized)
    original = _baseline(baseline, prepared, how, quantized, progress)
    measured = _load(prepared, how, streams, progress)
    figures = _measure(model, measured, prepared.windows, original, progress)
    figures.update(probes.run(measured, progress))
    return _report(model, prepared, measured, runtime, figures, started)


def _measure(
    model: str | Path, measured: Model | StreamedModel, windows: Windows, original: Baseline | None, progress: Progress | None
) -> dict[str, Any]:  # fmt: skip
    """Losses, and their difference from the original's, by the names of ``Evaluation``."""
    from quantkit.evaluate.bands import by_position
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
    "baseline", "baseline_streamed", "baseline_perplexity", "baseline_stderr", "delta_ln_ppl", "delta_ln_ppl_stderr", "kl_mean", "kl_stderr",
    "kl_median", "kl_p99", "kl_max", "top1_agreement", "top1_agreement_stderr",
)  # fmt: skip


def _baseline(
    given: str | Path | Baseline | None, prepared: Prepared, how: _How, cache_only: bool, progress: Progress | None
) -> Baseline | None:
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
    """Whether the measured model is streamed. What streaming cannot do is refused by name."""
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


def _load(prepared: Prepared, how: _How, streams: bool, progress: Progress | None) -> Model | StreamedModel:
    from quantkit.evaluate.streamed import stream
    from quantkit.runtime.linear import use_packed_kernels
    from quantkit.runtime.load import load

    chosen = how.dtype or ("auto" if how.runtime else "float32")
    if streams:
        return stream(
            prepared.source, prepared.windows, dtype=chosen, device=how.device, what="the model", progress=progress
        )
    loaded = load(
        prepared.source.path, dequantize=not how.runtime, dtype=chosen, kv_bits=how.kv_bits, kv_scales=how.kv_scales,
        device=how.device,
    )  # fmt: skip
    if how.runtime:  # windows are longer than the crossover, beyond which weights would be dequantized after all
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
    from quantkit.evaluate.cache import cache_facts
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
