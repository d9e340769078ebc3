"""Steps of a sequence that has images: the prompt with what the model reads beside it, and the tokens after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantkit.errors import UnsupportedModel
from quantkit.model.language import trunk
from quantkit.runtime.decode.definition import definition_step
from quantkit.runtime.generate.prefill import Beside
from quantkit.runtime.kv_cache.recompute import TokenCache


def step_with_images(module: Any, ids: Tensor, cache: Any, beside: Beside) -> Tensor:
    """Run a prompt with its images over an empty cache; return final hidden states ``[1, tokens, hidden]``.

    A model may keep in an attribute where its positions go on behind an image (Qwen's ``rope_deltas``). That is taken
    into the cache, so that sequences do not mix it up.

    module: the transformers model. ids: int64 ``[1, tokens]``. cache: as ``transformers_cache`` returns it. beside:
    arguments of its forward.

    Raises UnsupportedModel for a model without a cache, or one that takes no such arguments.
    """
    if isinstance(cache, TokenCache):
        raise UnsupportedModel(
            f"{module.config.model_type}: generates without a cache, and then reads no images. Leave them out."
        )
    body = trunk(module)
    before = _kept(body)
    hidden = definition_step(module, ids, cache, beside=beside)
    remembered = {name: value for name, value in _kept(body).items() if value is not before.get(name)}
    cache.paged.remembered = remembered
    if remembered:
        cache.paged.positions = False  # they go on as the model remembers
    return hidden


def step_after_images(module: Any, ids: Tensor, cache: Any) -> Tensor:
    """Run a token behind such a prompt; return final hidden states ``[1, 1, hidden]``.

    module: the transformers model. ids: int64 ``[1, 1]``. cache: as ``step_with_images`` left it.
    """
    body = trunk(module)
    for name, value in cache.paged.remembered.items():
        setattr(body, name, value)
    return definition_step(module, ids, cache)


def _kept(body: Any) -> dict[str, Tensor | None]:
    """Return the tensors, or places for them, that a module keeps beside parameters and buffers."""
    own = vars(body).items()
    return {name: value for name, value in own if (value is None or isinstance(value, Tensor)) and name[:1] != "_"}
