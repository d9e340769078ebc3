"""Peer: torchao, int4 weight-only in its layout for CPUs. Reads no text. Run by run.py.

Scales are chosen plainly or by HQQ.

Layers whose width the group size does not divide are skipped by torchao with a log line at INFO, which nobody sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torchao.quantization import quantize_
from worker import Stopwatch, arguments, block_linears, by_identity, finish, load_model, only_default_dtype


def config(args: Any) -> Any:
    """The CPU's int4 layout lives in torchao's prototype folder; the stable config asks for CUDA packages."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm

    options: dict[str, Any] = {"group_size": args.group_size}
    if args.method == "int4-hqq":
        options["int4_choose_qparams_algorithm"] = Int4ChooseQParamsAlgorithm.HQQ
    return PrototypeInt4WeightOnlyConfig(**options)


def nbytes(weight: Any) -> int:
    """Bytes of all tensors inside a quantized weight."""
    names, _ = weight.__tensor_flatten__()
    return sum(getattr(weight, name).numel() * getattr(weight, name).element_size() for name in names)


def main() -> None:
    args = arguments(__doc__)
    only_default_dtype(args)
    if args.sym or args.bits != 4:
        raise SystemExit("torchao: its int4 has 4 bits and a zero point per group; use --bits 4 --no-sym")
    model = load_model(args, torch.bfloat16)  # the kernel's dtype
    linears = block_linears(model)
    plain = sum(p.nbytes for p in model.parameters())
    watch = Stopwatch(args)
    with watch:
        quantize_(model, config(args), filter_fn=lambda module, name: name in linears)
    weights, packed = {}, 0
    for name, linear in linears.items():
        if type(linear.weight) in (torch.Tensor, torch.nn.Parameter):
            continue  # left alone
        weights[f"{name}.weight"] = by_identity(linear, linear.in_features, torch.bfloat16)
        packed += nbytes(linear.weight)
        plain -= 2 * linear.in_features * linear.out_features
    others = {n: p for n, p in model.named_parameters() if n not in weights}
    finish(
        args,
        watch,
        ["torchao"],
        {**{n: p.detach().float().contiguous() for n, p in others.items()}, **weights},
        quantized_bytes=packed,
        checkpoint_bytes=packed + plain,
    )


if __name__ == "__main__":
    main()
