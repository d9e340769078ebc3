"""Time what ``deterministic`` costs a batch: the same prompts with and without it, taking turns in one process.

    python eval/kernels/deterministic.py --model smollm2-135m --out eval/results/deterministic-smollm2-135m.json

For each dtype, packed (W4 g64, rounded to nearest) and dense, and each batch size: seconds to read the prompts and
seconds of a decode step, medians over the rounds, and their ratios. Prompts are random tokens, of lengths between a
quarter and all of ``--prompt``. Load average and versions are stored with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

import torch

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.evaluate.environment import hardware, versions
from quantkit.runtime.generate.loop import run
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.layers.linear import QuantLinear, pack
from quantkit.runtime.load import load

CPU = torch.device("cpu")
SCHEME = Scheme(4, 64, False)


def pack_linears(module: Any) -> None:
    """Round the linears of all blocks to nearest, in place: speed does not depend on how codes were chosen."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, torch.nn.Linear) and "layers." in name:
            owner, _, local = name.rpartition(".")
            weight = layer.weight.float()
            scales, zeros = affine.minmax_params(weight, SCHEME)
            q = QuantTensor(affine.quantize(weight, scales, zeros, SCHEME), scales, zeros, SCHEME)
            setattr(module.get_submodule(owner), local, QuantLinear(pack(q, device=CPU), layer.bias))


def prompts_of(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(count)
    lengths = [draw.randint(longest // 4, longest) for _ in range(count)]
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def timed(model: Any, prompts: list[list[int]], new: int, deterministic: bool) -> tuple[float, float]:
    """Seconds to the first token, and the median seconds of a step."""
    options = GenerationOptions(max_tokens=new, ignore_eos=True, deterministic=deterministic)
    pieces = run(model, prompts, [options] * len(prompts), end_tokens=(), context=model.context)
    done = [piece.done for piece in pieces if piece.done is not None]
    return done[0].time_to_first_token, statistics.median(done[0].inter_token_latencies)


def compare(model: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(batch, args.prompt, model.vocabulary)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for way in times:
        timed(model, prompts, 2, way)  # compiled, and its pages touched
    for _ in range(args.rounds):
        for way, measured in times.items():
            measured.append(timed(model, prompts, args.new_tokens, way))
    read = {way: statistics.median(first for first, _ in measured) for way, measured in times.items()}
    step = {way: statistics.median(between for _, between in measured) for way, measured in times.items()}
    return {
        "batch": batch,
        "prompt_tokens": sum(map(len, prompts)),
        "read_seconds": {"usual": read[False], "deterministic": read[True]},
        "step_seconds": {"usual": step[False], "deterministic": step[True]},
        "read_ratio": round(read[True] / read[False], 3),
        "step_ratio": round(step[True] / step[False], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1,4,8,16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        "model": args.model, "prompt": args.prompt, "new_tokens": args.new_tokens, "rounds": args.rounds,
        "hardware": hardware(), "versions": versions(), "load_average": os.getloadavg(), "cells": [],
    }  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        for kind in ("packed", "dense"):
            model = load(args.model, device="cpu", dtype=dtype)
            if kind == "packed":
                pack_linears(model.module)
            for batch in map(int, args.batches.split(",")):
                cell = {"weights": kind, "dtype": dtype, "decoding": model.decoding, **compare(model, batch, args)}
                result["cells"].append(cell)
                print(json.dumps({k: v for k, v in cell.items() if not k.endswith("seconds")}), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    result["load_average_after"] = os.getloadavg()
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
