"""``make demo``: a real model from 16 to 4 bits: size, what it cost, and text that it writes.

Uses only the command line that any user has. Calibrates on 32 windows of 512 tokens, so that it stays short; the
figures in the README come from longer runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

QUANTKIT = [sys.executable, "-m", "quantkit.cli.main"]


def run(*arguments: str, capture: bool = False) -> str:
    """Show a command, run it, stop on failure."""
    print(f"\n$ quantkit {' '.join(arguments)}", flush=True)
    done = subprocess.run([*QUANTKIT, *arguments], check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    started = time.perf_counter()
    model = str(args.out / "model-4bit")
    unfinished = args.out / ".model-4bit.work"  # left by an interrupted demo: its finished blocks are used
    if args.out.exists() and not unfinished.exists():
        shutil.rmtree(args.out)
    args.out.mkdir(exist_ok=True)
    prompt = "Write one sentence about the sea."

    print(f"1. {args.model} to 4 bits: GPTQ, groups of 64, 8-bit KV cache (about two minutes on 2 quiet cores)")
    run(
        "convert",
        args.model,
        "--out",
        model,
        "--group-size",
        "64",
        "--kv-bits",
        "8",
        "--samples",
        "32",
        "--seq-len",
        "512",
        *(["--resume"] if unfinished.exists() else []),
    )
    print("\n2. What that cost, against the original (6 windows of 1024 tokens the calibration never saw)")
    run("eval", model, "--baseline", args.model, "--seq-len", "1024", "--tokens", str(6 * 1024), "--kv-bits", "16")
    print("\n3. Text from the quantized model")
    run("generate", model, "--prompt", prompt, "--chat", "--max-tokens", "48")
    print("\n4. How fast that path is on this machine")
    run("bench", model, "--prompt", "128", "--new-tokens", "32")
    manifest = json.loads((Path(model) / "quantkit.json").read_text())
    size = sum(file.stat().st_size for file in Path(model).iterdir())
    print(
        f"\nDone in {time.perf_counter() - started:.0f} s. {model}: {size / 1e6:.1f} MB, "
        f"{len(manifest['layers'])} linears quantized."
    )
    print("compressed-tensors is the home format of vLLM; transformers loads it too, and here: quantkit.load(...)")


if __name__ == "__main__":
    main()
