"""Quantize a model with a peer, in an environment of its own, on the token ids that quantkit would calibrate on.

    python eval/peers/run.py PEER SOURCE --out DIR --method gptq --bits 4 --group-size 64 --sym \\
        --samples 128 --seq-len 1024

PEER is an entry of eval/peers/environments.toml; its environment is made under --work when it is missing. The result is
a folder that `quantkit eval` reads: what the peer saved, where quantkit reads that format, else its weights as the peer
itself dequantizes them, in float32. One JSON object goes to stdout: seconds, peak memory, bits per weight, versions,
and which linears the peer left alone (found by comparing with the original, whatever the peer says).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from environments import environment
from tokens import write_tokens

from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.evaluate.sizes import count_parameters, measure_sizes
from quantkit.formats.reader import QuantizedReader
from quantkit.model.skeleton import block_linears, build_skeleton, find_blocks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CASTS = ("float32", "bfloat16", "float16")  # 16-bit originals are themselves in float32


def main() -> None:
    peers = tomllib.loads((HERE / "environments.toml").read_text(encoding="utf-8"))
    args = parse(sorted(peers))
    peer = peers[args.peer]
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already")
    if args.method not in peer["methods"]:
        raise SystemExit(f"--method {args.method}: {args.peer} is run with {' or '.join(peer['methods'])}")
    python = environment(args.peer, peer["install"], args.work, peer.get("npm", []))
    partial = args.out.with_name(f".{args.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    windows = write_tokens(args.source, partial / "tokens.safetensors", samples=args.samples, seq_len=args.seq_len)
    facts = quantize(python, peer["script"], args, partial)
    what = {} if args.times_only else judge(open_source(args.source), partial, facts)
    if args.times_only:
        shutil.rmtree(partial)
    else:
        partial.rename(args.out)
    done = {
        "out": str(args.out), "peer": args.peer, "method": args.method, "bits": args.bits,
        "group_size": args.group_size, "symmetric": args.sym, "dtype": args.dtype, "samples": args.samples,
        "seq_len": args.seq_len, "tokens_sha256": windows.digest(),
        **facts, **what,
    }  # fmt: skip
    print(json.dumps(done))


def parse(peers: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=peers)
    parser.add_argument("source", help="a 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--method", required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--sym", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--dtype",
        choices=["default", "float32"],
        default="default",
        help="what the peer computes in: its default, or float32, which processors without bf16 units are fastest with",
    )
    parser.add_argument(
        "--times-only", action="store_true", help="seconds and memory; its weights are neither read back nor kept"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "eval", help="where environments are kept")
    return parser.parse_args()


def quantize(python: Path, script: str, args: argparse.Namespace, partial: Path) -> dict[str, Any]:
    """Run the peer's script; what it reported."""
    command = [
        str(python), str(HERE / script), str(Path(args.source).resolve()), "--out", str(partial.resolve()),
        "--tokens", str((partial / "tokens.safetensors").resolve()), "--method", args.method, "--bits", str(args.bits),
        "--group-size", str(args.group_size), "--sym" if args.sym else "--no-sym",
        "--dtype", args.dtype, "--begun", str(time.time()), *(["--times-only"] if args.times_only else []),
    ]  # fmt: skip
    return run_there(python, command, partial)


def run_there(python: Path, command: list[str], partial: Path) -> dict[str, Any]:
    """Run a command of a peer's environment that leaves ``facts.json`` in ``partial``; what it reported.

    Its token ids are removed.
    """
    # PYTHONPATH would let the peer import this process's packages
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{python.parent}{os.pathsep}{inherited.get('PATH', '')}"  # ninja and the like
    scratch = partial / "scratch"  # some write logs where they stand
    scratch.mkdir()
    done = subprocess.run(command, check=False, stdout=sys.stderr, env={**inherited, "PATH": path}, cwd=scratch)
    if done.returncode or not (partial / "facts.json").exists():
        raise SystemExit(
            f"{Path(command[1]).stem} failed with exit code {done.returncode}; what it left is in {partial}"
        )
    facts: dict[str, Any] = json.loads((partial / "facts.json").read_text(encoding="utf-8"))
    shutil.rmtree(scratch)
    (partial / "facts.json").unlink()
    (partial / "tokens.safetensors").unlink()
    return facts


def decoder_linears(source: Source) -> dict[str, int]:
    """Linears of the decoder blocks by full name, with their number of weights."""
    blocks = find_blocks(build_skeleton(source.config))
    return {
        f"{blocks.name(i)}.{name}": linear.weight.numel()
        for i, block in enumerate(blocks.modules)
        for name, linear in block_linears(block).items()
    }


def judge(source: Source, partial: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Make a folder that quantkit reads of what the peer left, and tell sizes and what it changed."""
    if (partial / "dense.safetensors").exists():
        return judge_dense(source, partial, facts)
    return judge_packed(source, partial)


def cast_of(original: torch.Tensor, found: torch.Tensor) -> str | None:
    """The dtype that makes the original's values those that were found: its own, one that a peer loads in, or None."""
    for name in CASTS:
        dtype = getattr(torch, name)
        if torch.equal(original.to(dtype).float(), found):
            return name
    return None


def judge_dense(source: Source, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Make a model folder of dequantized weights; sizes from what the peer stores for the linears it changed."""
    from safetensors.torch import load_file, save_file

    dense = load_file(folder / "dense.safetensors")
    lost = [name for name in source.names() if name not in dense]
    if lost:
        raise SystemExit(f"{len(lost)} tensors of the original are not in the peer's result, first {lost[0]}")
    linears = decoder_linears(source)
    cast = {name: cast_of(source.read(name), dense[name]) for name in source.names()}
    same = {name for name in source.names() if cast[name] is not None}
    left = [name for name in linears if f"{name}.weight" in same]
    save_file({name: dense[name] for name in source.names()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "dense.safetensors").unlink()
    config = {**source.config, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(source, folder)
    changed = sum(size for name, size in linears.items() if name not in left)
    packed, stored = facts.pop("quantized_bytes"), facts["checkpoint_bytes"]
    return {
        "dequantized": True,
        "bits_per_weight": 8 * packed / changed if changed else None,
        "model_bits_per_weight": 8 * stored / count_parameters(source),
        "layers": len(linears) - len(left),
        "left_alone": left,
        "cast": {to: sum(1 for found in cast.values() if found == to) for to in CASTS[1:]},
        "changed_besides": sorted(set(source.names()) - same - {f"{name}.weight" for name in linears}),
    }


def judge_packed(source: Source, folder: Path) -> dict[str, Any]:
    """What a checkpoint in a format that quantkit reads holds.

    Its files move up from ``packed``, the tokenizer joins them.
    """
    for file in (folder / "packed").iterdir():
        file.rename(folder / file.name)
    (folder / "packed").rmdir()
    write_tokenizer(source, folder)
    written = open_source(folder)
    reader, sizes, linears = QuantizedReader(written), measure_sizes(written), decoder_linears(source)
    left = [name for name in linears if name not in reader.modules]
    return {
        "dequantized": False,
        "bits_per_weight": sizes.bits_per_weight,
        "model_bits_per_weight": sizes.model_bits_per_weight,
        "checkpoint_bytes": sizes.checkpoint_bytes,
        "layers": len(linears) - len(left),
        "left_alone": left,
        "changed_besides": [
            name
            for name in reader.plain_names()
            if name in source.names() and not torch.equal(source.read(name).float(), written.read(name).float())
        ],
    }


if __name__ == "__main__":
    main()
