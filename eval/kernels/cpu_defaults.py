#!/usr/bin/env python3
"""Compare what `quantkit bench` does by default with every setting a user can type for the same numbers, and beside a
busy core.

    quantkit convert smollm2-135m --preset fast --group-size 64 --out FOLDER
    python eval/kernels/cpu_defaults.py FOLDER --out eval/results/cpu_defaults-smollm2-135m.json

Settings take turns, each in a process of its own; figures are medians over rounds, and the best other setting over the
default. A busy core is a process that counts, on one of the cores that this one may use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quantkit.core.host import usable_cpus
from quantkit.evaluate.environment import hardware, versions

SAME_NUMBERS = {  # but for the order of sums, and bf16 what the checkpoint says it is computed in
    "default": [],
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "one thread": ["--threads", "1"],
    "keep-dense": ["--keep-dense"],
    "kernel int4": ["--kernel", "int4"],
    "kernel dequantize": ["--kernel", "dequantize"],
}
BUSY = "beside a busy core"
FIGURES = ("decode_tokens_per_second", "prefill_tokens_per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a quantized folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="streams beside a busy core")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    size = ["--prompt", str(args.prompt), "--new-tokens", str(args.new_tokens), "--repeat", "1"]
    streams = ["--batch", str(args.batch)]
    seen: dict[str, list[dict[str, float]]] = {}
    refused: dict[str, str] = {}
    for _ in range(args.rounds):
        for name, more in SAME_NUMBERS.items():
            if name not in refused:
                note(seen, refused, name, bench(args.model, [*size, *more]))
        note(seen, refused, "idle", bench(args.model, [*size, *streams]))
        with ExitStack() as stack:
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
            note(seen, refused, BUSY, bench(args.model, [*size, *streams]))
    rows = {name: {f: statistics.median(r[f] for r in runs) for f in FIGURES} for name, runs in seen.items()}
    others = [row for name, row in rows.items() if name not in ("default", "idle", BUSY)]
    found = {
        "model": Path(args.model).name, "prompt": args.prompt, "new_tokens": args.new_tokens, "rounds": args.rounds,
        "streams": args.batch, "rows": rows, "refused": refused,
        "default_over_best": {f: rows["default"][f] / max(row[f] for row in others) for f in FIGURES},
        "busy_over_idle": {f: rows[BUSY][f] / rows["idle"][f] for f in FIGURES},
        "cpus": usable_cpus(), "hardware": hardware(), "versions": versions(),
    }  # fmt: skip
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: found[key] for key in ("rows", "default_over_best", "busy_over_idle", "refused")}, indent=1))


def note(
    seen: dict[str, list[dict[str, float]]], refused: dict[str, str], name: str, found: dict[str, float] | str
) -> None:
    """Keep a run's figures, or why a setting is refused."""
    if isinstance(found, str):
        refused[name] = found
    else:
        seen.setdefault(name, []).append(found)


def bench(model: str, options: list[str]) -> dict[str, float] | str:
    """Run ``quantkit bench``; its figures, or its error."""
    command = [sys.executable, "-m", "quantkit", "bench", model, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr or done.stdout).strip().splitlines()[-1]
    told: dict[str, Any] = json.loads(done.stdout)
    cell = told["cells"][0]
    return {figure: float(cell[figure]) for figure in FIGURES}


if __name__ == "__main__":
    main()
