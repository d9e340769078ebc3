"""Peer: llm-compressor, GPTQ or AWQ with its own defaults, on the CPU. Saves compressed-tensors. Run by run.py."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from worker import Stopwatch, arguments, finish, load_model, token_ids


def scheme(args: Any) -> dict[str, Any]:
    """Its preset W4A16 has groups of 128, which it refuses where 128 does not divide a layer's width (576)."""
    weights = {
        "num_bits": args.bits, "type": "int", "symmetric": args.sym, "strategy": "group", "group_size": args.group_size,
    }  # fmt: skip
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def recipe(args: Any) -> Any:
    """One modifier for GPTQ; AWQ scales, and a second modifier rounds."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    options = {"config_groups": scheme(args), "ignore": ["lm_head"]}
    if args.method == "gptq":
        return GPTQModifier(**options)
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # Pinning memory needs an accelerator, and it pins without asking whether there is one.
    IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
    return [AWQModifier(), QuantizationModifier(**options)]


def main() -> None:
    args = arguments(__doc__)
    ids = token_ids(args)
    # In float16 its AWQ overflows in this family's last layers ("No finite loss was found").
    model = load_model(args, torch.float32 if args.method == "awq" else torch.float16)
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    watch = Stopwatch(args)
    with watch:
        oneshot(
            model=model,
            dataset=rows,
            recipe=recipe(args),
            max_seq_length=ids.shape[1],
            num_calibration_samples=ids.shape[0],
        )
    model.save_pretrained(args.out / "packed", save_compressed=True)
    watch.saved()
    finish(args, watch, ["llmcompressor", "compressed-tensors"], dtype=str(model.dtype))


if __name__ == "__main__":
    main()
