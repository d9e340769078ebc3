"""The language model inside a model: vision and audio towers stand beside it, and its config is one of several.

Found, not listed: transformers says which submodule decodes text (``get_decoder``) and which part of the config
describes it (``get_text_config``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from quantkit.errors import UnsupportedModel

# Parts of a config that describe a tower. Their models are in the class that holds tower and language model.
TOWER_CONFIGS = ("vision_config", "audio_config")


def text_config(model: Any) -> Any:
    """Return the part of a model's config that describes the language model: widths, layers, vocabulary.

    model: a transformers model, or its config.

    Raises UnsupportedModel if the config has several.
    """
    config = getattr(model, "config", model)
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedModel(
            f"{config.model_type}: its config describes more than one language model ({error}); not supported."
        ) from None


def language_model(model: Any) -> Any:
    """Return the submodule that decodes text: holds embedding and blocks; the whole model if there is no other."""
    found: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = (each for each in found.modules() if isinstance(each, nn.ModuleList))
    return found if any(True for each in lists for _ in each.parameters()) else model


def output_embeddings(model: Any) -> Any:
    """Return the head: the module that turns final hidden states into logits; None if a model has none.

    It may lie in a language model that another model wraps.
    """
    from transformers import PreTrainedModel

    inside = (each for each in model.modules() if isinstance(each, PreTrainedModel))
    heads = (each.get_output_embeddings() for each in inside)
    return next((head for head in heads if head is not None), None)


def trunk(model: Any) -> Any:
    """Return the submodule that turns tokens into final hidden states: the model without its head."""
    from transformers import PreTrainedModel

    head = output_embeddings(model)
    inside = [model.base_model, *language_model(model).modules()]  # a wrapper may hold a whole language model
    for module in inside:
        parts = list(module.modules()) if isinstance(module, PreTrainedModel) else []
        if any(isinstance(part, nn.ModuleList) for part in parts) and all(part is not head for part in parts):
            return module
    return model.base_model


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a submodule, "" for the model itself."""
    return str(next(name for name, module in model.named_modules() if module is wanted))


def towers(model: nn.Module) -> list[str]:
    """Name the towers of a model: submodules that are models of their own, and hold no part of the language model.

    The language model holds the embedding of tokens.
    """
    from transformers import PreTrainedModel

    decoder = language_model(model)
    get: Any = getattr(model, "get_input_embeddings", None)
    embedding = None if get is None else get()
    text = {id(module) for module in decoder.modules()}
    if id(embedding) in text:  # inside the language model, too, what does not hold it is a tower
        text = {id(decoder), id(embedding)}
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{tower}.") for tower in found)
        if name and isinstance(module, PreTrainedModel) and not inside:
            held = {id(each) for each in module.modules()}
            if not held & {*text, id(embedding)}:
                found.append(name)
    return found


def auto_class(kind: str, config: Mapping[str, Any]) -> Any:
    """Return the auto class of transformers that builds a config's model.

    A type may have a class with towers and one without; the one that ``architectures`` names is in the checkpoint.

    kind: the config's model_type.
    config: content of config.json.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    from transformers.models.auto import modeling_auto

    known = {
        AutoModelForCausalLM: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        AutoModelForImageTextToText: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        AutoModelForMultimodalLM: modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    classes = [auto for auto, names in known.items() if kind in names]
    named = config.get("architectures") or ()
    stored = [auto for auto in classes if known[auto][kind] in named]
    if not stored and any(config.get(name) is not None for name in TOWER_CONFIGS):
        stored = [auto for auto in classes if auto is not AutoModelForCausalLM]
    return next(iter(stored or classes), AutoModelForCausalLM)
