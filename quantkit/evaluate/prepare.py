"""A model before its weights are read, and an original whose hidden states are kept for comparisons."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.long_texts import MOST_TOKENS
from quantkit.errors import RequestError
from quantkit.evaluate.kv_cache.planted_facts import TEXTS
from quantkit.evaluate.perplexity import OnProgress
from quantkit.evaluate.windows import DEFAULT_SEQ_LEN, EvaluationWindows, make_windows

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Source
    from quantkit.checkpoint.texts import Text
    from quantkit.evaluate.divergence import Baseline
    from quantkit.runtime.load import Model


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model before its weights are read, and the text it will be measured on.

    name: of the model, as it was given. tokenizer_sha256: see ``tokens.tokenizer_digest``. text_ids: of the text, int32
    ``[tokens]``, or its first ``most`` where no more are needed. bos_id: what opens each window, None for a model that
    sees no BOS.
    """

    name: str
    source: Source
    text: Text
    tokenizer: Any
    tokenizer_sha256: str
    text_ids: NDArray[np.int32]
    most: int
    bos_id: int | None
    windows: EvaluationWindows


def prepare(
    model: str | Path,
    *,
    data: str = "wikipedia-sample",
    seq_len: int | None = None,
    tokens: int | None = None,
    protocol: str = "gptq",
) -> Prepared:
    """Open a model and cut the text into windows with its tokenizer.

    Everything that can be wrong without weights is found here: raises RequestError and SourceError.
    """
    from quantkit.checkpoint.open import open_source
    from quantkit.checkpoint.texts import load_text
    from quantkit.checkpoint.tokenizer import check_vocabulary, load_tokenizer, wants_bos
    from quantkit.evaluate.tokens import bos_id, text_ids, tokenizer_digest
    from quantkit.runtime.layers.dense_source import stored_experts

    source = stored_experts(open_source(model))
    text = load_text(data, split="evaluation")
    tokenizer = load_tokenizer(source)
    bos = bos_id(tokenizer) if wants_bos(tokenizer) else None
    most = _needed(tokens, protocol, seq_len)
    ids = text_ids(tokenizer, text.text, most)
    text = replace(text, whole=text.whole and len(ids) < MOST_TOKENS)
    check_vocabulary([int(ids.max())], source.config, model)
    windows = make_windows(ids, protocol=protocol, seq_len=seq_len, bos_id=bos, tokens=tokens)
    limit = source.config.get("max_position_embeddings")
    if isinstance(limit, int) and windows.seq_len > limit:
        raise RequestError(
            f"--seq-len {windows.seq_len}: {model} was made for at most {limit} tokens. Lower --seq-len."
        )
    return Prepared(str(model), source, text, tokenizer, tokenizer_digest(tokenizer), ids, most, bos, windows)


def _needed(tokens: int | None, protocol: str, seq_len: int | None) -> int:
    """Return how many tokens of the text windows and planted facts take at most."""
    if tokens is None:
        return MOST_TOKENS
    return min(max(tokens, TEXTS * (seq_len or DEFAULT_SEQ_LEN.get(protocol, 0)), 1), MOST_TOKENS)


def prepare_baseline(
    baseline: str | Path,
    prepared: Prepared,
    *,
    dtype: str = "float32",
    device: str = "auto",
    stream: bool | None = None,
    cache_only: bool = False,
    progress: OnProgress | None = None,
) -> Baseline:
    """Run an original over the windows of ``prepared``, with a 16-bit cache, and keep what comparisons need.

    What is returned serves several calls of ``evaluate``.

    stream: one block in memory at a time; None does it when the whole original would not fit. cache_only: a quantized
    model will do, if it is the one of ``prepared``: the comparison then tells what its quantized cache costs.

    Raises RequestError when the two models do not see identical token ids.
    """
    from quantkit.checkpoint.open import open_source
    from quantkit.checkpoint.tokenizer import load_tokenizer
    from quantkit.evaluate import streamed
    from quantkit.evaluate.divergence import Baseline, record_baseline
    from quantkit.evaluate.tokens import check_same_tokens, text_ids
    from quantkit.runtime.layers.dense_source import as_original
    from quantkit.runtime.load import load

    source = as_original(open_source(baseline))
    if source.quantization() is not None and not (cache_only and source.path == prepared.source.path):
        raise RequestError(
            f"--baseline {baseline} is quantized itself. Name the 16- or 32-bit original. (A model is its own baseline,"
            " with a 16-bit cache, where --kv-bits or the checkpoint quantizes the cache.)"
        )
    tokenizer = load_tokenizer(source)
    ids = text_ids(tokenizer, prepared.text.text, prepared.most)
    check_same_tokens(prepared.text_ids, ids, prepared.tokenizer, tokenizer, (prepared.name, str(baseline)))
    windows, name = prepared.windows, str(baseline)
    if streamed.must_stream(source, dtype, device, stream):
        passed = streamed.stream(source, windows, dtype=dtype, device=device, what="original", progress=progress)
        return Baseline(passed, passed.scored(windows), windows, name, streamed=True)
    original = load(source, dequantize=True, dtype=dtype, kv_bits=16, device=device)
    return record_baseline(original, windows, name, release=_release(original), progress=progress)


def _release(model: Model) -> Callable[[], None]:
    """Return a function that drops the decoder blocks; embedding, final norm and head stay."""

    def release() -> None:
        from quantkit.model.skeleton import find_blocks

        del find_blocks(model.module).modules[:]
        gc.collect()

    return release
