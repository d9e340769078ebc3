"""Add a rounding algorithm: a pure function on tensors, tried on one layer beside rtn and gptq.

    python examples/04_add_an_algorithm.py                     # smollm2-135m; about a minute
    python examples/04_add_an_algorithm.py ./my-model --layer model.layers.3.mlp.up_proj --bits 3

`fitted` is the new algorithm: it fits each scale to its codes by least squares, weighted by the size of the inputs, and
rounds again. To make it `--method fitted`, put it into a file of its own in quantkit/algorithms/ and touch two files:
quantkit/algorithms/__init__.py (METHODS, and CALIBRATED because it reads a text) and
quantkit/convert/stages/block.py (`_solve` calls it).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

import quantkit
from quantkit.algorithms import Solution
from quantkit.algorithms.gptq import gptq, proxy_loss
from quantkit.algorithms.rtn import rtn
from quantkit.calibrate.stats import Hessian
from quantkit.checkpoint.texts import load_text
from quantkit.core import affine


def fitted(weight: Tensor, hessian: Tensor, scheme: quantkit.Scheme, rounds: int = 4) -> Solution:
    """weight [out, in], hessian [in, in] = mean of x xᵀ -> codes, scales, zeros. Scales and codes take turns."""
    importance = hessian.diagonal().float()  # the mean square of each input channel
    scales, zeros = affine.searched_params(weight, scheme, importance)
    groups, gain = affine.split_groups(weight.float(), scheme), affine.split_groups(importance[None], scheme)
    for _ in range(rounds):
        codes = affine.quantize(weight, scales, zeros, scheme).float()
        steps = codes - (
            scheme.midpoint if zeros is None else affine.expand_groups(zeros.float(), codes.shape[1], scheme)
        )
        steps = affine.split_groups(steps, scheme)
        energy = (gain * steps * steps).sum(-1)
        best = (gain * steps * groups).sum(-1) / energy.clamp(min=1e-12)
        scales = torch.where(energy > 0, affine.store_scale(best, scheme), scales)
    return Solution(quantkit.QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", nargs="?", default="smollm2-135m", help="a named model, folder, hub id or GGUF file")
    parser.add_argument("--layer", default="model.layers.1.mlp.up_proj", help="the linear to try it on")
    parser.add_argument("--calibration", default="builtin", help="the text whose inputs the layer sees")
    parser.add_argument("--bits", type=int, default=4)
    args = parser.parse_args(arguments)

    model = quantkit.load(args.source, device="cpu", dtype="float32")
    linear = model.module.get_submodule(args.layer)
    weight, seen = linear.weight.detach(), Hessian(linear.in_features)
    linear.register_forward_pre_hook(lambda module, inputs: seen.add(inputs[0]))
    text = load_text(args.calibration, split="calibration").text[:20_000]
    ids = torch.tensor(model.tokenizer(text)["input_ids"][:2048])
    for window in ids.split(256):
        model(window[None])

    scheme = quantkit.Scheme(bits=args.bits, group_size=64, symmetric=False)
    hessian = seen.result(args.layer).float()
    for name, solution in (
        ("rtn", rtn(weight, scheme)),
        ("fitted", fitted(weight, hessian, scheme)),
        ("gptq", gptq(weight, hessian, scheme)),
    ):
        error, output = proxy_loss(weight, solution.quantized.dequantize(), hessian)
        print(f"{name:7s} {scheme.describe()}: output error {(error / output) ** 0.5:.3%} over {seen.tokens} tokens")


if __name__ == "__main__":
    main()
