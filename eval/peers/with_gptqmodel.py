"""Peer: gptqmodel, GPTQ or AWQ with its own defaults, on the CPU. Run by run.py."""

from __future__ import annotations

import os

# (cores + 1) // 2 workers are its default, and its loader wants 2: on 2 cores quantize() dies at layer 0 without this.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, (os.cpu_count() or 1))))

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from worker import Stopwatch, arguments, by_identity, dense_state, file_bytes, finish, packed_bytes, token_ids


def main() -> None:
    args = arguments(__doc__)
    awq = args.method == "awq"
    config = QuantizeConfig(
        bits=args.bits,
        group_size=args.group_size,
        sym=args.sym,
        method=METHOD.AWQ if awq else METHOD.GPTQ,
        format=FORMAT.GEMM if awq else FORMAT.GPTQ,
    )
    # Its packing kernel for AWQ asks for CUDA unless the plain one is named.
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.AUTO
    wanted = {} if args.dtype == "default" else {"dtype": torch.float32}
    model = GPTQModel.load(str(args.source), config, device="cpu", **wanted)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in token_ids(args)]
    watch = Stopwatch(args)
    with watch:
        model.quantize(rows, backend=backend)
    folder = args.out / "saved"
    model.save(str(folder))
    watch.saved()
    if args.times_only:
        finish(args, watch, ["gptqmodel"])
        return
    del model
    torch._dynamo.config.disable = True  # compiling pays for many forwards; each layer runs once below
    plain = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    # In float16, the dtype of its scales; on a CPU it would choose bfloat16 and round the weights once more.
    loaded = GPTQModel.load(str(folder), device="cpu", backend=plain, dtype=torch.float16).model
    packed = {name: module for name, module in loaded.named_modules() if hasattr(module, "qweight")}
    weights = {
        f"{name}.weight": by_identity(module, module.in_features, torch.float16) for name, module in packed.items()
    }
    finish(
        args,
        watch,
        ["gptqmodel"],
        dense_state(loaded, weights),
        quantized_bytes=packed_bytes(folder, packed),
        checkpoint_bytes=file_bytes(folder),
        kernel=sorted({type(module).__name__ for module in packed.values()}),
    )


if __name__ == "__main__":
    main()
