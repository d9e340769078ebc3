#!/usr/bin/env python3
"""Try a method in minutes: quantize a model's first blocks, leave the others, take the KL of the whole model.

    python eval/first_blocks.py MODEL --blocks 8 --set method=tune --set group_size=64 --set samples=48 \\
        --set seq_len=512 --set tune_steps=40
    python eval/first_blocks.py MODEL --blocks 8 ... --channels alike     # what ADR 018 compares with

What is set are options of ``quantkit.convert``. MODEL has to fit in memory twice, in float32. The KL is that of some
windows of evaluation text; nothing is written but the work folder, which goes, and with --out the figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit import errors
from quantkit.convert import run
from quantkit.convert.api import convert
from quantkit.convert.progress import Progress
from quantkit.evaluate.environment import hardware, versions
from quantkit.evaluate.prepare import prepare

ELSEWHERE = {
    "rotate",
    "distil",
    "preset",
    "rules",
    "target_bpw",
    "target_size",
}  # they reach head, embeddings or the original itself


class _Enough(Exception):
    """So many blocks are done."""


def first_blocks(
    model: str, blocks: int, options: dict[str, Any], alike: bool
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, float]], float]:
    """What stands in the first blocks after they were quantized, by block and parameter.

    Also what learning did in each, and seconds a block.
    """
    found: dict[str, dict[str, Tensor]] = {}
    learned: dict[str, dict[str, float]] = {}
    times: list[float] = []
    quantize = run.quantize_block

    def recorded(solver: Any, prefix: str, block: Any, groups: Any, result: Any, learn_from: Any = None) -> None:
        if alike and learn_from is not None:
            learn_from.channels.fill_(1.0)
        quantize(solver, prefix, block, groups, result, learn_from)
        found[prefix] = {name: value.detach().clone() for name, value in block.state_dict().items()}
        learned.update(result.tuning)

    def listen(progress: Progress) -> None:
        if progress.stage == "blocks":
            times.append(time.perf_counter())
            if progress.done == blocks:
                raise _Enough

    run.quantize_block = recorded  # the loop's own stage: what it leaves in the block is what the next one sees
    try:
        with tempfile.TemporaryDirectory() as folder:
            convert(model, Path(folder) / "out", on_progress=listen, **options)
    except _Enough:
        pass
    finally:
        run.quantize_block = quantize
    return found, learned, (times[-1] - times[0]) / len(found)


@torch.no_grad()
def divergences(model: str, blocks: dict[str, dict[str, Tensor]], windows: int, data: str, seq_len: int) -> Tensor:
    """KL(original || with these blocks) in nats, mean of each window of a text."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prefix, values in blocks.items():
        changed.get_submodule(prefix).load_state_dict(values)
    text = prepare(model, data=data, protocol="gptq", seq_len=seq_len, tokens=windows * seq_len)
    found = []
    for ids in text.windows.ids[:windows]:
        p, q = (one(ids[None]).logits[0].log_softmax(-1) for one in (original, changed))
        found.append((p.exp() * (p - q)).sum(-1).mean())
    return torch.stack(found)


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python writes it, or a word."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="NAME=VALUE", dest="options")
    parser.add_argument(
        "--channels", choices=("measured", "alike"), default="measured", help="in --method tune's error"
    )
    parser.add_argument("--windows", type=int, default=12, help="of evaluation text")
    parser.add_argument("--seq-len", type=int, default=512, help="of these")
    parser.add_argument("--data", default="wikipedia-sample")
    parser.add_argument("--out", type=Path, help="a JSON file")
    asked = parser.parse_args()
    options = dict(asked.options)
    for name in sorted(ELSEWHERE & options.keys()):
        parser.error(f"{name} changes more than the first blocks; this trial would not see it")
    if asked.channels == "alike" and options.get("method") != "tune":
        parser.error("--channels alike: only --set method=tune looks at channels")
    if asked.windows < 2:
        parser.error(f"--windows {asked.windows}: at least 2, or there is no standard error")
    if asked.blocks < 1:
        parser.error(f"--blocks {asked.blocks}: at least 1")
    try:
        blocks, learned, seconds = first_blocks(asked.model, asked.blocks, options, asked.channels == "alike")
    except (errors.QuantkitError, TypeError) as error:  # TypeError: an option that there is not
        parser.exit(1, f"Error: {error}\n")
    kl = divergences(asked.model, blocks, asked.windows, asked.data, asked.seq_len)
    result = {
        "model": Path(asked.model).name, "blocks": len(blocks), "options": options, "channels": asked.channels,
        "kl_mean": float(kl.mean()), "kl_stderr": float(kl.std() / len(kl) ** 0.5), "windows": asked.windows,
        "seq_len": asked.seq_len, "data": asked.data, "seconds_per_block": round(seconds, 1), "learned": learned,
        "hardware": hardware(), "versions": versions(),
    }  # fmt: skip
    text = json.dumps(result, indent=2) + "\n"
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
