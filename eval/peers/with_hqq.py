"""Peer: HQQ, on the CPU. Reads no text. Run by run.py."""

from __future__ import annotations

from typing import Any

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from worker import Stopwatch, arguments, block_linears, dense_state, finish, load_model, only_default_dtype


def nbytes(layer: Any) -> int:
    """Bytes of the packed codes, scales and zeros of one layer, as its state dict holds them."""
    parts = [layer.W_q, layer.meta["scale"], layer.meta["zero"]]
    return sum(part.numel() * part.element_size() for part in parts)


def main() -> None:
    args = arguments(__doc__)
    only_default_dtype(args)
    if args.sym:
        raise SystemExit("hqq: its zero points are what it optimizes; use --no-sym")
    model = load_model(args, torch.float16)
    linears = block_linears(model)
    config = BaseQuantizeConfig(nbits=args.bits, group_size=args.group_size)
    weights, packed, plain = {}, 0, sum(p.nbytes for p in model.parameters())
    watch = Stopwatch(args)
    with watch:
        layers = {
            name: HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
            for name, linear in linears.items()
        }
    for name, layer in layers.items():
        weights[f"{name}.weight"] = layer.dequantize()
        packed += nbytes(layer)
        plain -= linears[name].weight.nbytes
    finish(args, watch, ["hqq"], dense_state(model, weights), quantized_bytes=packed, checkpoint_bytes=packed + plain)


if __name__ == "__main__":
    main()
