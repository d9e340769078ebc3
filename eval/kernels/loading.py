"""Time loading of a checkpoint on a CPU, in processes of their own: seconds, and memory beside the checkpoint's bytes.

    python eval/kernels/loading.py FOLDER [--rounds 3] [--out FILE]
    ... --llama PYTHON --gguf FILE      llama-cpp-python in an environment of its own, as one more engine

A round starts every engine once, in turn. "imports" is the time until the libraries are there (torch, transformers and
the model's own code), "load" that of the model alone, "first" that of a short prompt and one more token, its tokenizer
included, "peak" the process's largest resident size. The files are read once before, so that no round waits for the
disk. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from quantkit.evaluate.environment import hardware, versions

OURS = """
import json, resource, sys, time
began = time.perf_counter()
import quantkit, torch, transformers.modeling_utils
from transformers import AutoConfig, AutoModelForCausalLM
with torch.device("meta"):  # its own code is imported, nothing is read
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]), trust_remote_code=False)
ready = time.perf_counter()
model = quantkit.load(sys.argv[1], device="cpu")
loaded = time.perf_counter()
text = "".join(model.stream("def add(first, second):", max_tokens=2))
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"imports": ready - began, "load": loaded - ready, "first": done - loaded, "peak": peak}))
"""
THEIRS = """
import json, resource, sys, time
began = time.perf_counter()
from llama_cpp import Llama
ready = time.perf_counter()
model = Llama(sys.argv[1], n_ctx=512, verbose=False, n_threads=int(sys.argv[2]))
loaded = time.perf_counter()
model.create_completion("def add(first, second):", max_tokens=2)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"imports": ready - began, "load": loaded - ready, "first": done - loaded, "peak": peak}))
"""


def once(python: str, code: str, *arguments: str) -> dict[str, float]:
    """What one process measured."""
    done = subprocess.run([python, "-c", code, *arguments], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama", help="a Python with llama-cpp-python")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engines: dict[str, tuple[tuple[str, ...], list[Path]]] = {
        "quantkit": ((sys.executable, OURS, str(options.folder)), sorted(options.folder.glob("*.safetensors")))
    }
    if options.llama and options.gguf:
        theirs = (options.llama, THEIRS, str(options.gguf), str(options.threads))
        engines["llama.cpp"] = (theirs, [options.gguf])
    for _, files in engines.values():
        for file in files:
            file.read_bytes()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, (command, _) in engines.items():
            runs[name].append(once(*command))
            print(name, runs[name][-1], file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for name, (_, files) in engines.items():
        size = sum(file.stat().st_size for file in files)
        row = {key: statistics.median(run[key] for run in runs[name]) for key in runs[name][0]}
        rows.append({"engine": name, "checkpoint_bytes": size, **row, "peak_of_checkpoint": row["peak"] / size})
        print(json.dumps(rows[-1]))
    result = {
        "command": f"python eval/kernels/loading.py {options.folder.name} --rounds {options.rounds}",
        "versions": versions(), "hardware": hardware(), "rows": rows, "runs": runs,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
