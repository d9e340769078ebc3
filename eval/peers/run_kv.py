"""Run a model with a peer's quantized KV cache, and keep its final hidden states.

The windows are those that `quantkit eval` would take.

    python eval/peers/run_kv.py quanto SOURCE --out DIR --bits 4 --keys channel --residual 192 \\
        --seq-len 4096 --tokens 4096

CACHE is quanto or hqq (transformers' QuantizedCache) or kivi (eval/peers/kivi.py). Tokens are fed in chunks of 64: the
first update of transformers' cache hands back what it was given, not what it stored, so that a prompt fed at once would
never see the damage. ``--residual``: theirs quantizes everything when that many exact tokens would have gathered, so
fed in chunks of 64 a query sees between 0 and residual - 64 exact tokens before its own chunk, (residual - 64) / 2 on
average; quantkit's sees its ``recent`` ones. 192 is the equal of 64, 320 of 128.

DIR gets hidden.safetensors: ``hidden`` float32 ``[rows, tokens, hidden]``, the windows first, then the texts of
``--planted-fact``. One JSON object goes to stdout: bits per number with scales (two 16-bit numbers a group), seconds,
peak memory, versions.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from environments import environment
from run import HERE, ROOT, run_there, tomllib
from safetensors.torch import save_file

from quantkit.evaluate.kv_cache.planted_facts import plant
from quantkit.evaluate.prepare import Prepared, prepare

PEER = "kv-cache"  # in environments.toml


def main() -> None:
    args = parse()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already")
    prepared = prepare(args.source, data=args.data, protocol=args.protocol, seq_len=args.seq_len, tokens=args.tokens)
    peer = tomllib.loads((HERE / "environments.toml").read_text(encoding="utf-8"))[PEER]
    python = environment(PEER, peer["install"], args.work)
    partial = args.out.with_name(f".{args.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokens = partial / "tokens.safetensors"
    save_file({"input_ids": rows(prepared, args.planted_fact)}, tokens)
    command = [
        str(python), str(HERE / peer["script"]), str(Path(args.source).resolve()), "--out", str(partial.resolve()),
        "--tokens", str(tokens.resolve()), "--cache", args.cache, "--bits", str(args.bits), "--keys", args.keys,
        "--group-size", str(args.group_size), "--residual", str(args.residual),
    ]  # fmt: skip
    facts = run_there(python, command, partial)
    partial.rename(args.out)
    how = {name: getattr(args, name) for name in ("cache", "bits", "keys", "group_size", "residual")}
    bits = args.bits + 32 / args.group_size  # a scale and a zero or minimum, 16 bits each
    print(json.dumps({**how, "kv_bits_per_number": bits, "ids_sha256": prepared.windows.digest(), **facts}))


def rows(prepared: Prepared, planted: bool) -> torch.Tensor:
    """int64 ``[windows and planted texts, seq_len]``."""
    windows = prepared.windows
    if not planted:
        return windows.ids
    texts = plant(prepared.tokenizer, prepared.text_ids, seq_len=windows.seq_len, bos_id=prepared.bos_id)
    return torch.cat([windows.ids, *(text.ids[None] for text in texts)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cache", choices=["quanto", "hqq", "kivi"])
    parser.add_argument("source", help="a 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument(
        "--keys",
        choices=["channel", "token"],
        default="channel",
        help="what shares a scale: a channel's tokens, or a token's channels",
    )
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--residual", type=int, required=True)
    parser.add_argument("--data", default="wikipedia-sample")
    parser.add_argument("--protocol", default="gptq")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--planted-fact", action="store_true")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "eval", help="where environments are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
