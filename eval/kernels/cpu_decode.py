"""Time decode and prefill on a CPU, side by side in one run, the engines taking turns round by round.

    python eval/kernels/cpu_decode.py --model smollm2-135m --out eval/results/cpu_decode-smollm2-135m.json
    python eval/kernels/cpu_decode.py --model random-1.5b --rounds 3 --prompt 8 --new-tokens 9 --prefill ''
        --only '*bfloat16' --only "*torch's*" --only '*8 bit'
    ... --llama PYTHON --gguf FILE [--gguf FILE]      llama-cpp-python in an environment of its own, as one more engine

Engines: transformers' definition with float32 and bf16 weights; quantkit with torch's own packed kernels (as without
the extra ``[cpu]``); quantkit with the numba kernels, head exact and of 8 bits. Weights are rounded to nearest (speed
does not depend on how they were chosen). ``random-1.5b`` has the shape of a 1.5B model (28 layers of 1536, 8960 inside,
vocabulary 151936, tied) and random weights, those of a shape alike in all layers. A round is: read the prompt, then
decode greedily. The median of the rounds counts. Load average and versions are stored with the figures: beside other
jobs they are worth little.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import inspect
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.evaluate.environment import hardware, versions
from quantkit.evaluate.speed.traffic import measure_bandwidth, weight_bytes_per_step
from quantkit.model.skeleton import build_skeleton
from quantkit.runtime.generate.loop import run
from quantkit.runtime.generate.sampling import GenerationOptions
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.layers.head import compact_head, round_head
from quantkit.runtime.layers.linear import QuantLinear, pack
from quantkit.runtime.load import load
from quantkit.runtime.model import Model

CPU = torch.device("cpu")
RANDOM = {
    "random-1.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass
class Engine:
    """decode(prompt, new) -> (seconds to the first token, seconds of the others). bytes_per_token: weights read."""

    name: str
    decode: Callable[[list[int], int], tuple[float, float]]
    bytes_per_token: int | None
    held_bytes: int | None


class NoTokenizer:
    """Text costs nothing here; the engine asks for it all the same."""

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


def module_of(ref: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The transformers model with dense weights, and its config."""
    if ref not in RANDOM:
        model = load(ref, device="cpu", dtype=dtype, kernel="reference")  # dense: the kernel's name touches nothing
        return model.module, model.config
    config = dict(RANDOM[ref])
    module: Any = build_skeleton(config, dtype)
    torch.manual_seed(0)
    made: dict[torch.Size, torch.Tensor] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and parameter.is_meta:
                value = torch.ones(parameter.shape, dtype=dtype)
                if parameter.dim() > 1:
                    if parameter.shape not in made:
                        made[parameter.shape] = torch.empty(parameter.shape, dtype=dtype).uniform_(-0.03, 0.03)
                    value = made[parameter.shape].clone()  # memory of its own: what a layer reads is not in a cache yet
                owner._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    module.tie_weights()
    return module, config


def transformers_engine(ref: str, dtype: torch.dtype) -> Engine:
    module, _ = module_of(ref, dtype)
    known = inspect.signature(type(module).forward).parameters
    cache = "cache" if "cache" in known else "past_key_values"  # since transformers 5.24, and before

    @torch.inference_mode()
    def decode(prompt: list[int], new: int) -> tuple[float, float]:
        start = time.perf_counter()
        out = module(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
        first = time.perf_counter()
        for _ in range(new - 1):
            out = module(input_ids=torch.tensor([[token]]), use_cache=True, **{cache: getattr(out, cache)})
            token = int(out.logits[0, -1].argmax())
        return first - start, time.perf_counter() - first

    size = sum(p.nbytes for p in module.parameters())
    return Engine(f"transformers {str(dtype).removeprefix('torch.')}", decode, size, size)


def quantkit_engine(ref: str, scheme: Scheme, *, numba: bool, head_bits: int | None = None) -> Engine:
    installed = threads.available
    if not numba:
        threads.available = lambda: False  # type: ignore[assignment]  # as on a machine without the extra
    try:
        module, config = module_of(ref, torch.float32)
        alike: dict[torch.Size, QuantTensor] = {}  # random layers of a shape are equal
        for name, layer in list(module.named_modules()):
            if isinstance(layer, torch.nn.Linear) and "layers." in name:
                owner, _, local = name.rpartition(".")
                q = alike.get(layer.weight.shape)
                if q is None:
                    scales, zeros = affine.minmax_params(layer.weight, scheme)
                    q = QuantTensor(affine.quantize(layer.weight, scales, zeros, scheme), scales, zeros, scheme)
                    if ref in RANDOM:
                        alike[layer.weight.shape] = q
                setattr(module.get_submodule(owner), local, QuantLinear(pack(q, device=CPU), layer.bias))
        if head_bits is not None:
            round_head(module, head_bits, device=CPU, dtype=torch.float32, kernel=None)
        else:
            compact_head(module, torch.float32)
        model = Model(module, config, device=CPU, dtype=torch.float32, read_tokenizer=NoTokenizer)
        lean = model.fast_step is not None
    finally:
        threads.available = installed
    gc.collect()

    def decode(prompt: list[int], new: int) -> tuple[float, float]:
        options = [GenerationOptions(max_tokens=new, ignore_eos=True)]
        pieces = run(model, [prompt], options, end_tokens=(), context=None)
        done = next(piece.done for piece in pieces if piece.done is not None)
        return done.time_to_first_token, sum(done.inter_token_latencies)

    kind = ("numba, compiled step" if lean else "numba") if numba else "torch's kernels"
    name = f"quantkit {scheme.describe()}, {kind}" + (f", head {head_bits} bit" if head_bits else "")
    memory = model.memory()
    return Engine(name, decode, weight_bytes_per_step(model, 1), memory["quantized"] + memory["dense"])


LLAMA = """
import json, sys, time
from llama_cpp import Llama
file, threads = sys.argv[1], int(sys.argv[2])
llm = Llama(file, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    prompt, new = json.loads(line)
    llm.reset()
    start = time.perf_counter()
    llm.eval(prompt)
    token = llm.sample(temp=0.0)
    first = time.perf_counter()
    for _ in range(new - 1):
        llm.eval([token])
        token = llm.sample(temp=0.0)
    print(json.dumps([first - start, time.perf_counter() - first]), flush=True)
"""


def llama_engine(python: str, file: str, threads: int) -> Engine:
    own = {
        name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"
    }  # ggml's threads are OpenMP's
    child = subprocess.Popen(
        [python, "-c", LLAMA, file, str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own
    )
    assert child.stdin is not None
    assert child.stdout is not None
    stdin, stdout = child.stdin, child.stdout
    if stdout.readline().strip() != "ready":
        raise SystemExit(f"{python} could not open {file}")

    def decode(prompt: list[int], new: int) -> tuple[float, float]:
        stdin.write(json.dumps([prompt, new]) + "\n")
        stdin.flush()
        first, rest = json.loads(stdout.readline())
        return first, rest

    return Engine(f"llama.cpp {Path(file).stem}", decode, Path(file).stat().st_size, None)


def engines(options: argparse.Namespace) -> list[Engine]:
    ref, four, eight = options.model, Scheme(4, 64, False), Scheme(8, None)
    known: dict[str, Callable[[], Engine]] = {
        "transformers float32": lambda: transformers_engine(ref, torch.float32),
        "transformers bfloat16": lambda: transformers_engine(ref, torch.bfloat16),
        "int4 torch's kernels": lambda: quantkit_engine(ref, four, numba=False),
    }
    if threads.available():
        known["int4 numba"] = lambda: quantkit_engine(ref, four, numba=True)
        known["int4 numba, head 8 bit"] = lambda: quantkit_engine(ref, four, numba=True, head_bits=8)
        if ref not in RANDOM:
            known["int8 numba, head 8 bit"] = lambda: quantkit_engine(ref, eight, numba=True, head_bits=8)
    for file in options.gguf:
        known[f"llama.cpp {file}"] = partial(llama_engine, options.llama, file, options.threads)
    chosen = [name for name in known if any(fnmatch.fnmatch(name, one) for one in options.only or ["*"])]
    if not chosen:
        raise SystemExit(f"--only {options.only}: engines are {', '.join(known)}")
    return [known[name]() for name in chosen]


def measure(made: list[Engine], options: argparse.Namespace) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    prompts = {
        n: torch.randint(0, 1000, (n,), generator=generator).tolist() for n in (options.prompt, *options.prefill)
    }
    rows: dict[str, dict[str, Any]] = {
        engine.name: {
            "engine": engine.name,
            "decode_tokens_per_second": [],
            "bytes_per_token": engine.bytes_per_token,
            "held_bytes": engine.held_bytes,
        }
        for engine in made
    }
    for number in range(options.rounds + 1):
        for engine in made:
            row = rows[engine.name]
            _, rest = engine.decode(prompts[options.prompt], options.new_tokens)
            if number:  # the first round pays for page faults and compilation
                row["decode_tokens_per_second"].append((options.new_tokens - 1) / rest)
            for length in options.prefill:
                first, _ = engine.decode(prompts[length], 2)
                if number:
                    row.setdefault(f"prefill_{length}_tokens_per_second", []).append(length / first)
        print(f"round {number} of {options.rounds}", file=sys.stderr)
    return [summary(row) for row in rows.values()]


def summary(row: dict[str, Any]) -> dict[str, Any]:
    found = dict(row)
    for key, value in row.items():
        if isinstance(value, list):
            found[f"{key}_runs"], found[key] = [round(v, 2) for v in value], round(statistics.median(value), 2)
    if row["bytes_per_token"]:
        found["gb_per_s"] = round(found["decode_tokens_per_second"] * row["bytes_per_token"] / 1e9, 2)
    return found


class Machine:
    """What the machine gives before a measurement."""

    def __init__(self) -> None:
        self.bandwidth, self.load = measure_bandwidth(CPU), os.getloadavg()[0]


def store(options: argparse.Namespace, what: dict[str, Any], machine: Machine, rows: list[dict[str, Any]]) -> None:
    """Write a measurement to ``--out`` with how, where and beside what it was made. The command leaves out paths."""
    given = [a for a in sys.argv[1:] if "/" not in a and a != "--out"]
    result = {
        "command": shlex.join(["python", f"eval/kernels/{Path(sys.argv[0]).name}", *given]),
        "note": options.note,
        "model": options.model,
        **what,
        "bandwidth_read_gb_per_s": round(machine.bandwidth.read / 1e9, 2),
        "bandwidth_copy_gb_per_s": round(machine.bandwidth.copy / 1e9, 2),
        "load_average": [round(machine.load, 2), round(os.getloadavg()[0], 2)],
        "versions": versions(),
        "hardware": hardware(),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=lambda text: [int(n) for n in text.split(",") if n], default=[512, 2048])
    parser.add_argument("--llama", help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", action="append", default=[])
    parser.add_argument("--only", action="append", help="engines by name (wildcards, repeatable); all if not given")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine()
    rows = measure(engines(options), options)
    by_name = {row["engine"]: row["decode_tokens_per_second"] for row in rows}
    for row in rows:
        for base in ("float32", "bfloat16"):
            if f"transformers {base}" in by_name:
                row[f"times_transformers_{base}"] = round(by_name[row["engine"]] / by_name[f"transformers {base}"], 2)
    store(options, {"prompt": options.prompt, "new_tokens": options.new_tokens}, machine, rows)
    for row in rows:
        times = row.get("times_transformers_bfloat16")
        beside = "" if times is None else f"x{times:.2f} bf16  "
        print(f"{row['decode_tokens_per_second']:8.1f} tokens/s  {beside}{row['engine']}")


if __name__ == "__main__":
    main()
