"""Tiny random models and a byte tokenizer, in memory and on disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.core import affine
from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme

VOCAB = 288
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 80},
    "gemma3_text": {
        "head_dim": 24, "sliding_window": 80, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 2.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def tiny_config(kind: str, **changes: Any) -> dict[str, Any]:
    return copy.deepcopy({"model_type": kind, **BASE, **EXTRA[kind], **changes})


def tiny_module(config: dict[str, Any], seed: int = 0) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    data = dict(config)
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(data.pop("model_type"), **data), attn_implementation="sdpa"
    )
    for parameter in module.parameters():
        if parameter.dim() > 1:  # the usual initialisation (0.02) gives logits that are nearly equal
            torch.nn.init.normal_(parameter, std=0.15)
    return module.eval()


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The makers of this file: ``tiny.config("llama")``, ``tiny.module(config)``, ``tiny.kv_plan(4)``."""
    return SimpleNamespace(config=tiny_config, module=tiny_module, kv_plan=kv_plan)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def float_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny floating-point model: ``float_folder("llama")``."""

    def make(kind: str, **changes: Any) -> Path:
        config = tiny_config(kind, **changes)
        state = tiny_module(config).state_dict()
        if config["tie_word_embeddings"]:
            state.pop("lm_head.weight")
        return save(tmp_path / f"{kind}-float", config, state)

    return make


@pytest.fixture
def packed_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes the same model with its block linears quantized: ``packed_folder("llama", Scheme(4, 32))``."""
    from quantkit.formats import writer_format
    from quantkit.formats.interface import CheckpointLayout

    def make(kind: str, scheme: Scheme, format_name: str = "native", **changes: Any) -> Path:
        config = tiny_config(kind, **changes)
        fmt = writer_format(format_name)
        tensors, modules = {}, {}
        for name, value in tiny_module(config).state_dict().items():
            if value.dim() == 2 and "layers." in name and name.endswith("proj.weight"):
                scales, zeros = affine.minmax_params(value, scheme)
                q = QuantTensor(affine.quantize(value, scales, zeros, scheme), scales, zeros, scheme)
                module = name.removesuffix(".weight")
                modules[module] = scheme
                tensors.update({f"{module}.{part}": t for part, t in fmt.encode(q).items()})
            else:
                tensors[name] = value
        if config["tie_word_embeddings"]:
            tensors.pop("lm_head.weight")
        config["quantization_config"] = fmt.config(CheckpointLayout(modules, ["lm_head"]), "0")
        return save(tmp_path / f"{kind}-{format_name}", config, tensors)

    return make


def kv_plan(bits: int | str) -> KVPlan:
    """Every layer alike, with online scales."""
    return KVPlan(KVScheme.of(bits))
