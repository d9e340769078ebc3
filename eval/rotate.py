#!/usr/bin/env python3
"""Rotate a model folder into one that computes the same, with no channel of its residual stream or values larger than others.

    python eval/rotate.py build/eval/twins/smollm2-135m OUT [--seed 0]

QuaRot (arXiv 2404.00456), R1 and R2 of SpinQuant (2405.16406), without what they rotate at run time. Norm gains go into the
linears that read the norm; the residual stream is multiplied by an orthogonal matrix Q (embeddings, inputs of q, k, v,
gate, up and head, outputs of o and down), and each head's values by another (outputs of v, inputs of o). A norm without
gain commutes with a rotation, so the function stays. down's inputs stay as they are: an elementwise product makes them.

Q is a Hadamard matrix of the stream's whole width with random signs; 576 = 36 (Paley's) x 16 (Sylvester's). Its entries are
all +-1/24, so each channel is spread over all others alike. Blocks of 64 beside an orthogonal 9 x 9 would spread a channel as
unevenly as the 9 x 9's entries are.

Computed in float64, written as float32: rounding to 16 bits would change the weights a second time, and in float32 the
logits show that nothing else happened (checked before anything is written: largest change printed). A head tied to the
embeddings becomes a matrix of its own, since the last norm's gain goes into it alone: vocabulary x width numbers more.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.source import Source, open_source
from quantkit.errors import QuantkitError, UnsupportedModel

LARGEST_DRIFT = 1e-2  # of a logit, in float32; 2.8e-4 was seen
FAMILIES = (
    "llama",
    "mistral",
    "qwen3",
)  # an RMSNorm before attention, one before the MLP; no other but q's and k's per head
SANDWICHED = ("gemma2", "gemma3", "gemma3_text", "olmo2", "olmo3", "glm4")  # norms after attention and MLP
HEAD_WISE = r"\.(q|k)_norm\.weight|\.(q|k)_proj\.bias"  # outputs of q and k: not rotated, their positions are
KNOWN = re.compile(
    r"(model\.embed_tokens|model\.norm|lm_head"
    r"|model\.layers\.\d+\.((input|post_attention)_layernorm|self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))\.weight"
    rf"|model\.layers\.\d+\.self_attn({HEAD_WISE})"
)
PLUS = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
MINUS = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)


def hadamard(size: int) -> Tensor:
    """Orthonormal float64 ``[size, size]``, entries +-size**-0.5: Paley's smallest, doubled. UnsupportedModel where there is none."""
    order = size // (size & -size)
    while order <= size:
        found = paley(order)
        if found is not None:
            while found.shape[0] < size:
                found = torch.kron(PLUS, found)
            return found / size**0.5
        order *= 2
    raise UnsupportedModel(f"width {size}: Paley's and Sylvester's constructions give no Hadamard matrix of that order")


def paley(order: int) -> Tensor | None:
    """A Hadamard matrix (entries +-1) of order q + 1 for a prime q = 3 mod 4, or 2 (q + 1) for q = 1 mod 4 (Paley 1933); or None."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
        if order % 4 == 0 and q % 4 == remainder and all(q % d for d in range(2, int(q**0.5) + 1)):
            squares = {i * i % q for i in range(1, q)}
            legendre = torch.tensor([0.0, *(1.0 if i in squares else -1.0 for i in range(1, q))], dtype=torch.float64)
            number = torch.arange(q)
            conference = torch.ones(q + 1, q + 1, dtype=torch.float64)
            conference[0, 0] = 0
            conference[1:, 1:] = legendre[(number[:, None] - number) % q]
            one = torch.eye(q + 1, dtype=torch.float64)
            if remainder == 1:
                return torch.kron(conference, PLUS) + torch.kron(one, MINUS)
            conference[1:, 0] = -1
            return conference + one
    return None


def refuse(source: Source) -> None:
    """Raise UnsupportedModel, by name, for what a rotation of the weights cannot leave as it is."""
    kind = source.config.get("model_type")
    if kind in SANDWICHED:
        raise UnsupportedModel(
            f"{source.path}: model type {kind} has norms after attention and MLP. Their gains act channel by channel on what is "
            "added to the residual stream: no linear comes between, which could take them over, and they do not commute with a "
            "rotation."
        )
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"{source.path}: model type {kind} is none of {', '.join(FAMILIES)}; rotations are proved for these"
        )
    unknown = [name for name in source.names() if not KNOWN.fullmatch(name)]
    if unknown:
        biases = (
            " (a bias has to be rotated with its linear's outputs; not done here)"
            if unknown[0].endswith("bias")
            else ""
        )
        raise UnsupportedModel(
            f"{source.path}: no rotation is known for {unknown[0]}{biases}; {len(unknown)} such tensors"
        )


def rotated(source: Source, generator: torch.Generator) -> dict[str, Tensor]:
    """All tensors of the rotated model, float32, the head always among them. Raises UnsupportedModel (see ``refuse``)."""
    refuse(source)
    config, names = source.config, source.names()
    width = config["hidden_size"]
    heads = hadamard(config.get("head_dim") or width // config["num_attention_heads"])
    stream = (torch.randint(0, 2, (width, 1), generator=generator) * 2 - 1) * hadamard(width)

    def turn(name: str) -> Tensor:
        stored = name if name in names else "model.embed_tokens.weight"  # lm_head, where it is tied
        tensor, kind = source.read(stored).double(), name.split(".")[-2]
        norm = norm_of(name)
        if norm:
            tensor = tensor * source.read(norm).double()
        if kind in ("o_proj", "down_proj"):
            tensor = stream.T @ tensor
        elif tensor.dim() == 2:
            tensor = tensor @ stream
        elif tensor.shape == (width,) and not re.search(HEAD_WISE, name):
            tensor = torch.ones_like(tensor)  # its gain is in what reads it
        if kind == "v_proj":
            tensor = (heads.T @ tensor.unflatten(0, (-1, heads.shape[0]))).flatten(0, 1)
        if kind == "o_proj":
            tensor = (tensor.unflatten(1, (-1, heads.shape[0])) @ heads).flatten(1)
        return tensor.float().contiguous()

    return {name: turn(name) for name in dict.fromkeys([*names, "lm_head.weight"])}


def norm_of(name: str) -> str | None:
    """The norm that a linear reads, None for those that read none, and for what is no linear."""
    layer, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind == "lm_head":
        return "model.norm.weight"
    if kind in ("q_proj", "k_proj", "v_proj") and name.endswith("weight"):
        return layer.replace("self_attn", "input_layernorm.weight")
    if kind in ("gate_proj", "up_proj"):
        return layer.replace("mlp", "post_attention_layernorm.weight")
    return None


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """Logits of 128 arbitrary tokens."""
    ids = torch.randint(model.config.vocab_size, (1, 128), generator=torch.Generator().manual_seed(1))
    logits: Tensor = model(ids[:, : model.config.max_position_embeddings]).logits
    return logits


def rotate(folder: Path, out: Path, seed: int) -> float:
    """Write the rotated model to ``out``; the largest change of a logit. Raises UnsupportedModel, also where it is too large."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = rotated(open_source(str(folder)), torch.Generator().manual_seed(seed))
    before = probe(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, assign=True)
    drift = (probe(model.eval()) - before).abs().max().item()
    if not drift <= LARGEST_DRIFT:
        raise UnsupportedModel(f"{folder}: the rotated model differs, a logit by {drift}; nothing was written")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for path in folder.iterdir():  # tokenizer, chat template
        if path.is_file() and "safetensors" not in path.name and not (partial / path.name).exists():
            shutil.copy(path, partial)
    partial.rename(out)
    return drift


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a model folder in float: llama, mistral or qwen3")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the signs")
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already")
    try:
        drift = rotate(args.folder, args.out, args.seed)
    except QuantkitError as error:
        raise SystemExit(str(error)) from error
    print(f"{args.out}: largest logit change by the rotation {drift:.1e}", file=sys.stderr)
    print(args.out)


if __name__ == "__main__":
    main()
