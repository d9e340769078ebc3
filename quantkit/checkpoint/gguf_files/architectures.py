"""What llama.cpp's converter did to each architecture: the tables by which names and configs are changed back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA = COMMON | {"ffn_norm": "post_attention_layernorm"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ATTENTION = {name: place for name, place in COMMON.items() if name.startswith("attn_")}
# All experts of a layer in one tensor, [experts, out, in], and what transformers calls the matrix of one of them.
EXPERT_STACKS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What llama.cpp's converter did to one architecture, and the config that undoes it."""

    model_type: str
    class_name: str
    layer_names: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    # q/k rows stored as (pair, half) instead of (half, pair)
    rotary_rows_interleaved: bool = False
    # norms stored as 1 + w
    norms_plus_one: bool = False
    # what the layers of a mixture hold for all experts at once, of ``EXPERT_STACKS``: weights, biases too; () if dense
    expert_parts: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        LLAMA,
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        rotary_rows_interleaved=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA, {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | QK_NORMS,
        {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        COMMON
        | QK_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "rope_local_base_freq": 10000.0},
        norms_plus_one=True,
    ),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        LLAMA,
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
        rotary_rows_interleaved=True,
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        {name: place for name, place in COMMON.items() if name != "attn_norm"}
        | QK_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        {"hidden_act": "silu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    ),
    # What llama.cpp's graphs hard-code of mixtures: src/models/qwen3moe.cpp (weights of the chosen experts sum to 1),
    # src/models/openai-moe.cpp and build_moe_ffn in src/llama-graph.cpp (alpha and limit of the clamped SwiGLU).
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        ATTENTION | QK_NORMS | {"ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
        {
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
        },
        expert_parts=("weight",),
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        ATTENTION
        | {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        {
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "output_router_logits": False,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        expert_parts=("weight", "bias"),
    ),
}
# Parameters that have no ``.weight`` behind their name in transformers.
BARE = ("self_attn.sinks",)

# Tensors that are no parameters: Llama 3's rotary factors become config values, after a check that these say the same.
ROPE_FACTORS = "rope_freqs.weight"
