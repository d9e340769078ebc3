"""What a head held at 8 (or 4) bits costs: KL from the same model with its head as stored.

    python eval/head_bits.py MODEL [MODEL ...] [--windows 8] [--seq-len 512] [--out FILE]

MODEL is a name that ``quantkit fetch`` knows or a folder. Where head and embedding are one matrix, both are rounded.
The rounded head runs in its packed kernel, everything else exactly as without. Nats per token, over windows of
wikipedia-evaluation; the standard error is over windows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.fetch import fetch
from quantkit.checkpoint.tokenizer import load_tokenizer, wants_bos
from quantkit.evaluate.environment import hardware, versions
from quantkit.runtime.load import load

BITS = (8, 4)


def windows_of(ref: str, count: int, length: int) -> Tensor:
    """Token windows of the evaluation text, int64 ``[count, length]``, each with BOS where the model wants it."""
    tokenizer = load_tokenizer(ref)
    text = (fetch("wikipedia-sample") / "evaluation.txt").read_text(encoding="utf-8")[: count * length * 8]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = [tokenizer.bos_token_id] if wants_bos(tokenizer) else []
    body = length - len(first)
    return torch.tensor([first + ids[i * body : (i + 1) * body] for i in range(count)])


@torch.inference_mode()
def log_probs(model: Any, window: Tensor) -> Tensor:
    """Log probabilities of every position, float32 ``[tokens, vocab]``."""
    return torch.log_softmax(model(window[None])[0].float(), dim=-1)


def row(ref: str, bits: int, count: int, length: int) -> dict[str, Any]:
    """KL of one model with a rounded head."""
    exact = load(ref, dtype="float32", device="cpu", head_bits=16)
    rounded = load(ref, dtype="float32", device="cpu", head_bits=bits)
    means, changed = [], []
    for window in windows_of(ref, count, length):
        wanted, found = log_probs(exact, window), log_probs(rounded, window)
        means.append(float((wanted.exp() * (wanted - found)).sum(-1).mean()))
        changed.append(float((wanted.argmax(-1) != found.argmax(-1)).float().mean()))
    kl = torch.tensor(means, dtype=torch.float64)
    return {
        "model": Path(ref).name,
        "head_bits": bits,
        "tokens": count * length,
        "kl_mean": float(kl.mean()),
        "kl_stderr": float(kl.std() / len(kl) ** 0.5),
        "other_first_token": sum(changed) / len(changed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for ref in options.models:
        for bits in BITS:
            rows.append(row(ref, bits, options.windows, options.seq_len))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "command": f"python eval/head_bits.py {' '.join(Path(ref).name for ref in options.models)}"
        f" --windows {options.windows} --seq-len {options.seq_len}",
        "versions": versions(), "hardware": hardware(), "rows": rows,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
