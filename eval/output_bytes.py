"""Do two versions of quantkit write the same bytes? Convert one model in many ways and hash every file of every output.

    python eval/output_bytes.py --save before.json       # with the old code
    python eval/output_bytes.py --against before.json    # with the new code, same machine, same libraries

Codes depend on the order of floating-point sums, so both runs need the same processor, number of threads and versions.
The calibration is tiny: what is compared is bytes, not quality. Exit code 1 if a file differs, is missing or is new.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import quantkit

TEXT: dict[str, Any] = {"samples": 2, "seq_len": 128}
G64: dict[str, Any] = {"group_size": 64}
# name -> the arguments of quantkit.convert; a source "out:NAME" is the output of an earlier row.
CASES: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "rtn-w8": {"method": "rtn", "bits": 8, "group_size": "channel", "symmetric": True},
    "gptq": {"method": "gptq", **TEXT},
    "awq": {"method": "awq", "format": "awq", **G64, **TEXT},
    "fast": {"preset": "fast", **G64},
    "balanced": {"preset": "balanced", **G64, **TEXT},
    "best": {"preset": "best", "tune_steps": 2, "distil": 4, **G64, **TEXT},
    "gptaq": {"method": "gptq", "gptaq": True, "rotate": True, "format": "gptq", "symmetric": True, **G64, **TEXT},
    "smooth": {"method": "smooth", "activations": "int8", **TEXT},
    "target-bpw": {"preset": "balanced", "target_bpw": 7.0, **TEXT},
    "target-native": {"preset": "fast", "target_bpw": 4.5, "format": "native", "kv_bits": 4, **TEXT},
    "kv-budget": {"method": "rtn", "kv_budget": 4, "samples": 2, "seq_len": 256, **G64},
    "kv-fp8": {"method": "rtn", "kv_bits": "fp8", **G64, **TEXT},
    "self": {"method": "rtn", "kv_bits": "k4v2", "calibration": "self", "samples": 2, "seq_len": 32, **G64},
    "rules": {"method": "rtn", "rules": ("lm_head=bits:8", "*.down_proj=bits:8", "*.0.*=keep"), "format": "native"},
    "repack": {"source": "out:gptaq", "format": "compressed-tensors"},
    "repack-kv": {"source": "out:rtn", "kv_bits": 8, **TEXT},
}


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below ``folder``, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def convert_all(source: str, work: Path, only: list[str]) -> dict[str, Any]:
    """Every case's hashes and seconds. Outputs that no later case reads are removed at once."""
    found: dict[str, Any] = {}
    needed = {str(case.get("source", "")).removeprefix("out:") for name, case in CASES.items() if name in only}
    for name in CASES:
        if name not in only and name not in needed:
            continue
        case = dict(CASES[name])
        given = str(case.pop("source", source))
        origin = str(work / given.removeprefix("out:")) if given.startswith("out:") else given
        started = time.perf_counter()
        quantkit.convert(origin, work / name, **case)
        found[name] = {"files": hashes(work / name), "seconds": round(time.perf_counter() - started, 1)}
        print(f"{name}: {len(found[name]['files'])} files, {found[name]['seconds']} s", flush=True)
        if name not in needed:
            shutil.rmtree(work / name)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In words, every file that is not the same in both."""
    found = []
    for name in after:
        there, here = before[name]["files"], after[name]["files"]
        found += [f"{name}/{file}" for file in sorted({*there, *here}) if there.get(file) != here.get(file)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default="smollm2-135m")
    parser.add_argument("--save", type=Path, help="write the hashes here")
    parser.add_argument("--against", type=Path, help="compare with hashes that --save wrote")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = convert_all(args.source, Path(work), args.only)
    made = {
        "source": args.source,
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "safetensors")},
        "cases": found,
    }
    if args.save is not None:
        args.save.write_text(json.dumps(made, indent=1) + "\n")
    if args.against is not None:
        before = json.loads(args.against.read_text())
        other = [key for key in ("source", "machine", "threads", "versions") if before[key] != made[key]]
        if other:
            raise SystemExit(f"{args.against}: was made with another {', '.join(other)}; bytes cannot be compared.")
        wrong = differences(before["cases"], found)
        print("\n".join(["these files differ:", *wrong]) if wrong else "every file is the same, byte for byte")
        raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
