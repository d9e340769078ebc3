"""Mixtures of experts in a GGUF file: their part of the config, and one expert's tensor in the stack of a layer.

A file holds a matrix of all experts of a layer as one tensor, ``blk.3.ffn_up_exps.weight`` [experts, out, in], whose
bytes lie expert after expert. What llama.cpp's graphs take for granted of these models stands in
``architectures.ARCHITECTURES``; a file that says otherwise is another variant, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from quantkit.checkpoint.foreign_files.config import MOST_EXPERTS, MOST_WIDTH
from quantkit.checkpoint.foreign_files.fields import Whole, field, shown
from quantkit.checkpoint.gguf_files.architectures import ARCHITECTURES, EXPERT_STACKS
from quantkit.checkpoint.gguf_files.header import Header, StoredTensor
from quantkit.errors import SourceError, UnsupportedModel

MIXTURES = tuple(name for name, architecture in ARCHITECTURES.items() if architecture.expert_parts)
# Fields that llama.cpp does not read for these two, and what they may say if they are there. 0: nothing is said;
# 1 and 3: softmax over all experts, over the chosen ones (llama_expert_gating_func_type in src/llama-hparams.h).
USUAL: dict[str, tuple[Any, ...]] = {
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "leading_dense_block_count": (0,),
}
GATING = {"qwen3moe": (0, 1), "gpt-oss": (0, 3)}
# Every second layer sees everything (src/models/openai-moe.cpp).
PERIOD = 2


class Opened(Protocol):
    """What a config is rebuilt from: an opened GGUF file."""

    path: Path
    header: Header

    def stored(self, name: str) -> StoredTensor | None:
        """Return the table entry of a tensor by its GGUF name, None if the file has none."""


def mixture_config(name: str, source: Opened, config: Mapping[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """Return the config values that only mixtures have, after a check of the stacked tensors.

    name: the architecture, as the file calls it. source: the opened file. config: what all architectures have.
    parts: what is stacked, weights or weights and biases.

    Raises SourceError for a field or tensor that is missing or contradicts another, UnsupportedModel for a variant that
    is not read.
    """
    metadata, where = source.header.metadata, str(source.path)
    experts = field(metadata, f"{name}.expert_count", Whole(1, MOST_EXPERTS), where)
    inner = field(metadata, f"{name}.expert_feed_forward_length", Whole(1, MOST_WIDTH), where)
    head_dim = metadata.get(f"{name}.attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    _check_usual(name, source, head_dim)
    _check_stacks(name, source, config, experts, inner, parts)
    found = {
        "head_dim": head_dim,
        "attention_bias": _attention_bias(source),
        "num_experts_per_tok": field(metadata, f"{name}.expert_used_count", Whole(1, experts), where),
    }
    if name == "qwen3moe":
        return {**found, "num_experts": experts, "moe_intermediate_size": inner}
    layers = config["num_hidden_layers"]
    return {
        **found,
        "num_local_experts": experts,
        "intermediate_size": inner,
        "sliding_window": field(metadata, f"{name}.attention.sliding_window", Whole(1, 1 << 27), where),
        "layer_types": ["sliding_attention" if (i + 1) % PERIOD else "full_attention" for i in range(layers)],
        "rope_scaling": _gpt_oss_rope(config["rope_scaling"]),
    }


def _gpt_oss_rope(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ``rope_scaling`` entry of gpt-oss; left out, transformers would stretch positions 32-fold.

    Its YaRN begins and ends between whole pairs (``truncate`` in transformers' GptOssConfig), which files do not say.
    """
    return {"rope_type": "default"} if scaling is None else {**scaling, "truncate": False}


def _check_usual(name: str, source: Opened, head_dim: int) -> None:
    """Raise UnsupportedModel for a file that asks for other than what llama.cpp computes for its architecture."""
    theta = source.header.metadata.get(f"{name}.rope.freq_base")
    usual = {
        **USUAL,
        "expert_gating_func": GATING[name],
        "attention.value_length": (head_dim,),
        "rope.dimension_count": (head_dim,),
        "rope.freq_base_swa": (theta,),
        "attention.sliding_window_pattern": (PERIOD,),
    }
    for key, allowed in usual.items():
        value = source.header.metadata.get(f"{name}.{key}", allowed[0])
        if value not in allowed:
            raise UnsupportedModel(
                f"{source.path}: {name}.{key} is {shown(value)}, where {' or '.join(map(str, allowed))} is read. This"
                " is another variant of the architecture; use the model's Hugging Face folder instead."
            )


def _check_stacks(
    name: str, source: Opened, config: Mapping[str, Any], experts: int, inner: int, parts: tuple[str, ...]
) -> None:
    """Raise SourceError unless every layer has its stacks, of the shapes that the metadata gives."""
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        for stack in EXPERT_STACKS:
            out, inputs = (hidden, inner) if stack == "ffn_down_exps" else (inner, hidden)
            for part in parts:
                tensor = f"blk.{layer}.{stack}.{part}"
                stored = source.stored(tensor)
                if stored is None:
                    raise SourceError(
                        f"{source.path}: lacks {tensor}, the experts of layer {layer}. This file holds no whole model;"
                        " download it again."
                    )
                shape = (experts, out, inputs) if part == "weight" else (experts, out)
                if stored.shape != shape:
                    raise SourceError(
                        f"{source.path}: tensor {tensor!r} has shape {list(stored.shape)}; {name}.expert_count,"
                        f" expert_feed_forward_length and embedding_length give {list(shape)}. The file is damaged:"
                        " download it again."
                    )


def _attention_bias(source: Opened) -> bool:
    """Tell whether the attention's linears have biases. Raises UnsupportedModel where only some of them have."""
    linears = ("attn_q", "attn_k", "attn_v", "attn_output")
    biased = [linear for linear in linears if source.stored(f"blk.0.{linear}.bias")]
    if biased and len(biased) < len(linears):
        raise UnsupportedModel(f"{source.path}: bias on {', '.join(biased)} only, which no such model has.")
    return bool(biased)


def expert_entries(stack: StoredTensor) -> list[StoredTensor]:
    """Return where each expert's part of a stacked tensor lies.

    stack: ``[experts, out, in]`` or ``[experts, out]``; whole rows, and so whole blocks, belong to one expert.
    """
    count, *shape = stack.shape
    size = stack.nbytes // count
    return [StoredTensor(stack.kind, tuple(shape), stack.offset + i * size, size) for i in range(count)]
