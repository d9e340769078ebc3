"""Peer: auto-round, on the CPU. Run by run.py.

``light`` is its light recipe (50 steps at 5e-3), ``default`` its own defaults (200).
"""

from __future__ import annotations

import torch
from auto_round import AutoRound
from worker import Stopwatch, arguments, block_linears, file_bytes, finish, load_model, packed_bytes, token_ids

RECIPES = {"light": {"iters": 50, "lr": 5e-3}, "default": {}}


def main() -> None:
    args = arguments(__doc__)
    ids = token_ids(args)
    model = load_model(args, torch.float32 if args.dtype == "float32" else torch.float16)
    from transformers import AutoTokenizer

    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(args.source),
        bits=args.bits,
        group_size=args.group_size,
        sym=args.sym,
        dataset=[{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids],
        nsamples=ids.shape[0],
        seqlen=ids.shape[1],
        **RECIPES[args.method],
    )
    watch = Stopwatch(args)
    with watch:
        quantized, _ = rounder.quantize()
    linears = block_linears(quantized)
    dense = {n: p.detach().float().clone().contiguous() for n, p in quantized.named_parameters()}
    # its own format, asymmetric, fails in 0.16: WQLinear_GEMM has no weight_dtype
    rounder.save_quantized(str(args.out / "saved"), format="auto_gptq")
    watch.saved()
    folder = args.out / "saved"
    finish(
        args,
        watch,
        ["auto-round"],
        dense,
        quantized_bytes=packed_bytes(folder, linears),
        checkpoint_bytes=file_bytes(folder),
    )


if __name__ == "__main__":
    main()
