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
    "axk1",
    "axk2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "minicpm3",
    "youtu",
    "dots3_note_text",
)
SECTIONED = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl")

OVERRIDES: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in BOTH_WAYS},
    **{kind: dict(EVERY_HEAD) for kind in LATENT},
    **{kind: {"text_config.num_key_value_heads": 4} for kind in ("kimi_k25", "mistral_large4")},
    **{kind: {"text_config.rope_parameters": _sections(2, 3, 3)} for kind in SECTIONED},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "kimi_linear": {"num_experts_per_token": 2, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "longcat_flash": {"num_key_value_heads": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "step3p7": {"text_config.sliding_window": 8},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba2": {
        "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "attention_head_dim": 32, "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 128,
        "num_mem_blocks": 1,
    },
}  # fmt: skip

PIXELS = "its text model reads every token beside an image: it needs pixel_values"
ENCODER = "an encoder-decoder: its text answers an encoder's input"
NOT_ON_TEXT = {
    "image-text:blip": PIXELS,
    "image-text:blip-2": PIXELS,
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
