"""What a tiny config of one type needs beside what the names of its keys tell, and types that cannot run on text.

A key is a model type, or ``group:type`` where a type differs between groups; a path with dots leads into a part.
"""

from __future__ import annotations

from typing import Any


def _sections(*sections: int) -> dict[str, Any]:
    """Rotary parameters where transformers' default sections do not fit a small head."""
    return dict(rope_type="default", rope_theta=1e4, mrope_section=list(sections))


EVERY_HEAD = {"num_key_value_heads": 4}  # latent attention has one head of keys for each of queries
# types written to look both ways, unless told that they decode
BOTH_WAYS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod", "reformer",
)  # fmt: skip
LATENT = (
    "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "youtu",
)  # fmt: skip
LATENT_PARTS = ("glm5_next", "kimi_k25", "mistral_large4")
SECTIONED = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")

_NO_HEAD_DIM = {"head_dim": 16}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "hc_lowrank": 16, "ple_layer_ids": [1], "ple_embed_dim": 64, "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 8, "eos_token_id": 2,
}  # fmt: skip
_CHOICE = {"num_experts_per_tok": 2}
_LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
_SLIDING = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24}
_DOTS3 = {
    **EVERY_HEAD,
    "head_dim": 32,
    "per_layer_config": {2: _SLIDING},
}  # a sliding head: 24 numbers, and 8 that turn
_COMPASS = {"full_attention": _sections(3, 3, 2)}


def _inside(part: str, values: dict[str, Any]) -> dict[str, Any]:
    """The same values in a part of the config."""
    return {f"{part}.{key}": value for key, value in values.items()}


_GEMMA3N = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in BOTH_WAYS},
    **{kind: dict(EVERY_HEAD) for kind in LATENT},
    **{kind: _inside("text_config", EVERY_HEAD) for kind in LATENT_PARTS},
    **{kind: {"text_config.rope_parameters": _sections(2, 3, 3)} for kind in SECTIONED},
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {**EVERY_HEAD, "num_expert_group": 1},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config.rope_parameters": _COMPASS},
    "cohere_compass_text": {"rope_parameters": _COMPASS},
    "dbrx": {
        **_inside("attn_config", {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}), "ffn_config.moe_top_k": 2,
    },
    "deepseek_v2": {**EVERY_HEAD, **_CHOICE, "first_k_dense_replace": 1},
    "deepseek_v3": {**EVERY_HEAD, "first_k_dense_replace": 1},
    "deepseek_ocr2": {
        "text_config.num_experts_per_tok": 2, "text_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.sam_config.global_attn_indexes": [1],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, **_CHOICE},
    "dots3_note": _inside("text_config", _DOTS3),
    "dots3_note_text": _DOTS3,
    "electra": {"is_decoder": True, "embedding_size": 48},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": _sections(3, 3, 2)},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma3n": _inside("text_config", _GEMMA3N),
    "gemma3n_text": _GEMMA3N,
    "glm5_next": {**_inside("text_config", EVERY_HEAD), "text_config.index_kpool": 2},
    "glm4v_moe": {"text_config.rope_parameters": {**_sections(1, 1, 2), "partial_rotary_factor": 0.5}},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "hunyuan_v1_dense": _NO_HEAD_DIM,
    "hunyuan_v1_moe": _NO_HEAD_DIM,
    "hunyuan_vl": {"text_config.head_dim": 16, "text_config.rope_parameters": _sections(4, 4)},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi_k25": {"text_config.num_key_value_heads": 4, "text_config.first_k_dense_replace": 1},
    "kimi_linear": {**EVERY_HEAD, "num_experts_per_token": 2},
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, "num_dense_layers": 1},
    "longcat_flash": {**EVERY_HEAD, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": _NO_HEAD_DIM,
    "mistral4": {**EVERY_HEAD, "head_dim": 16},
    "molmo2": {"adapter_config.vision_feature_layer": [1, 0]},
    "nemotron": {"num_key_value_heads": 2},
    "perception_lm": {
        "vision_config.architecture": "vit_pe_core_tiny_patch16_384", "vision_config.model_args": {"embed_dim": 192},
    },
    "qwen4_exp": _inside("text_config", _INDEXER),
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 0,
    },
    "roc_bert": {
        "is_decoder": True, "pronunciation_embed_dim": 32, "pronunciation_vocab_size": 64, "shape_embed_dim": 32,
        "shape_vocab_size": 64,
    },
    "step3p7": {"text_config.sliding_window": 8},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "attn_layer_period": 2,
        "attn_layer_offset": 1, "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "zamba2": {
        "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "attention_head_dim": 32, "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128,
        "num_mem_blocks": 1,
    },
}  # fmt: skip

PIXELS = "its text model reads every token beside an image: it needs pixel_values"
ENCODER = "an encoder-decoder: its text answers an encoder's input"
CODES = "it continues codes of sound, in several books at once; transformers builds no class from its config"
BESIDE = "it drafts for another model, and reads that one's keys and values"
NOT_ON_TEXT = {
    "causal:gemma4_assistant": BESIDE,
    "causal:gemma4_unified_assistant": BESIDE,
    "causal:musicgen": CODES,
    "causal:musicgen_melody": CODES,
    "image-text:blip": PIXELS,
    "image-text:blip-2": PIXELS,
    "image-text:diffusion_gemma": "a diffusion model: its logits are of a canvas beside the text",
    "image-text:evolla": "its auto class builds no model of it",
    "image-text:florence2": ENCODER,
    "image-text:idefics": PIXELS,
    "image-text:instructblip": PIXELS,
    "image-text:instructblipvideo": PIXELS,
    "image-text:kosmos-2": PIXELS,
    "image-text:pi0": "a robot's policy: it needs a state",
    "image-text:pix2struct": ENCODER,
    "image-text:pp_formulanet": ENCODER,
    "image-text:t5gemma2": ENCODER,
    "image-text:udop": "an encoder-decoder: it needs the boxes of words on a page",
    "image-text:vision-encoder-decoder": ENCODER,
}
