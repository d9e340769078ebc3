"""Peer: llm-compressor on the CPU: GPTQ, AWQ, NVFP4A16, by its defaults. Saves compressed-tensors. Run by run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from worker import (
    Stopwatch,
    arguments,
    block_linears,
    dense_state,
    file_bytes,
    finish,
    load_model,
    packed_bytes,
    token_ids,
)

LIBRARIES = ("llmcompressor", "compressed-tensors")


def scheme(args: Any) -> dict[str, Any]:
    """Its preset W4A16 has groups of 128, which it refuses where 128 does not divide a layer's width (576)."""
    weights = {
        "num_bits": args.bits, "type": "int", "symmetric": args.sym, "strategy": "group", "group_size": args.group_size,
    }  # fmt: skip
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


def nvfp4() -> dict[str, Any]:
    """Its preset NVFP4A16 with the observer that searches in place of the largest magnitude."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    preset = preset_name_to_scheme("NVFP4A16", ["Linear"])
    return {"targets": ["Linear"], "weights": preset.weights.model_copy(update={"observer": "memoryless_mse"})}


def recipe(args: Any) -> Any:
    """One modifier for GPTQ; AWQ scales, and a second modifier rounds."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if args.method == "nvfp4a16":  # by rounding: each block's scale is the best of those that the observer tries
        return QuantizationModifier(config_groups={"group_0": nvfp4()}, ignore=["lm_head"])
    options = {"config_groups": scheme(args), "ignore": ["lm_head"]}
    if args.method == "gptq":
        return GPTQModifier(**options)
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # Pinning memory needs an accelerator, and it pins without asking whether there is one.
    IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
    return [AWQModifier(), QuantizationModifier(**options)]


def decompressed(folder: Path) -> Any:
    """The saved model with its weights unpacked by its own library, in float32."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    unpack = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=unpack)


def main() -> None:
    args = arguments(__doc__)
    ids = token_ids(args)
    # In float16 its AWQ overflows in this family's last layers ("No finite loss was found").
    wide = args.method != "gptq" or args.dtype == "float32"
    model = load_model(args, torch.float32 if wide else torch.float16)
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
    if not wide:
        model.save_pretrained(args.out / "packed", save_compressed=True)
        watch.saved()
        finish(args, watch, LIBRARIES)
        return
    folder = args.out / "saved"  # its scales are float32, as the model was: quantkit reads 16-bit ones
    model.save_pretrained(folder, save_compressed=True)
    watch.saved()
    if args.times_only:
        finish(args, watch, LIBRARIES)
        return
    del model
    dense = decompressed(folder)
    size = {"quantized_bytes": packed_bytes(folder, block_linears(dense)), "checkpoint_bytes": file_bytes(folder)}
    finish(args, watch, LIBRARIES, dense_state(dense, {}), **size)


if __name__ == "__main__":
    main()
