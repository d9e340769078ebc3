"""Which cache a model decodes over, decided on its random twin: pages and states, or the text computed anew."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantkit.core.kvscheme import KVPlan
from quantkit.core.precision import exact_products
from quantkit.errors import QuantkitError, QuantkitWarning, UnsupportedModel
from quantkit.model.language import text_config, trunk
from quantkit.runtime.decode.definition import definition_step
from quantkit.runtime.decode.family import recognise
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.layer_kinds import LayerKind, layer_kinds, plain
from quantkit.runtime.kv_cache.transformers_cache import layer_specs, transformers_cache

PROMPT, SHORTER, STEPS = 21, 5, 3  # longer than the twin's sliding window
CLOSE = 1e-4  # relative, float32
# What a model raises that does not take this cache.
NOT_TAKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Stepping:
    """How a model decodes.

    caches: over pages and states; else the whole text is computed for every token.
    batches: several sequences in a step, padded on the left; else each by itself, its prompt in one piece.
    positions: the model is told positions and padding; else it counts by its cache.
    why: what keeps it from more, in words.
    """

    caches: bool = True
    batches: bool = True
    positions: bool = True
    why: str = ""


def stepping(module: Any, config: dict[str, Any], *, quantized: bool) -> Stepping:
    """Find how a model decodes. Warns, with the reason, where there is no cache.

    module: the transformers model. A model of the common decoder family steps in batches: tests prove it.
    config: content of config.json.
    quantized: its cache is to be held in fewer bits.

    Raises UnsupportedModel if it then has no cache.
    """
    if recognise(module) is not None:
        return Stepping()
    found = tried(json.dumps(config, sort_keys=True))
    if found.caches:
        return found
    if quantized:
        raise UnsupportedModel(f"{config.get('model_type')}: its cache cannot be held in fewer bits: {found.why}.")
    warnings.warn(
        f"generation computes the whole text again for every token, without a cache: {found.why}.",
        QuantkitWarning,
        stacklevel=2,
    )
    return found


@lru_cache(maxsize=8)
def tried(config: str) -> Stepping:
    """Try a config's twin: each way of stepping must give the hidden states of the whole text. The first that does.

    config: config.json as text.
    """
    from quantkit.model.twin import small_twin

    no_cache = Stepping(caches=False, batches=False)
    try:
        twin: Any = small_twin(json.loads(config))
    except QuantkitError as error:
        return replace(no_cache, why=f"no small model of its kind could be tried ({error})")
    kinds = layer_kinds(twin)
    if kinds is None:
        return replace(no_cache, why="transformers keeps a cache of another kind for it")
    ways = [Stepping()] if plain(kinds) else []
    why = ""
    for way in (*ways, Stepping(batches=False), Stepping(batches=False, positions=False)):
        try:
            with exact_products():
                difference = _difference(twin, kinds, way)
        except (QuantkitError, *NOT_TAKEN) as trouble:
            why = f"a small model of its kind does not step over it ({type(trouble).__name__}: {str(trouble)[:100]})"
            continue
        if difference <= CLOSE:
            return replace(way, why=why)
        why = f"a small model of its kind computes something else over it ({difference:.0e})"
    return replace(no_cache, why=why)


@torch.inference_mode()
def _difference(twin: Any, kinds: tuple[LayerKind, ...], way: Stepping) -> float:
    """Return the largest relative difference between steps over the cache and the whole text; two sequences, if any."""
    vocab = min(64, int(text_config(twin).vocab_size))
    ids = torch.randint(3, vocab, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(2))
    lengths = [PROMPT, PROMPT - SHORTER] if way.batches else [PROMPT]
    expected = [trunk(twin)(input_ids=ids[b : b + 1, -(n + STEPS) :], use_cache=False) for b, n in enumerate(lengths)]
    cache = KVCache(layer_specs(twin, KVPlan(), torch.float32, torch.device("cpu")), 32, kinds)
    cache.positions = way.positions
    seam, found = transformers_cache(cache), []
    for piece in ids[: len(lengths)].split([PROMPT, *[1] * STEPS], dim=1):
        counts = lengths if way.batches and piece.shape[1] > 1 else None
        found.append(definition_step(twin, piece, seam, counts))
    stepped = torch.cat(found, dim=1)
    errors = []
    for b, (length, output) in enumerate(zip(lengths, expected, strict=True)):
        whole: Tensor = output.last_hidden_state[0]
        errors.append(float((stepped[b, -(length + STEPS) :] - whole).norm() / whole.norm()))
    return max(errors)
