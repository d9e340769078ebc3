"""Time single-stream decoding of models with random weights: int4 beside our own bf16 path; one JSON.

    python eval/kernels/gpu_decode.py --out results.json
        [--models 8B 1.5B] [--seconds 220] [--prompt 128] [--tokens 256] [--rehearse]

Models are made on the device. Both run through the generation loop: captured steps, attention over the paged cache,
tokens chosen and fed back on the device (``runtime/generate/cuda_graphs.py``). tokens_per_second: 1 / median time
between tokens as the host sees them, text and all. step_us: of one replay, by CUDA events, the host left out. GB/s
counts every weight that a step reads once, and the keys and values in the middle of the answer; its share is of a copy
measured in the same run. ``graphs: false`` rows launch the same step kernel by kernel. No checkpoint and no tokenizer
is read. What the time did not reach is listed. ``--rehearse``: a tiny model on a CPU, in Triton's interpreter; the
numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_linear import facts, measured_copy
from torch import nn
from tuning import random_weight

from quantkit.core.scheme import Scheme
from quantkit.evaluate.speed.traffic import kv_bytes_per_step, weight_bytes_per_step
from quantkit.model.skeleton import build_skeleton
from quantkit.runtime.generate.loop import Generation, run
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.kernels.triton.layout import TritonWeight
from quantkit.runtime.layers.fused import fuse_linears
from quantkit.runtime.layers.linear import QuantLinear
from quantkit.runtime.model import Model

LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "1.5B": {
        "model_type": "qwen2", "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "rope_theta": 1e6,
        "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "tiny": {
        **LLAMA, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip
SCHEME = Scheme(4, 128, False)


class NoText:
    """Stands for a tokenizer."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return ""


def random_model(shape: dict[str, Any], device: torch.device, packed: bool, graphs: bool = True) -> Model:
    """A model of these sizes with random weights; the linears of its blocks as int4, or all in bf16."""
    module: Any = build_skeleton(shape, torch.bfloat16)
    if packed:
        for number, (name, layer) in enumerate(list(module.named_modules())):
            if isinstance(layer, nn.Linear) and ".layers." in name:
                q = random_weight((layer.out_features, layer.in_features), SCHEME, device, seed=number)
                parent, _, local = name.rpartition(".")
                setattr(module.get_submodule(parent), local, QuantLinear(TritonWeight(q, device), layer.bias))
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(module.named_parameters()):
        value = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
        if parameter.dim() > 1:
            value.normal_(0, 0.02, generator=generator)
        owner, _, local = name.rpartition(".")
        module.get_submodule(owner)._parameters[local] = nn.Parameter(value, requires_grad=False)
    for name, buffer in list(module.named_buffers()):
        owner, _, local = name.rpartition(".")
        module.get_submodule(owner)._buffers[local] = buffer.to(device)
    if shape["tie_word_embeddings"]:
        module.tie_weights()
    if packed:
        fuse_linears(module, device)
    return Model(
        module.eval(), dict(shape), device=device, dtype=torch.bfloat16, read_tokenizer=NoText, graphs=graphs,
        fast_step=device.type == "cuda"
    )  # fmt: skip


def answer(model: Model, prompt: int, tokens: int) -> Generation:
    """One answer to random tokens."""
    ids = torch.randint(3, 60, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    options = GenerationOptions(max_tokens=tokens, ignore_eos=True)
    (done,) = (p.done for p in run(model, [ids], [options], end_tokens=(), context=None) if p.done is not None)
    return done


@torch.inference_mode()
def step_us(model: Model) -> float | None:
    """Median microseconds of a replay on the slot that the last answer used; None without graphs."""
    if model.decoding != "graph":
        return None
    (slot,) = model.graph_decoder._slots.values()
    (mode,) = slot.graphs
    slot.tables.pads.zero_()
    times = []
    for _ in range(5):
        slot.tables.length.fill_(128)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(40):
            slot.graphs[mode].replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / 40)
    return statistics.median(times)


def measure(model: Model, options: argparse.Namespace, copy: float) -> dict[str, Any]:
    start = time.monotonic()
    answer(model, options.prompt, 4)  # compiled, proved, captured
    ready = time.monotonic() - start
    done = [answer(model, options.prompt, options.tokens) for _ in range(2)][-1]
    spent = statistics.median(done.inter_token_latencies)
    read = weight_bytes_per_step(model, 1) + kv_bytes_per_step(model, options.prompt + options.tokens / 2, 1)
    return {
        "decoding": model.decoding,
        "prompt": options.prompt,
        "tokens": len(done.tokens),
        "ready_seconds": ready,
        "time_to_first_token": done.time_to_first_token,
        "tokens_per_second": 1 / spent,
        "bytes_per_step": read,
        "gb_per_s": read / spent / 1e9,
        "share_of_copy": read / spent / copy,
    }


def rows(options: argparse.Namespace, device: torch.device, copy: float, failed: list[str]) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + options.seconds
    for name in ["tiny"] if options.rehearse else options.models:
        for kind, packed, graphs in (("int4", True, True), ("bf16", False, True), ("int4", True, False)):
            if time.monotonic() > deadline:
                failed.append(f"{name} {kind}, graphs {graphs}: no time left")
                continue
            model = random_model(SHAPES[name], device, packed, graphs)
            if options.rehearse:
                step_on_a_cpu(model, graphs)
            row = {"model": name, "weights": kind, "graphs": graphs, **measure(model, options, copy)}
            row["step_us"] = None if options.rehearse else kept_pages(model, options)
            yield row
            del model
            if not options.rehearse:
                torch.cuda.empty_cache()


def kept_pages(model: Model, options: argparse.Namespace) -> float | None:
    """``step_us`` while an answer holds its pages: replays read and write them."""
    ids = list(range(3, 3 + options.prompt))
    going = run(model, [ids], [GenerationOptions(max_tokens=options.tokens)], end_tokens=(), context=None)
    next(going)
    try:
        return step_us(model)
    finally:
        going.close()


def step_on_a_cpu(model: Model, graphs: bool) -> None:
    """What a CUDA device would find by itself."""
    from quantkit.runtime.decode.gpu_step import gpu_step

    step, why = gpu_step(model.module, model.config, model.dtype, model.device)
    assert step is not None, why
    model.__dict__["fast_step"] = step
    if graphs:
        model.__dict__["graph_decoder"] = model.new_graph_decoder(step, capture=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--models", nargs="*", default=["8B", "1.5B"], choices=[name for name in SHAPES if name != "tiny"]
    )
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    if options.rehearse and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("--rehearse runs in Triton's interpreter: set TRITON_INTERPRET=1")
    device = torch.device("cpu" if options.rehearse else "cuda")
    copy = measured_copy(device, options.rehearse)
    result = {**facts(device, options.rehearse), "copy_gb_per_s": copy / 1e9, "scheme": SCHEME.describe()}
    failed: list[str] = []
    found: list[dict[str, Any]] = []
    for row in rows(options, device, copy, failed):
        found.append(row)
        dense = next((r for r in found if r["model"] == row["model"] and r["weights"] == "bf16"), None)
        for other in found:
            if dense is not None and other["model"] == row["model"]:
                other["over_bf16"] = other["tokens_per_second"] / dense["tokens_per_second"]
        print(
            f"{row['model']:5} {row['weights']:5} {row['decoding']:10} {row['tokens_per_second']:8.1f} tokens/s "
            f"{row['gb_per_s']:8.1f} GB/s, {row['share_of_copy']:6.1%} of copy, "
            f"ready after {row['ready_seconds']:.1f} s",
            flush=True,
        )
        options.out.write_text(json.dumps({**result, "rows": found, "failed": failed}, indent=1) + "\n")
    options.out.write_text(json.dumps({**result, "rows": found, "failed": failed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
