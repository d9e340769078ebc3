"""Which cache a model decodes over, decided on its random twin: pages and states, or the text computed anew."""

from __future__ import annotations

import json
import warnings
from functools import lru_cache
from typing import Any

import torch

from quantkit.core.kvscheme import KVPlan
from quantkit.core.precision import exact_products
from quantkit.errors import QuantkitError, QuantkitWarning, UnsupportedModel
from quantkit.model.language import text_config
from quantkit.runtime.decode.definition import definition_step
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.layer_kinds import layer_kinds
from quantkit.runtime.kv_cache.transformers_cache import layer_specs, transformers_cache

PROMPT, STEPS = 21, 3  # longer than the twin's sliding window
CLOSE = 1e-4  # relative, float32
# What a model raises that does not take this cache.
NOT_TAKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def recomputes(config: dict[str, Any], *, quantized: bool) -> bool:
    """Tell whether a model must compute the whole text for every token. Warns, with the reason.

    config: content of config.json.
    quantized: its cache is to be held in fewer bits.

    Raises UnsupportedModel if it then has no cache.
    """
    why = why_not_cached(json.dumps(config, sort_keys=True))
    if why and quantized:
        raise UnsupportedModel(f"{config.get('model_type')}: its cache cannot be held in fewer bits: {why}.")
    if why:
        warnings.warn(
            f"generation computes the whole text again for every token, without a cache: {why}.",
            QuantkitWarning,
            stacklevel=2,
        )
    return bool(why)


@lru_cache(maxsize=8)
def why_not_cached(config: str) -> str:
    """Return why a config's model cannot step over pages and states; "" if it can.

    Its twin reads a prompt and takes three steps; the hidden states must be those of the whole text.

    config: config.json as text.
    """
    from quantkit.model.twin import small_twin

    try:
        twin: Any = small_twin(json.loads(config))
        kinds = layer_kinds(twin)
        if kinds is None:
            return "transformers keeps a cache of another kind for it"
        with exact_products():
            specs = layer_specs(twin, KVPlan(), torch.float32, torch.device("cpu"))
            return _difference(twin, KVCache(specs, 32, kinds))
    except QuantkitError as error:
        return f"no small model of its kind could be tried ({error})"
    except NOT_TAKEN as error:
        return f"a small model of its kind does not step over it ({type(error).__name__}: {str(error)[:100]})"


@torch.inference_mode()
def _difference(twin: Any, cache: KVCache) -> str:
    vocab = min(64, int(text_config(twin).vocab_size))
    ids = torch.randint(3, vocab, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(2))
    expected = twin.base_model(input_ids=ids, use_cache=False).last_hidden_state
    seam, found = transformers_cache(cache), []
    for piece in ids.split([PROMPT, *[1] * STEPS], dim=1):
        found.append(definition_step(twin, piece, seam))
    error = float((torch.cat(found, dim=1) - expected).norm() / expected.norm())
    return "" if error <= CLOSE else f"a small model of its kind computes something else over it ({error:.0e})"
