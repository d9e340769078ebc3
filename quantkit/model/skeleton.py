"""Build the model on the meta device: find its decoder blocks and their linears, load one module's weights at a time.

Structure is found, not listed: decoder blocks are the ModuleList that holds most parameters. There is no file per
family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.foreign_files.code_references import without_code
from quantkit.checkpoint.foreign_files.library_words import refused_field, unknown_word
from quantkit.core.empty_build import parameters_on_meta
from quantkit.errors import UnsupportedModel
from quantkit.model.language import auto_class, language_model, name_of, text_config, towers
from quantkit.model.linears.kept_dense import kept_dense
from quantkit.model.linears.transposed import replace_conv1d
from quantkit.model.mixture.find import unfuse_experts


@dataclass(frozen=True)
class Blocks:
    """The decoder blocks of a model: ``model.layers`` and the like."""

    prefix: str
    modules: nn.ModuleList

    def __len__(self) -> int:
        return len(self.modules)

    def name(self, index: int) -> str:
        return f"{self.prefix}.{index}"


# Keys of config.json that say how weights are stored, not what the model is. How attention runs goes with the keys that
# name code: without a word on it transformers takes torch's where the architecture allows it (not with soft caps or
# sinks: gemma2, gpt_oss).
NOT_STRUCTURE = ("quantization_config", "dtype", "torch_dtype", "transformers_version", "return_dict")


# What transformers' classes raise over a config that they do not understand.
BUILDING = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError,
)  # fmt: skip


def build_skeleton(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, *, unfuse: bool = True) -> nn.Module:
    """Build the transformers model of a config, parameters on the meta device, in eval mode.

    Buffers (rotary tables, scales) are real. No code but that of transformers runs, whatever the config names.

    unfuse: experts become one linear per expert and projection (``model/mixture/experts.py``), GPT-2's Conv1D linears.

    A model with vision or audio towers is built whole.

    Raises UnsupportedModel for a model type that transformers does not know or that is no causal language model.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    data = _with_infinities(without_code(config, *NOT_STRUCTURE))
    kind = data.pop("model_type", None)
    if kind is None:
        raise UnsupportedModel(
            "config.json has no model_type: this is no transformers model. Add it, or use another export."
        )
    try:
        hf_config = AutoConfig.for_model(kind, **data)
    except StrictDataclassError as error:
        raise UnsupportedModel(
            f"config.json of this {kind}: {refused_field(error, data)}. Correct it, or download it again."
        ) from error
    except (*BUILDING, ValueError) as error:
        if kind in CONFIG_MAPPING:
            raise UnsupportedModel(
                f"config.json of this {kind} does not fit ({error!r}). Download it again."
            ) from error
        raise UnsupportedModel(
            f"model_type {kind!r} is unknown to the installed transformers. Upgrade transformers."
        ) from None
    model = _built(kind, data, hf_config, dtype)
    model.requires_grad_(False)
    if unfuse:
        unfuse_experts(model)
        replace_conv1d(model)
    return model.eval()


def _built(kind: str, data: Mapping[str, Any], hf_config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the model; what transformers raises becomes one sentence."""
    from transformers import PreTrainedModel

    try:
        with parameters_on_meta(PreTrainedModel):
            model: nn.Module = auto_class(kind, data).from_config(hf_config, dtype=dtype, trust_remote_code=False)
    except BUILDING as error:
        word = unknown_word(error, data)
        raise UnsupportedModel(
            f"config.json of this {kind}: {word}, unknown to the installed transformers. Correct it, or upgrade."
            if word
            else f"config.json of this {kind} makes no model ({error!r}). Download it again."
        ) from error
    except ValueError as error:
        raise UnsupportedModel(
            f"model_type {kind!r}: transformers has no causal language model of that type"
            + ("." if "configuration class" in str(error) else f" ({_first_sentence(error)}).")
        ) from None
    return model


# How transformers writes what JSON has no number for.
INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def _with_infinities(value: Any) -> Any:
    """Return a config with ``{"__float__": "Infinity"}`` as the number it stands for."""
    if isinstance(value, dict):
        tag = value.get("__float__") if len(value) == 1 else None
        if isinstance(tag, str) and tag in INFINITIES:
            return INFINITIES[tag]
        return {key: _with_infinities(entry) for key, entry in value.items()}
    return [_with_infinities(entry) for entry in value] if isinstance(value, list) else value


def _first_sentence(error: Exception) -> str:
    """Without the list of everything that would have been possible."""
    return str(error).partition("\n")[0].partition(". ")[0]


def find_blocks(model: nn.Module) -> Blocks:
    """Find the ModuleList of the language model that holds most parameters.

    Raises UnsupportedModel if there is none, or its blocks hold no linears.
    """
    best: tuple[int, str, nn.ModuleList] | None = None
    decoder = language_model(model)
    beside = tuple(f"{tower}." for tower in towers(model))
    for name, module in decoder.named_modules(prefix=name_of(model, decoder)):
        if isinstance(module, nn.ModuleList) and not name.startswith(beside):
            size = sum(p.numel() for p in module.parameters())
            if best is None or size > best[0]:
                best = (size, name, module)
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not all(isinstance(getattr(text_config(model), key, None), int) for key in ("hidden_size", "vocab_size")):
        raise UnsupportedModel(f"{kind}: its config names no hidden_size or no vocab_size; not supported.")
    if best is None or best[0] == 0:
        raise UnsupportedModel(f"{kind}: no list of decoder blocks was found; this architecture is not supported.")
    blocks = Blocks(best[1], best[2])
    if not any(block_linears(block) for block in blocks.modules):
        raise UnsupportedModel(
            f"{kind}: {blocks.name(0)} ({type(blocks.modules[0]).__name__}) and all other blocks hold no nn.Linear to"
            " quantize (their matrices are of another kind); not supported."
        )
    return blocks


def dense_weights_of(block: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a block's weights that stay in 16 bit because no linear holds them.

    Convolutions, states and their gates, routers, tables: weights of more than one dimension, by name inside the block.
    """
    linears = block_linears(block)
    return {
        f"{name}.{local}" if name else local: parameter.shape
        for name, module in block.named_modules()
        if name not in linears
        for local, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1
    }


def block_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of one block by their name inside it, in module order, but those of ``kept_dense``."""
    known = kept_dense(block)
    return {
        name: module for name, module in block.named_modules() if isinstance(module, nn.Linear) and name not in known
    }


def widest_input(blocks: Blocks) -> int:
    """Return the most inputs that a linear of any block has; 1 without linears."""
    return max(
        (block_module.in_features for block in blocks.modules for block_module in block_linears(block).values()),
        default=1,
    )
