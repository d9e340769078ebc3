"""Small random models of the families that readers are run on: 256 wide, so that every group and block size divides.

Their tokenizer is trained on a few sentences; weights are large enough for logits that differ (about 1.6 apart).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=1, tie_word_embeddings=True,
)  # fmt: skip
# name -> (model_type, what its config adds)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", dict(tie_word_embeddings=False)),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-untied": ("qwen3", dict(tie_word_embeddings=False)),
    "mistral": ("mistral", dict(sliding_window=None)),
    "gemma3": ("gemma3_text", dict(
        query_pre_attn_scalar=64, sliding_window=128, layer_types=["sliding_attention", "full_attention"],
        hidden_activation="gelu_pytorch_tanh",
    )),
    "gemma3-6": ("gemma3_text", dict(  # llama.cpp takes every sixth layer's window for granted
        query_pre_attn_scalar=64, sliding_window=128, num_hidden_layers=6, hidden_activation="gelu_pytorch_tanh",
        layer_types=[*["sliding_attention"] * 5, "full_attention"],
    )),
    "qwen3-moe": ("qwen3_moe", dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[],
    )),
    "phi3": ("phi3", dict(original_max_position_embeddings=512)),
    "granite": ("granite", dict(
        attention_multiplier=0.125, embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=2.0,
    )),
    "olmo2": ("olmo2", dict(tie_word_embeddings=False)),
    "gpt-oss": ("gpt_oss", dict(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=128, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"], intermediate_size=256,
        rope_parameters=dict(rope_type="default", rope_theta=150000.0),
    )),
}  # fmt: skip
SPREAD = 0.1  # standard deviation of every matrix
SENTENCES = [
    f"The {a} {b} {c} near the {d}, and nobody {c} twice."
    for a in ("old", "small", "grey", "quick")
    for b in ("fox", "river", "engine", "window")
    for c in ("runs", "waits", "sings")
    for d in ("gate", "wall", "sea")
]
TEXT = "The grey river sings near the wall. " * 3
IDS = 48  # tokens of the text that are compared


def tokenizer() -> Any:
    """A byte-level BPE of 384 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    made.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def write_model(folder: Path, name: str) -> Path:
    """Write the model of that name in bfloat16, every parameter random: what a reader forgets to carry over shows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = FAMILIES[name]
    fast = tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(fast), **{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * SPREAD if parameter.dim() > 1 else parameter + SPREAD * noise)
    model.to(torch.bfloat16).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def token_ids() -> list[int]:
    """The tokens that every reader is asked for: a sentence's, then random ones."""
    fast = tokenizer()
    ids: list[int] = fast(TEXT)["input_ids"][:IDS]
    more = torch.randint(2, len(fast), (IDS,), generator=torch.Generator().manual_seed(0)).tolist()
    return [*ids[: IDS // 2], *more[: IDS // 2]]
