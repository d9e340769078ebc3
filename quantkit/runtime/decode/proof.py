"""The proof that a fast decode step is right: a small random twin of the model decodes by it and by the definition."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantkit.core.kvscheme import KVPlan
from quantkit.core.precision import exact_products
from quantkit.errors import QuantkitError, QuantkitWarning
from quantkit.model.language import text_config
from quantkit.runtime.decode.definition import definition_step
from quantkit.runtime.decode.family import Family, recognise
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.transformers_cache import layer_specs, transformers_cache

# Tokens that the twin reads: its longrope, yarn and llama 4 scalings begin at 128.
PROOF_TOKENS = 140
# Largest relative difference on the twin; float32 sums in another order give about 1e-6.
CLOSE = 1e-4

Step = Callable[[Tensor, KVCache], Tensor | None]  # ids [batch, 1], cache -> hidden states, or None


def prove(config: str, device: torch.device, make: Callable[[Family], Step | None], close: float) -> bool:
    """Tell whether a config's twin gives the same hidden states by a fast step as by transformers' definition.

    The twin reads a prompt longer than its sliding window and than the context that its positions were scaled from,
    then takes four steps of two sequences, of equal and of different lengths, over float32 pages. Reading packed pages
    does not depend on the model: tests check it.

    config: config.json as text.
    device: where the step runs.
    make: returns the step of a family, None without one.
    close: largest difference of the final hidden states, relative to their norm.
    """
    from quantkit.model.twin import small_twin

    try:
        twin: Any = small_twin(json.loads(config)).to(device)
        family = recognise(twin)
        step = None if family is None else make(family)
        with exact_products():
            return step is not None and _equals_the_definition(twin, step, device, close)
    except QuantkitError as error:  # no twin, no proof: the definition runs
        warnings.warn(f"decoding stays with the transformers definition: {error}", QuantkitWarning, stacklevel=3)
        return False


@torch.inference_mode()
def _equals_the_definition(twin: Any, step: Step, device: torch.device, close: float) -> bool:
    from quantkit.model.twin import VOCAB

    context = getattr(text_config(twin), "max_position_embeddings", None)
    count = min(PROOF_TOKENS, int(context) if context else PROOF_TOKENS)
    vocab = min(VOCAB, int(text_config(twin).vocab_size))
    ids = torch.randint(3, vocab, (2, count), generator=torch.Generator().manual_seed(2)).to(device)
    return all(_agree(twin, step, ids, shorter, close) for shorter in (0, 3))


def _agree(twin: Any, step: Step, ids: Tensor, shorter: int, close: float) -> bool:
    """Tell whether both decoders agree on two sequences.

    shorter: tokens that the second sequence has less than the first.
    """
    specs = layer_specs(twin, KVPlan(), torch.float32, ids.device)
    paged = [KVCache(specs, 32) for _ in range(2)]
    caches = [transformers_cache(cache) for cache in paged]
    prompt = ids.shape[1] - 4
    for cache in caches:
        definition_step(twin, ids[:, :prompt], cache, [prompt, prompt - shorter] if shorter else None)
    for last in range(prompt, ids.shape[1]):
        expected = definition_step(twin, ids[:, last : last + 1], caches[0])
        hidden = step(ids[:, last : last + 1], paged[1])
        if hidden is None or not float((hidden - expected).norm()) <= close * float(expected.norm()):  # NaN: no proof
            return False
    return True
