"""The metadata of a GGUF file from a Hugging Face config: sizes, rotary positions, windows, experts.

``fields`` says each value with its GGUF type; extra tensors carry factors of rotary frequencies. What a config asks for
and llama.cpp's graph of that architecture does not compute is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.gguf_files.out_names import family_of
from quantkit.errors import UnsupportedModel

Field = tuple[str, Any]  # GGUF's type (UINT32, FLOAT32, BOOL, STRING, ARRAY), value
ROPE_FREQS, FACTORS_LONG, FACTORS_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
UNTIED = ("olmo2", "gpt_oss")  # llama.cpp run: "tensor 'output.weight' not found"; read in its source for gpt-oss
ACTIVATIONS = {"gemma3_text": ("gelu_pytorch_tanh",)}  # all others: silu

# What llama.cpp's graph of gpt-oss takes for granted.
GPT_OSS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True}


def whole(value: Any) -> Field:
    """Return a number as an unsigned field."""
    return "UINT32", int(value)


def real(value: Any) -> Field:
    """Return a number as a float field."""
    return "FLOAT32", float(value)


def config_fields(config: Mapping[str, Any]) -> tuple[dict[str, Field], dict[str, Tensor]]:
    """Return the metadata after ``general.architecture``, and the extra tensors.

    config: as transformers has it (``to_dict``): ``rope_parameters`` with everything about rotary positions.

    Raises UnsupportedModel for what the architecture cannot express.
    """
    architecture, kind = family_of(config).architecture, str(config["model_type"])
    _refuse(config, kind)
    heads = int(config["num_attention_heads"])
    dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    said = {
        "block_count": whole(config["num_hidden_layers"]),
        "context_length": whole(config["max_position_embeddings"]),
        "embedding_length": whole(config["hidden_size"]),
        "feed_forward_length": whole(config["intermediate_size"]),
        "vocab_size": whole(config["vocab_size"]),
        "attention.head_count": whole(heads),
        "attention.head_count_kv": whole(config.get("num_key_value_heads") or heads),
        "attention.layer_norm_rms_epsilon": real(config["rms_norm_eps"]),
    }
    if dim * heads != config["hidden_size"] or kind not in ("qwen2", "phi3", "olmo2"):
        said |= {"attention.key_length": whole(dim), "attention.value_length": whole(dim)}
    said |= _of_kind(config, kind)
    positions, tensors = _positions(config, kind, dim)
    return {f"{architecture}.{key}": value for key, value in (said | positions).items()}, tensors


def _refuse(config: Mapping[str, Any], kind: str) -> None:
    """Raise UnsupportedModel for what llama.cpp's graph of this type does not compute."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS.get(kind, ("silu", "swish")):
        raise UnsupportedModel(
            f"{kind} with activation {activation!r}: llama.cpp computes another one. Write another --format."
        )
    if kind == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise UnsupportedModel(
            "qwen3_moe with dense layers among those of experts has no GGUF form. Use --format compressed-tensors."
        )
    if kind == "qwen3_moe" and not config.get("norm_topk_prob", True):
        raise UnsupportedModel(
            "qwen3_moe whose chosen experts' weights do not sum to 1 has no GGUF form. Use --format compressed-tensors."
        )
    if kind == "gpt_oss":
        _check_gpt_oss(config)
    if kind in UNTIED and config.get("tie_word_embeddings"):
        raise UnsupportedModel(
            f"{kind} whose head is its embedding has no GGUF form: llama.cpp asks for an output.weight. Use another"
            " --format."
        )
    if config.get("attn_logit_softcapping"):
        raise UnsupportedModel(f"{kind} with capped attention logits has no GGUF form. Use another --format.")


def _check_gpt_oss(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a gpt-oss of other numbers than its graph has (build_moe_ffn of llama.cpp)."""
    for key, usual in GPT_OSS.items():
        if config.get(key, usual) != usual:
            raise UnsupportedModel(
                f"gpt_oss with {key} {config[key]} has no GGUF form: llama.cpp uses {usual}. Use another --format."
            )


def _of_kind(config: Mapping[str, Any], kind: str) -> dict[str, Field]:
    """Return the fields that only some types have."""
    if kind == "gemma3_text":
        said = {"attention.sliding_window": whole(config["sliding_window"])}
        if config.get("final_logit_softcapping"):
            said["final_logit_softcapping"] = real(config["final_logit_softcapping"])
        _check_gemma(config)
        return said
    if kind == "granite":
        return {
            "attention.scale": real(config["attention_multiplier"]),
            "embedding_scale": real(config["embedding_multiplier"]),
            "residual_scale": real(config["residual_multiplier"]),
            "logit_scale": real(config["logits_scaling"]),
        }
    if kind == "qwen3_moe":
        return {
            "expert_count": whole(config.get("num_experts") or config["num_local_experts"]),
            "expert_used_count": whole(config["num_experts_per_tok"]),
            "expert_feed_forward_length": whole(config["moe_intermediate_size"]),
        }
    if kind == "gpt_oss":
        _check_windows(config, 2)
        return {
            "attention.sliding_window": whole(config["sliding_window"]),
            "expert_count": whole(config["num_local_experts"]),
            "expert_used_count": whole(config["num_experts_per_tok"]),
            "expert_feed_forward_length": whole(config["intermediate_size"]),
        }
    if kind == "phi3":
        return {"attention.sliding_window": whole(config.get("sliding_window") or 0)}
    return {}


def config_notes(config: Mapping[str, Any]) -> list[str]:
    """Return what llama.cpp will compute otherwise than the original, where that is common practice."""
    kind, window = str(config["model_type"]), config.get("sliding_window")
    if kind == "gpt_oss" and (config.get("rope_parameters") or {}).get("rope_type") == "yarn":
        return [
            "llama.cpp lets YaRN begin and end at whole pairs of a head, the original between them: logits differ a"
            " little"
        ]
    slides = window and (config.get("use_sliding_window", True) or kind not in ("qwen2", "qwen3", "qwen3_moe"))
    if kind in ("gemma3_text", "gpt_oss") or not slides or window >= config["max_position_embeddings"]:
        return []
    return [
        f"llama.cpp's {family_of(config).architecture} attends to all tokens, the original to the last {window}: texts"
        " longer than that come out a little different"
    ]


def _check_windows(config: Mapping[str, Any], full: int) -> None:
    """Raise UnsupportedModel unless every ``full``-th layer sees everything, as llama.cpp takes for granted."""
    layers = int(config["num_hidden_layers"])
    usual = ["full_attention" if (i + 1) % full == 0 else "sliding_attention" for i in range(layers)]
    if list(config.get("layer_types") or usual) != usual:
        raise UnsupportedModel(
            f"{config['model_type']} where not every {full}th layer is without a window has no GGUF form. Use --format"
            " compressed-tensors."
        )


def _check_gemma(config: Mapping[str, Any]) -> None:
    """Check what llama.cpp takes for granted of Gemma 3: the order of windows, and the scale of attention."""
    layers = int(config["num_hidden_layers"])
    _check_windows(config, 6)
    dim = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    if config.get("query_pre_attn_scalar", dim) != dim:
        raise UnsupportedModel(
            f"gemma3 with query_pre_attn_scalar {config['query_pre_attn_scalar']}: llama.cpp uses {dim} for a model of"
            f" {layers} layers. Use another --format."
        )


def _positions(config: Mapping[str, Any], kind: str, dim: int) -> tuple[dict[str, Field], dict[str, Tensor]]:
    """Return the fields of rotary positions, and tensors of their factors."""
    rope = dict(config.get("rope_parameters") or {})
    if "full_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if local.get("rope_theta", 10000.0) != 10000.0:
            raise UnsupportedModel(
                f"{kind}: windows with rope_theta {local['rope_theta']}; llama.cpp uses 10000 there. Use another"
                " --format."
            )
        rope = dict(rope["full_attention"])
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    turned = int(dim * float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
    said = {"rope.freq_base": real(theta), "rope.dimension_count": whole(turned)}
    scaling = str(rope.get("rope_type") or "default")
    if scaling == "default":
        if kind == "phi3":
            said["rope.scaling.original_context_length"] = whole(_original(config, rope))
        return said, {}
    if scaling == "linear":
        return said | {"rope.scaling.type": ("STRING", "linear"), "rope.scaling.factor": real(rope["factor"])}, {}
    if scaling == "yarn":
        return said | _yarn(config, rope, kind), {}
    if scaling == "llama3" and kind in ("llama", "mistral", "granite"):
        return said, {ROPE_FREQS: _llama3(rope, float(theta), dim)}
    if scaling == "longrope" and kind == "phi3":
        return _longrope(config, rope, said)
    raise UnsupportedModel(f"{kind} with rotary scaling {scaling!r} has no GGUF form here. Use another --format.")


def _original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    found = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(found or config["max_position_embeddings"])


def _yarn(config: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> dict[str, Field]:
    if rope.get("attention_factor") is not None or rope.get("mscale") is not None:
        raise UnsupportedModel(f"{kind} with YaRN and an attention factor of its own has no GGUF form here.")
    if bool(rope.get("truncate", True)) != (kind != "gpt_oss"):
        raise UnsupportedModel(
            f"{kind} with YaRN and truncate {rope.get('truncate', True)}: GGUF files do not say it, and readers take"
            " the other for granted. Use another --format."
        )
    said = {
        "rope.scaling.type": ("STRING", "yarn"),
        "rope.scaling.factor": real(rope["factor"]),
        "rope.scaling.original_context_length": whole(_original(config, rope)),
    }
    if rope.get("beta_fast"):
        said["rope.scaling.yarn_beta_fast"] = real(rope["beta_fast"])
    if rope.get("beta_slow"):
        said["rope.scaling.yarn_beta_slow"] = real(rope["beta_slow"])
    return said


def _llama3(rope: Mapping[str, Any], theta: float, dim: int) -> Tensor:
    """Return by what Llama 3.1 divides each frequency: float32 ``[dim / 2]``."""
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = float(rope["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _longrope(
    config: Mapping[str, Any], rope: Mapping[str, Any], said: dict[str, Field]
) -> tuple[dict[str, Field], dict[str, Tensor]]:
    original, longest = _original(config, rope), int(config["max_position_embeddings"])
    scale = longest / original
    factor = rope.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    said |= {
        "rope.scaling.original_context_length": whole(original),
        "rope.scaling.attn_factor": real(factor),
    }
    tensors = {
        name: torch.tensor(rope[key], dtype=torch.float32)
        for name, key in ((FACTORS_LONG, "long_factor"), (FACTORS_SHORT, "short_factor"))
    }
    return said, tensors
