"""Rebuild the config.json of the original from a GGUF file's metadata and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.foreign_files.fields import Whole, check_field
from quantkit.checkpoint.gguf_files.architectures import ROPE_FACTORS, Architecture
from quantkit.checkpoint.gguf_files.header import Header, StoredTensor
from quantkit.checkpoint.gguf_files.mixtures import MIXTURES, mixture_config
from quantkit.errors import SourceError, UnsupportedModel


class Opened(Protocol):
    """What a config is rebuilt from: an opened GGUF file."""

    path: Path
    header: Header

    def stored(self, name: str) -> StoredTensor | None:
        """Return the table entry of a tensor by its GGUF name, None if the file has none."""

    def raw(self, name: str) -> Tensor:
        """Read a stored tensor's float32 values by its GGUF name."""


def rebuild_config(name: str, architecture: Architecture, source: Opened) -> dict[str, Any]:
    """Rebuild the config.json that the original had, as far as the file tells.

    Nothing is guessed from a class's defaults.

    name: the architecture, as the file calls it. architecture: its table. source: the opened file.

    Raises SourceError for a field that is missing, UnsupportedModel for a variant that is not read.
    """
    metadata, path = source.header.metadata, source.path

    def need(key: str) -> Any:
        if f"{name}.{key}" not in metadata:
            raise SourceError(
                f"{path}: the metadata lacks {name}.{key}. The file is damaged, or made by another converter."
            )
        return metadata[f"{name}.{key}"]

    def may(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    embedding = _embedding(name, architecture, source)
    heads, hidden, layers = need("attention.head_count"), need("embedding_length"), need("block_count")
    if not isinstance(heads, int) or not isinstance(need("feed_forward_length"), int):
        raise UnsupportedModel(f"{path}: layers differ in heads or width; such models are not read from GGUF.")
    check_field(str(path), f"{name}.attention.head_count", heads, Whole(1, 1 << 14))
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **architecture.extra,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": may("attention.head_count_kv", heads),
        "rms_norm_eps": _decimal(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": _decimal(may("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(source, need, may),
        "tie_word_embeddings": source.stored("output.weight") is None,
        "torch_dtype": _dtype(embedding, source),
        "use_cache": True,
        "initializer_range": 0.02,
    }
    config |= _tokens(metadata)
    if architecture.expert_parts:
        return config | mixture_config(name, source, config, architecture.expert_parts)
    return config | _of_architecture(name, source, config, may)


def _embedding(name: str, architecture: Architecture, source: Opened) -> StoredTensor:
    """Return the embedding's entry.

    Raises UnsupportedModel for a mixture in an architecture whose mixtures are not read, SourceError for half a model.
    """
    experts = source.header.metadata.get(f"{name}.expert_count")
    if experts and not architecture.expert_parts:
        raise UnsupportedModel(
            f"{source.path}: a mixture of {experts} experts in architecture {name!r}; of mixtures, GGUF files of"
            f" {' and '.join(MIXTURES)} are read. Use the model's Hugging Face folder instead."
        )
    embedding = source.stored("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{source.path}: lacks token_embd.weight. This file holds no whole model; download it again.")
    return embedding


def _dtype(embedding: StoredTensor, source: Opened) -> str:
    """Name the 16-bit dtype that holds most of what the file was made from.

    bfloat16 where the file has it, and beside MXFP4, whose powers of two float16 may lack: those models are bfloat16.
    """
    powers = any(stored.kind == "MXFP4" for stored in source.header.tensors.values())
    return "bfloat16" if powers or embedding.kind == "BF16" else "float16"


def _tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens, None for one that is not there: some writers store -1, unsigned."""
    ids = {
        f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {key: None if value == (1 << 32) - 1 else value for key, value in ids.items()}


def _of_architecture(name: str, source: Opened, config: dict[str, Any], may: Any) -> dict[str, Any]:
    """Return the config values that only some architectures have."""
    head_dim = may("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    layers = config["num_hidden_layers"]
    if name == "llama":
        biased = [f"attn_{p}" for p in ("q", "k", "v", "output") if source.stored(f"blk.0.attn_{p}.bias")]
        if biased and len(biased) < 4:
            raise UnsupportedModel(f"{source.path}: bias on {', '.join(biased)} only, which no Llama has.")
        return {
            "head_dim": may("attention.key_length", may("rope.dimension_count", head_dim)),
            "attention_bias": bool(biased),
            "mlp_bias": source.stored("blk.0.ffn_down.bias") is not None,
        }
    if name == "gemma3":
        # llama.cpp scales by 1/sqrt(head_dim), except in the 27B model (the one of 62 layers), by 1/sqrt(hidden/heads).
        scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
        return {
            "head_dim": head_dim,
            "query_pre_attn_scalar": scalar,
            "sliding_window": may("attention.sliding_window", 512),
            "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)],
            "final_logit_softcapping": may("final_logit_softcapping"),
            "attn_logit_softcapping": None,
        }
    if name == "granite":
        return {
            ours: _decimal(may(theirs, 1.0))
            for ours, theirs in (
                ("attention_multiplier", "attention.scale"),
                ("embedding_multiplier", "embedding_scale"),
                ("residual_multiplier", "residual_scale"),
                ("logits_scaling", "logit_scale"),
            )
        }
    if name == "phi3":
        return {
            "sliding_window": may("attention.sliding_window") or None,
            "original_max_position_embeddings": may(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
        }
    return {"head_dim": head_dim} if name == "qwen3" else {}


def _rope_scaling(source: Opened, need: Any, may: Any) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` entry, None if positions are not stretched."""
    if source.stored(ROPE_FACTORS):
        return _llama3_scaling(source, may)
    kind = may("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = may("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": _decimal(factor)} if factor != 1.0 else None
    if kind == "yarn":
        original = may("rope.scaling.original_context_length", need("context_length"))
        return {
            "rope_type": "yarn",
            "factor": _decimal(factor),
            "original_max_position_embeddings": original,
            **_yarn(source, may),
        }
    raise UnsupportedModel(
        f"{source.path}: rotary scaling {kind!r} is not read from GGUF; use the Hugging Face folder."
    )


def _yarn(source: Opened, may: Any) -> dict[str, Any]:
    """Return what a file says of YaRN beside its factor.

    Raises UnsupportedModel for what llama.cpp multiplies by other numbers than transformers does.
    """
    usual = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0, "yarn_log_multiplier": 0.0}
    for key, value in usual.items():
        if may(f"rope.scaling.{key}", value) != value:
            raise UnsupportedModel(
                f"{source.path}: YaRN with {key} {may(f'rope.scaling.{key}')} is not read from GGUF; use the Hugging"
                " Face folder."
            )
    betas = {ours: may(f"rope.scaling.yarn_{ours}") for ours in ("beta_fast", "beta_slow")}
    return {ours: _decimal(value) for ours, value in betas.items() if value is not None}


def _llama3_scaling(source: Opened, may: Any) -> dict[str, Any]:
    """Return Llama 3.1's scaling.

    The file stores its result, one factor a frequency; the parameters are tried and must give it.
    """
    stored = source.raw(ROPE_FACTORS).double()
    theta, dims = float(may("rope.freq_base", 10000.0)), 2 * stored.numel()
    frequency = theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    original, low, high = 8192, 1.0, 4.0
    factor = float(
        f"{stored.max().item():.4g}"
    )  # the lowest frequency's factor is the whole one, up to float32 rounding
    # how often each frequency turns within the original context
    turns = original * frequency / (2 * torch.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(expected, stored, rtol=1e-4):
        raise UnsupportedModel(
            f"{source.path}: {ROPE_FACTORS} are not Llama 3's factors; this rotary scaling is not read from GGUF."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _decimal(value: float) -> float:
    """Return the short decimal that a float32 was written as: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
