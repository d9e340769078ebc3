"""Tiny random models of every architecture that quantkit claims, for tests of all rooms.

Use them by ``from architectures import ...``.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch

VOCAB = 100
COMMON: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]  # windows of 4: shorter than every test's text
FALCON: dict[str, Any] = dict(model_type="falcon", num_key_value_heads=None)

# name -> what its config.json adds to COMMON; the name is the model_type unless that is given
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": dict(head_dim=8),
    "mistral": dict(sliding_window=4),
    "gemma3_text": dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=MIXED),
    "phi3": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, num_key_value_heads=4),
    "gemma2": dict(
        head_dim=8, sliding_window=4, query_pre_attn_scalar=8, layer_types=MIXED, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "olmo2": {},
    "granite": dict(attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0),
    "cohere": dict(logit_scale=0.25),
    "cohere2": dict(sliding_window=4, layer_types=MIXED, logit_scale=0.25),
    "starcoder2": dict(sliding_window=4, use_bias=True),
    "gpt_neox": dict(num_key_value_heads=None,
                     rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "falcon": dict(FALCON, multi_query=True, new_decoder_architecture=False, parallel_attn=True, alibi=False,
                   bias=False),
    "falcon-new": dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, alibi=False, bias=False),
    "falcon-alibi": dict(FALCON, alibi=True, multi_query=False, new_decoder_architecture=False, parallel_attn=False,
                         bias=True),
}  # fmt: skip
MOE: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[1],
    ),
    "gpt_oss": dict(
        head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2, layer_types=MIXED,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
}  # fmt: skip
ARCHITECTURES = {**DENSE, **MOE}


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """What config.json of a tiny model holds."""
    own = ARCHITECTURES[name]
    return copy.deepcopy({"model_type": name, **COMMON, **own, **changes})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model, every parameter random: what a test forgets to carry over shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    data = tiny_config(name, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(data.pop("model_type"), **data)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # the usual initialisation (0.02) gives logits that are nearly equal; norms stay near their own start
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def with_tokenizer_of(folder: Path, name: str, out: Path, **changes: Any) -> Path:
    """Write a tiny float16 model beside the tokenizer of a model folder, with its vocabulary; return ``out``."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tiny_model(name, vocab_size=vocabulary, **changes).half().save_pretrained(out)
    for file in folder.glob("*token*"):
        shutil.copy(file, out / file.name)
    return out
