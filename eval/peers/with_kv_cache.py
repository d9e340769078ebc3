"""Peer: a quantized KV cache of transformers (quanto or HQQ) or KIVI's recipe, read in chunks. Run by run_kv.py.

Writes the final hidden states of every row of token ids, which the caller turns into losses with the original's own
head.
"""

from __future__ import annotations

import argparse
import inspect
import json
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from kivi import kivi_cache

CHUNK = 64
# Axes by what shares a scale: the tokens of one channel, or the channels of one token.
AXES = {"quanto": {"channel": -1, "token": 0}, "hqq": {"channel": 0, "token": 1}}


def new_cache(args: argparse.Namespace, config: Any) -> Any:
    """An empty cache."""
    if args.cache == "kivi":
        return kivi_cache(config.num_hidden_layers, args.bits, args.group_size, args.residual)
    from transformers.cache_utils import Cache, HQQQuantizedLayer, QuantoQuantizedLayer

    layer = QuantoQuantizedLayer if args.cache == "quanto" else HQQQuantizedLayer
    axes = AXES[args.cache]
    return Cache(
        layers=[
            layer(args.bits, axes[args.keys], axes["token"], args.group_size, args.residual)
            for _ in range(config.num_hidden_layers)
        ]
    )


@torch.inference_mode()
def main() -> None:
    args = arguments()
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.float32).eval()
    # transformers 5.24 calls it "cache"
    known = inspect.signature(type(model.base_model).forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    rows, begun = [], time.perf_counter()
    for ids in load_file(args.tokens)["input_ids"]:
        cache = new_cache(args, model.config)
        parts = [
            model.base_model(input_ids=part[None], use_cache=True, **{name: cache}).last_hidden_state
            for part in ids.split(CHUNK)
        ]
        rows.append(torch.cat(parts, 1)[0])
    save_file({"hidden": torch.stack(rows)}, args.out / "hidden.safetensors")
    facts = {
        "seconds": round(time.perf_counter() - begun, 1),
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "optimum-quanto", "hqq")},
    }
    (args.out / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a 16-bit model folder")
    parser.add_argument("--out", type=Path, required=True, help="existing folder for hidden.safetensors and facts.json")
    parser.add_argument("--tokens", type=Path, required=True, help="file with input_ids [rows, tokens]")
    parser.add_argument("--cache", choices=["quanto", "hqq", "kivi"], required=True)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--keys", choices=["channel", "token"], required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--residual", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
