#!/usr/bin/env python3
"""Time GPTQ beside its peers on a large model's first blocks: the same tokens, one after the other, each alone.

    python eval/make_twins.py qwen2.5-coder-1.5b FOLDER --blocks 2
    python eval/gptq_times.py FOLDER --out eval/results/gptq_times-qwen2.5-coder-1.5b.json

Seconds are from the start of the process until its files are on disk, the peak of memory is the process's. Peers
compute in float32, their fastest on processors without 16-bit units. Blocks cost alike: 28 take 14 times as long as 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantkit.checkpoint.open import open_source
from quantkit.evaluate.environment import hardware, versions

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("gptqmodel", "llm-compressor")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="a 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "eval", help="where peers' environments are kept")
    args = parser.parse_args()
    tokens = ["--samples", str(args.samples), "--seq-len", str(args.seq_len)]
    scheme = ["--bits", "4", "--group-size", str(args.group_size), "--sym"]
    rows: dict[str, dict[str, Any]] = {}
    facts = {
        "blocks": open_source(args.source).config["num_hidden_layers"],
        "samples": args.samples, "seq_len": args.seq_len, "group_size": args.group_size,
        "hardware": hardware(), "versions": versions(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", str(Path(folder) / "out")]
        ours = ["-m", "quantkit", "convert", args.source, "--method", "gptq", *scheme, *tokens, *out, "--json"]
        keys = ("seconds", "stage_seconds", "peak_host_bytes", "predicted_host_bytes")
        rows["quantkit"] = run("quantkit", ours, keys)
        write(args.out, facts, rows)
        for peer in args.peers:
            theirs = [str(ROOT / "eval" / "peers" / "run.py"), peer, args.source, "--method", "gptq", *scheme, *tokens]
            theirs += ["--dtype", "float32", "--times-only", "--work", str(args.work), *out[:1], f"{out[1]}-{peer}"]
            rows[peer] = run(peer, theirs, ("seconds", "quantize_seconds", "peak_host_bytes", "versions"))
            write(args.out, facts, rows)


def write(path: Path, facts: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Write what is known so far: a run takes a quarter of an hour."""
    for row in rows.values():
        row["quantkit_over_this"] = round(rows["quantkit"]["seconds"] / row["seconds"], 3)
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def run(who: str, command: list[str], keys: tuple[str, ...]) -> dict[str, Any]:
    """Run one of them; what it tells of itself, and how busy the machine was before."""
    load = os.getloadavg()[0]
    print(f"{who}: {' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{who} failed with exit code {done.returncode}")
    told = json.loads(done.stdout)
    row = {key: told[key] for key in keys if key in told}
    print(f"{who}: {row}", file=sys.stderr, flush=True)
    return {**row, "load_at_start": round(load, 2)}


if __name__ == "__main__":
    main()
