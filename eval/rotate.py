#!/usr/bin/env python3
"""Write the rotated copy of a model folder, in float32: what `quantkit convert --rotate` quantizes, by itself.

    python eval/rotate.py build/eval/twins/smollm2-135m OUT [--seed 0]

How and why: quantkit/model/rotate.py. Written as float32, so that the logits of the whole model show that nothing else
happened (checked before anything is written: largest change printed).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.open import open_source
from quantkit.errors import QuantkitError, UnsupportedModel
from quantkit.model.rotate import RotatedSource

LARGEST_DRIFT = 1e-2  # of a logit, in float32; 2.8e-4 was seen


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """Logits of 128 arbitrary tokens."""
    ids = torch.randint(model.config.vocab_size, (1, 128), generator=torch.Generator().manual_seed(1))
    logits: Tensor = model(ids[:, : model.config.max_position_embeddings]).logits
    return logits


def rotate(folder: Path, out: Path, seed: int) -> float:
    """Write the rotated model to ``out``; the largest change of a logit.

    Raises UnsupportedModel, also where that change is too large.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    source = RotatedSource(open_source(folder), seed)
    tensors = {name: source.exact(name) for name in source.names()}
    before = probe(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, assign=True)
    drift = (probe(model.eval()) - before).abs().max().item()
    if not drift <= LARGEST_DRIFT:
        raise UnsupportedModel(f"{folder}: the rotated model differs, a logit by {drift}; nothing was written")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    for path in folder.iterdir():  # tokenizer, chat template
        if path.is_file() and "safetensors" not in path.name and not (partial / path.name).exists():
            shutil.copy(path, partial)
    partial.rename(out)
    return drift


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a model folder in float: llama, mistral or qwen3")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the signs")
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already")
    try:
        drift = rotate(args.folder, args.out, args.seed)
    except QuantkitError as error:
        raise SystemExit(str(error)) from error
    print(f"{args.out}: largest logit change by the rotation {drift:.1e}", file=sys.stderr)
    print(args.out)


if __name__ == "__main__":
    main()
