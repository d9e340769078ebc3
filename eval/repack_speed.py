"""Time and peak memory of repacking, against copying the same bytes on the same disk.

    python eval/repack_speed.py FOLDER --work DIR [--gigabytes 3] [--out eval/results/repack.json]

FOLDER: a real model, quantized (W4, groups of 64 or so), whose tokenizer the synthetic checkpoint borrows. Every
repack is a process of its own, timed from outside, start of Python counted. The copy is ``shutil.copyfile`` and fsync,
of a file that was just written, as what is repacked was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, GROUP = 4096, 11008, 128
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (1024, HIDDEN), "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip


def synthetic(real: Path, out: Path, size: int) -> int:
    """Write a Llama of random codes in compressed-tensors, symmetric W4 g128, in shards; return its bytes."""
    shutil.copytree(real, out, ignore=shutil.ignore_patterns("*.safetensors*", "quantkit.json"))
    config = json.loads((real / "config.json").read_text())
    vocabulary = config["vocab_size"]
    a_layer = sum(n * k // 2 + n * k // GROUP * 2 for n, k in SHAPES.values())
    layers = (size - vocabulary * HIDDEN * 2) // a_layer
    shape = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "dtype": "float16",
    }  # fmt: skip
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"] |= {"group_size": GROUP, "symmetric": True, "strategy": "group", "num_bits": 4}
    group["targets"] = ["Linear"]
    config["quantization_config"]["config_groups"] = {"group_0": group}
    config["quantization_config"].pop("dequantize", None)
    (out / "config.json").write_text(json.dumps({**config, **shape, "tie_word_embeddings": True}))
    norm = torch.ones(HIDDEN, dtype=torch.float16)
    draw = torch.Generator().manual_seed(0)
    outer = torch.randn(vocabulary, HIDDEN, generator=draw).half() * 0.02
    names: dict[str, str] = {}
    batch: dict[str, Any] = {"model.embed_tokens.weight": outer, "model.norm.weight": norm.clone()}
    shard = 0
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part in ("input_layernorm", "post_attention_layernorm"):
            batch[f"{prefix}.{part}.weight"] = norm.clone()
        for part, (n, k) in SHAPES.items():
            packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=draw)
            scales = (torch.rand(n, k // GROUP, generator=draw) * 1e-3 + 1e-3).half()
            batch[f"{prefix}.{part}.weight_packed"] = packed.view(torch.int32)
            batch[f"{prefix}.{part}.weight_scale"] = scales
            batch[f"{prefix}.{part}.weight_shape"] = torch.tensor([n, k])
        if sum(value.nbytes for value in batch.values()) > 1 << 30 or layer == layers - 1:
            file = f"model-{shard:05d}.safetensors"
            save_file(batch, out / file)
            names |= dict.fromkeys(batch, file)
            batch, shard = {}, shard + 1
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return sum(file.stat().st_size for file in out.glob("*.safetensors"))


def copy_seconds(folder: Path, work: Path) -> float:
    """Copy the weights of a folder once, to the disk."""
    started = time.perf_counter()
    for file in folder.glob("*.safetensors"):
        shutil.copyfile(file, work / "copy")
        with (work / "copy").open("rb+") as stream:
            os.fsync(stream.fileno())
        (work / "copy").unlink()
    return time.perf_counter() - started


def repack(source: Path, work: Path, *options: str) -> dict[str, Any]:
    """Repack in a process of its own; return seconds, peak memory and the size of the result."""
    out = work / "repacked"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "quantkit", "convert", str(source), "--out", str(out), "--json", *options],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    report = json.loads(done.stdout)
    shutil.rmtree(out)
    return {
        "options": " ".join(options), "seconds": round(seconds, 1), "peak_host_bytes": report["peak_host_bytes"],
        "predicted_host_bytes": report["predicted_host_bytes"], "source_bytes": report["source_bytes"],
        "output_bytes": report["output_bytes"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--formats", default="gptq,gguf")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    forms = given.formats.split(",")
    result: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "threads": torch.get_num_threads(), "real": [], "synthetic": [],
    }  # fmt: skip
    for form in forms:
        result["real"].append(repack(given.folder, given.work, "--format", form))
        print(result["real"][-1], flush=True)
    big = given.work / "synthetic"
    shutil.rmtree(big, ignore_errors=True)
    result["synthetic_bytes"] = synthetic(given.folder, big, int(given.gigabytes * 1e9))
    result["copy_seconds"] = round(copy_seconds(big, given.work), 1)
    print(result["synthetic_bytes"], result["copy_seconds"], flush=True)
    for form in forms:
        run = repack(big, given.work, "--format", form)
        run["share_of_copy_speed"] = round(result["copy_seconds"] / run["seconds"], 3)
        result["synthetic"].append(run)
        print(run, flush=True)
    shutil.rmtree(big)
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
