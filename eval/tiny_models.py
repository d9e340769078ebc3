"""Tiny random models of every causal and image-text type that transformers knows.

A type's default config is shrunk by the names of its keys, the parts of the config for towers and language model too.
At least one layer of every kind stays. What must fit each other in a way that names do not tell is in
``tiny_overrides.py``, with the types that nothing can be done with on text alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tiny_overrides import NOT_ON_TEXT, OVERRIDES

from quantkit.model.twin.shrink import fewer_layers

GROUPS = ("causal", "image-text")
VOCAB = 256
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth", "num_decoder_layers", "layers",
        "num_blocks",
    "encoder_layers",
)  # fmt: skip
OTHER_COUNTS = ("num_encoder_layers", "conf_num_hidden_layers")
TOKEN_IDS = ("_token_id", "_token_index", "_start_id", "_end_id", "_newline_id", "_patch_id")
PARTS = ("encoder", "decoder", "text_encoder", "audio_encoder")  # of a config, beside those that end with _config

# What a number becomes if it is larger: the first pattern that is the whole key.
SIZES: list[tuple[re.Pattern[str], int]] = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r"(decoder_|unpadded_)?vocab_size(_per_layer_input)?", VOCAB),
        (
            r"(text_|encoder_|decoder_|vision_|backbone_|attention_|patch_embed_|out_|moe_)?hidden_size(_global)?"
            r"|n_embd|d_model|dim_model|embed_dim|emb_dim|embedding_dim|embedding_size|lru_width|input_size"
            r"|(input|output)_embedding_size"
            r"|(word_embed_)?proj(ection)?_dim|(projector_|vision_)?output_dim|projector_input_dim|adapter_(in|out)_dim"
            r"|image_(token_embed_dim|text_hidden_size)",
            64,
        ),
        (
            r"(dense_|language_)?intermediate_size(_mlp)?|(encoder_|decoder_)?ffn_dim|d_ff|dff|dim_ff|n_inner|d_inner"
            r"|ffn_hidden_size|mlp_dim|feed_forward_size|block_ff_dim",
            96,
        ),
        (r".*(moe|expert|share).*(intermediate_size|ffn_hidden_size|dim)", 32),
        (
            r"(num_)?(encoder_|decoder_|swa_)?attention_heads|num_(attention|sliding_attention)_heads"
            r"|n_heads?|num_heads"
            r"|num_(encoder|decoder)_attention_heads|swa_num_attention_heads|index_n_heads|linear_num(_value)?_heads"
            r"|resampler_n_heads",
            4,
        ),
        (r"num_key_value_heads|num_kv_heads|linear_num_key_heads|swa_num_key_value_heads", 2),
        (
            r"((global|swa|v|qk_nope|linear|linear_key|linear_value|index|mamba|resampler)_)?head_dim"
            r"|attention_head_size|d_head|d_kv|dim_head|kv_channels|mamba_d_head",
            16,
        ),
        (r"qk_head_dim", 24),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r"(q|kv|o)_lora_rank", 32),
        (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
        (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
        (r"n_group|topk_group|num_expert_group", 1),
        (
            r"max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|model_max_length|context_length"
            r"|original_max_position_embeddings",
            256,
        ),
        (r"sliding_window(_size)?|attention_chunk_size|local_attention|attention_window_size|window_size_swa", 8),
        (r"state_size|mamba_d_state|ssm_state_size", 16),
        (r"time_step_rank|mamba_dt_rank", 4),
        (r"mamba_n(um)?_heads", 8),
        (r"(mamba_)?chunk_size", 16),
        (r"image_size", 32),
        (r"patch_size", 8),
        (r"index_topk(_blocks)?", 4),
        (r"hidden_size_per_layer_input", 16),
        (r"ngram_vocab_size_base", 97),
        (r"split_ngram_parts", 2),
        (r"projector_hidden_size|projection_intermediate_size|alignment_intermediate_size|adapter_input_size", 64),
        (r"nemo_conv_channels|ext_pw_out_channel|depthwise_separable_out_channel", 32),
        (r"output_channels|downsample_channels|num_embeddings|codebook_size|max_img_size", 64),
        (r"base_channels|latent_channels|max_image_size", 32),
        (r"downsample_hidden_size|hidden_sizes", 16),
        (r"max_vit_seq_len", 256),
        (r"encoder_hash_byte_group_vocab", 64),
    )
]


@dataclass(frozen=True)
class Kind:
    """One model type in one of the auto classes. It may be in both: with its towers, and without."""

    group: str
    model_type: str

    def __str__(self) -> str:
        return f"{self.group}:{self.model_type}"


def all_kinds() -> list[Kind]:
    """Every type of the installed transformers, causal ones first."""
    from transformers.models.auto import modeling_auto

    names = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return [Kind(group, kind) for group, known in zip(GROUPS, names, strict=True) for kind in sorted(known)]


def why_not_on_text(kind: Kind) -> str:
    """The reason why a type computes nothing from tokens alone; empty if it does."""
    return NOT_ON_TEXT.get(str(kind), NOT_ON_TEXT.get(kind.model_type, ""))


def tiny_config(kind: Kind) -> dict[str, Any]:
    """The config of the type with few small layers, as a dictionary."""
    from transformers import CONFIG_MAPPING

    small = _fitting(shrunk(CONFIG_MAPPING[kind.model_type]().to_dict()))
    for table in (OVERRIDES.get(kind.model_type, {}), OVERRIDES.get(str(kind), {})):
        for path, value in table.items():
            part = small
            *parts, last = path.split(".")
            for name in parts:
                part = part[name]
            part[last] = copy.deepcopy(value)
    return small


def tiny_model(kind: Kind, seed: int = 0) -> Any:
    """The transformers model of the type, in float32, every weight random: what is forgotten shows."""
    import transformers

    auto = {"causal": transformers.AutoModelForCausalLM, "image-text": transformers.AutoModelForImageTextToText}
    data = tiny_config(kind)
    for key in ("dtype", "model_type"):
        data.pop(key, None)
    config = transformers.CONFIG_MAPPING[kind.model_type].from_dict(data)
    torch.manual_seed(seed)
    model = auto[kind.group].from_config(config, dtype=torch.float32).eval()
    fill_random(model, seed)
    return model


@torch.no_grad()
def fill_random(model: Any, seed: int = 0) -> None:
    """Give every stored float tensor random values: matrices around 0, others near their start.

    They are exact in bf16, as those of published models are.
    """
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_((0.15 * noise if tensor.dim() > 1 else tensor + 0.1 * noise).bfloat16())


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """A smaller config of the same type: every kind of layer, sizes by the names of their keys."""
    small = _fewer_layers(config)
    for key, value in list(small.items()):
        if key == "per_layer_config":
            continue
        if _is_part(key, value):
            small[key] = shrunk(value)
        elif isinstance(value, dict) and key in ("rope_parameters", "rope_scaling"):
            small[key] = _shrunk_rope(value)
        elif key.endswith(TOKEN_IDS):
            small[key] = _token_id(key, value)
        else:
            small[key] = _smaller(key, value)
    return small


def _is_part(key: str, value: Any) -> bool:
    """Whether a field is a config of its own: of a tower, the language model."""
    return isinstance(value, dict) and key != "per_layer_config" and (key.endswith("_config") or key in PARTS)


def _fewer_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the first layer of every kind, and at least two."""
    counted = next((key for key in LAYER_COUNTS if isinstance(config.get(key), int)), None)
    if counted is None:
        return dict(config)
    small, chosen = fewer_layers(config, config[counted])
    if "per_layer_config" in small:
        small["per_layer_config"] = {at: _one_layer(fields) for at, fields in (small["per_layer_config"] or {}).items()}
    for key in (*LAYER_COUNTS, *OTHER_COUNTS):
        if isinstance(config.get(key), int) and config[key] > 0:
            small[key] = len(chosen)
    return small


def _one_layer(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What one layer has for itself; heads stay as many for keys as for queries if they were."""
    small = shrunk(fields)
    if "num_attention_heads" in fields and fields["num_attention_heads"] == fields.get("num_key_value_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "head_dim" in fields and "qk_nope_head_dim" in fields:
        small["head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    return small


def _token_id(key: str, value: Any) -> Any:
    """An id inside the small vocabulary, behind those that tests use; not the same one for every name."""
    if isinstance(value, (list, tuple)):
        return [1]
    return 200 + sum(map(ord, key)) % 50 if isinstance(value, int) and value >= 200 else value


def _smaller(key: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    size = next((size for pattern, size in SIZES if pattern.fullmatch(key)), None)
    if size is None:
        return value
    if isinstance(value, (list, tuple)) and all(type(entry) is int for entry in value):
        return [min(size, entry) for entry in value]
    return min(size, value) if isinstance(value, int) else value


def _shrunk_rope(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters: factors for half a head, the context that was trained on."""
    small: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            small[key] = _shrunk_rope(value)
        elif isinstance(value, (list, tuple)) and key.endswith("_factor"):
            small[key] = list(value)[:8]
        else:
            small[key] = min(128, value) if key == "original_max_position_embeddings" else value
    return small


def _fitting(small: dict[str, Any]) -> dict[str, Any]:
    """Sizes that follow from others: heads of latent attention, sections of a rotary table for images."""
    if isinstance(small.get("qk_rope_head_dim"), int) and isinstance(small.get("qk_nope_head_dim"), int):
        turned = min(8, small["qk_rope_head_dim"])
        small.update(qk_nope_head_dim=16, qk_rope_head_dim=turned, qk_head_dim=16 + turned, v_head_dim=16)
        if small.get("head_dim"):
            small["head_dim"] = 8
    width, heads = small.get("hidden_size"), small.get("num_attention_heads")
    head = small.get("head_dim") or (width // heads if isinstance(width, int) and isinstance(heads, int) else 16)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(key), dict) and isinstance(head, int):
            _fit_sections(small[key], head, small.get("partial_rotary_factor"))
    for key, value in small.items():
        if _is_part(key, value):
            _fitting(value)
    return small


def _fit_sections(rope: dict[str, Any], head: int, share: float | None) -> None:
    """mrope_section: how many frequencies of half a head are for time, height, width."""
    for key, value in list(rope.items()):
        if isinstance(value, dict):
            _fit_sections(value, head, share)
        elif key == "mrope_section":
            half = int(head * (rope.get("partial_rotary_factor") or share or 1)) // 2
            time = max(1, half // 4)
            rope[key] = [time, (half - time) // 2, half - time - (half - time) // 2]
