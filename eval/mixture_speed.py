#!/usr/bin/env python3
"""Processor time and peak memory of converting a mixture of many small experts.

    python eval/mixture_speed.py            writes eval/results/mixture_speed.json

A random qwen3_moe of 64 experts x 24 layers, hidden size 64: 4608 experts' linears of 4096 weights, so that what counts
is the work per linear, not per weight. The smaller mixtures show what memory depends on. Every conversion is a process
of its own on one thread; the seconds are the operating system's accounting of it, with its start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((24, 64), (12, 64), (24, 32))  # layers, experts
METHODS: dict[str, dict[str, Any]] = {"rtn": {}, "gptq": {"samples": 16, "seq_len": 256}}
LIMITS = {"rtn": 20.0, "gptq": 35.0}  # seconds, for the first shape
WORDS = 200


def make(folder: Path, layers: int, experts: int) -> None:
    """Write a random mixture and a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=WORDS + 3, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=experts,
        num_experts_per_tok=4, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def convert(source: Path, out: Path, text: Path, method: str) -> None:
    """Convert in this process and print what it took."""
    import torch

    import quantkit

    torch.set_num_threads(1)
    options = dict(METHODS[method])
    if options:
        options["calibration"] = str(text)
    report = quantkit.convert(str(source), out=str(out), method=method, device="cpu", **options)
    own = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "method": method, "options": {**METHODS[method]}, "linears": len(report.layers),
        "processor_seconds": round(own.ru_utime + own.ru_stime, 1), "peak_host_bytes": own.ru_maxrss * 1024,
    }  # fmt: skip
    print(json.dumps(found))


def measure(work: Path) -> list[dict[str, Any]]:
    import random

    random.seed(0)
    text = work / "text.txt"
    text.write_text(" ".join(f"w{random.randrange(WORDS)}" for _ in range(20000)), encoding="utf-8")
    rows = []
    for layers, experts in SHAPES:
        source = work / f"{layers}x{experts}"
        make(source, layers, experts)
        for method in METHODS:
            command = [sys.executable, __file__, "--one", str(source), str(work / f"{source.name}-{method}"), str(text),
                       method]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment)
            rows.append({"layers": layers, "experts": experts, **json.loads(done.stdout.splitlines()[-1])})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "eval" / "results" / "mixture_speed.json")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        source, out, text, method = args.one
        convert(Path(source), Path(out), Path(text), method)
        return
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name))
    result = {
        "command": "python eval/mixture_speed.py", "machine": platform.processor() or platform.machine(),
        "limits_processor_seconds": LIMITS, "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    slow = [row for row in rows if (row["layers"], row["experts"]) == SHAPES[0]
            and row["processor_seconds"] > LIMITS[row["method"]]]  # fmt: skip
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
