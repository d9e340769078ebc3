#!/usr/bin/env python3
"""Build the model that quality is measured on: the channel-permuted FP16 twin of a fetched GGUF model.

    python eval/make_twins.py smollm2-135m OUT [--on-grid]
    python eval/make_twins.py gemma3-270m  OUT [--on-grid]
    python eval/make_twins.py qwen2.5-coder-1.5b OUT --blocks 4   # for times beside peers, not for quality

The fetched files were quantized to 4 bits in blocks of 32 along the input, so their weights lie on a grid that a 4-bit
quantizer with groups of 32 finds again, and looks better than it is. Permuting the channels of the residual stream, of
the MLP's inner activations and of the values leaves the function as it is (checked here: largest logit change printed)
and takes the weights off that grid. --on-grid leaves the permutation out.

The twin's tokenizer follows the protocol of the reference figures (27.7515 and 24.2783, docs/numerics.md), which were
measured with token ids that differ a little from the models' own:

* smollm2-135m: cut into words by GPT-2's rule alone, as transformers' GGUF loader does it. The model's own rule also
  lets digits stand alone, so that a blank line before a digit is one token instead of two.
* gemma3-270m: runs of newlines and of spaces are not matched whole.

`quantkit fetch`'s models, read through quantkit, use the models' own rules.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.gguf_files.vocabulary import UNUSED, USER_DEFINED
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import repair_config, tokenizer_from_gguf

LARGEST_DRIFT = 1e-2  # of a logit, between the model and its twin in float32; 6e-5 and 3e-4 were seen


def protocol_changes(source: GGUFSource) -> dict[str, Any]:
    """GGUF metadata to read differently, so that token ids are those of the reference figures."""
    metadata = source.header.metadata
    if metadata["tokenizer.ggml.model"] == "gpt2":
        return {"tokenizer.ggml.pre": "gpt-2"}
    kinds = metadata["tokenizer.ggml.token_type"]
    return {"tokenizer.ggml.token_type": [UNUSED if kind == USER_DEFINED else kind for kind in kinds]}


def permute(tensors: dict[str, torch.Tensor], config: Any, generator: torch.Generator) -> None:
    """Permute, in place, the residual stream, the MLP's inner channels and the value channels of a state dict."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    stream = torch.randperm(hidden, generator=generator)
    for name, tensor in tensors.items():
        last = name.split(".")[-2]
        if "norm" in last and tensor.dim() == 1 and tensor.numel() == hidden:
            tensors[name] = tensor[stream]
        elif (
            last in ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
            and tensor.dim() == 2
        ):
            tensors[name] = tensor[:, stream]
        elif last in ("o_proj", "down_proj"):
            tensors[name] = tensor[stream]

    def take(name: str, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
        if name in tensors:
            tensors[name] = tensors[name][rows] if rows is not None else tensors[name][:, columns]

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        inner = torch.randperm(config.intermediate_size, generator=generator)
        values = [torch.randperm(head_dim, generator=generator) for _ in range(kv_heads)]
        rows = torch.cat([h * head_dim + p for h, p in enumerate(values)])
        columns = torch.cat([h * head_dim + values[h * kv_heads // heads] for h in range(heads)])
        take(f"{layer}.mlp.gate_proj.weight", rows=inner)
        take(f"{layer}.mlp.up_proj.weight", rows=inner)
        take(f"{layer}.mlp.down_proj.weight", columns=inner)
        take(f"{layer}.self_attn.v_proj.weight", rows=rows)
        take(f"{layer}.self_attn.v_proj.bias", rows=rows)
        take(f"{layer}.self_attn.o_proj.weight", columns=columns)


def load(config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """A transformers model with these weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    left = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    missing = [name for name in left.missing_keys if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or left.unexpected_keys:
        raise SystemExit(f"the model lacks {missing}, or has no place for {left.unexpected_keys}")
    return model.eval()


def first_blocks(config: dict[str, Any], blocks: int | None) -> dict[str, Any]:
    """The config of a model that ends after so many decoder blocks; None for all."""
    if blocks is None:
        return config
    kinds = {"layer_types": config["layer_types"][:blocks]} if config.get("layer_types") else {}
    return {**config, **kinds, "num_hidden_layers": blocks}


def block_of(name: str) -> int:
    """The decoder block that a tensor belongs to; -1 for embeddings, the last norm and the head."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


@torch.no_grad()
def probe(config: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of 64 arbitrary tokens, in float32."""
    logits: torch.Tensor = load(config, tensors, torch.float32)(torch.arange(100, 164)[None]).logits
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="smollm2-135m or gemma3-270m")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--on-grid", action="store_true", help="do not permute")
    parser.add_argument("--blocks", type=int, help="keep only so many decoder blocks (another function)")
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already")
    from transformers import AutoConfig

    source = open_source(args.name)
    if not isinstance(source, GGUFSource):
        raise SystemExit(f"{args.name}: twins are made of GGUF models")
    config = AutoConfig.for_model(**first_blocks(source.config, args.blocks))
    tensors = {name: source.read(name) for name in source.names() if block_of(name) < config.num_hidden_layers}
    drift = 0.0
    if not args.on_grid:
        before = probe(config, tensors)
        permute(tensors, config, torch.Generator().manual_seed(0))
        drift = (probe(config, tensors) - before).abs().max().item()
    if drift > LARGEST_DRIFT:
        raise SystemExit(f"the permuted model differs: a logit changed by {drift}")
    partial = args.out.with_name(f".{args.out.name}.partial")
    load(config, tensors, torch.float16).save_pretrained(partial)
    tokenizer_from_gguf(source.path, protocol_changes(source)).save_pretrained(partial)
    repair_config(partial)
    partial.rename(args.out)
    print(f"{args.out}: largest logit change by the permutation {drift:.1e}", file=sys.stderr)
    print(args.out)


if __name__ == "__main__":
    main()
