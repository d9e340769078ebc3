"""Peak host memory of a conversion against what its plan predicted; that it does not grow with the number of layers.

    python eval/memory.py            writes eval/results/memory.json, exit code 1 if a ratio leaves 0.8 .. 1.25

Real models with a real tokenizer, and a deep synthetic one (random weights, the real model's tokenizer) with 12 and 24
layers. Every conversion is a process of its own; the peak is the operating system's accounting of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def convert(source: str, out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "quantkit.cli.main", "convert", source, "--out", str(out), "--json", *options]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    shutil.rmtree(out)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def synthetic(folder: Path, layers: int) -> Path:
    """A random llama of this depth, written shard by shard of one layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from quantkit.checkpoint.open import open_source
    from quantkit.checkpoint.tokenizer import write_tokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=49152, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    write_tokenizer(open_source("smollm2-135m"), folder)
    return folder


def main() -> None:
    from quantkit.checkpoint.texts import load_text

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "eval" / "results" / "memory.json")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        jobs = [
            (
                "smollm2-135m",
                "smollm2-135m",
                ["--samples", "8", "--seq-len", "512", "--group-size", "64", "--kv-bits", "8"],
            ),
            ("gemma3-270m", "gemma3-270m", ["--samples", "8", "--seq-len", "512", "--group-size", "64"]),
        ]
        # A short text: tokenizing a long one costs as much memory as a small model, and not always the same.
        text = work / "text.txt"
        text.write_text(load_text("wikipedia-sample", split="calibration").text[:60_000])
        for layers in (12, 24):
            folder = synthetic(work / f"deep-{layers}", layers)
            jobs.append(
                (
                    f"synthetic, {layers} layers",
                    str(folder),
                    ["--samples", "8", "--seq-len", "512", "--group-size", "64", "--calibration", str(text)],
                )
            )
        for label, source, options in jobs:
            report = convert(source, work / "out", *options)
            ratio = report["peak_host_bytes"] / report["predicted_host_bytes"]
            rows.append(
                {
                    "model": label, "options": [Path(option).name for option in options],
                    "peak_host_bytes": report["peak_host_bytes"],
                    "predicted_host_bytes": report["predicted_host_bytes"], "ratio": round(ratio, 3),
                }
            )  # fmt: skip
            print(
                f"{label:<24} peak {report['peak_host_bytes'] / 1e6:7.0f} MB  "
                f"predicted {report['predicted_host_bytes'] / 1e6:7.0f} MB  ratio {ratio:.2f}",
                flush=True,
            )
    growth = rows[-1]["peak_host_bytes"] / rows[-2]["peak_host_bytes"] - 1
    print(f"twice the layers: {growth:+.1%}")
    import torch

    data = {
        "command": "python eval/memory.py", "rows": rows, "growth_with_twice_the_layers": round(growth, 4),
        "hardware": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    args.out.write_text(json.dumps(data, indent=2) + "\n")
    if not all(0.8 <= row["ratio"] <= 1.25 for row in rows) or abs(growth) >= 0.05:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
