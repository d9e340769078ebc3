"""Peer: bitsandbytes, NF4, FP4 or LLM.int8, of every linear in the decoder blocks.

    python eval/peers/bnb.py SOURCE --out DIR --kind nf4|nf4-double|fp4|int8

The tensors come out of bitsandbytes' own modules (Linear4bit, Linear8bitLt) on the CPU, and the folder is what
transformers' save_pretrained writes with a BitsAndBytesConfig; going through transformers itself needs the accelerate
library on top. One linear is in memory at a time. (Named bnb.py: a script named like the library would import itself.)
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.model.skeleton import block_linears, build_skeleton, find_blocks

KINDS = ("nf4", "nf4-double", "fp4", "int8")


def quantized(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """The tensors that bitsandbytes stores for one weight ``[out, in]``, by local name."""
    import bitsandbytes as bnb

    rows, cols = weight.shape
    if kind == "int8":
        linear: Any = bnb.nn.Linear8bitLt(cols, rows, bias=False, has_fp16_weights=False)
        linear.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        options = {"quant_type": kind.removesuffix("-double"), "compress_statistics": kind.endswith("-double")}
        linear = bnb.nn.Linear4bit(cols, rows, bias=False, **options)
        linear.weight = bnb.nn.Params4bit(weight, requires_grad=False, **options)
    return {name: value.contiguous() for name, value in linear.to("cpu").state_dict().items()}


def quantization_config(kind: str, dense: list[str]) -> dict[str, Any]:
    """What transformers writes into config.json."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": kind != "int8",
        "load_in_8bit": kind == "int8",
        "bnb_4bit_quant_type": kind.removesuffix("-double") if kind != "int8" else "fp4",
        "bnb_4bit_use_double_quant": kind.endswith("-double"),
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": dense,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="a 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--kind", choices=KINDS, default="nf4")
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already")
    from safetensors.torch import save_file

    started = time.perf_counter()
    source = open_source(args.source)
    blocks = find_blocks(build_skeleton(source.config))
    chosen = {
        f"{blocks.name(i)}.{name}.weight" for i, block in enumerate(blocks.modules) for name in block_linears(block)
    }
    tensors: dict[str, torch.Tensor] = {}
    for name in source.names():
        value = source.read(name)
        if name in chosen:
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{local}": part for local, part in quantized(value, args.kind).items()}
        else:
            tensors[name] = value
    partial = args.out.with_name(f".{args.out.name}.partial")
    partial.mkdir(parents=True)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = {**source.config, "quantization_config": quantization_config(args.kind, ["lm_head"])}
    (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(source, partial)
    partial.rename(args.out)
    from importlib.metadata import version

    done = {"out": str(args.out), "method": f"bitsandbytes {version('bitsandbytes')} {args.kind}"}
    print(json.dumps({**done, "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
