"""Time decoding on a CPU over long contexts: the 16-bit cache and quantized ones, taking turns round by round.

    python eval/kernels/cpu_kv.py --model smollm2-135m --out eval/results/cpu_kv-smollm2-135m.json

Weights have 4 bits in groups of 64, rounded to nearest, and the head 8 bits: speed does not depend on how they were
chosen. The cache is not the work of a prompt: it is filled with random keys and values, the same in every layer, each
layer in memory of its own. A round decodes ``--new-tokens`` (a multiple of 64 counts the packing of a page exactly) up
to ``--context`` greedily, head included, from a fork of that cache. "16 bit" is float32 here, the run-time dtype of a
CPU. Engines: the compiled step of the extra ``[cpu]``, and torch alone, as without it. The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cpu_decode import CPU, Machine, NoTokenizer, module_of, store

from quantkit.core import affine
from quantkit.core.kvscheme import KVPlan, KVScheme
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.evaluate.speed.traffic import weight_bytes_per_step
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.transformers_cache import transformers_cache
from quantkit.runtime.layers.head import round_head
from quantkit.runtime.layers.linear import QuantLinear, pack
from quantkit.runtime.model import Model


@dataclass
class Engine:
    name: str
    model: Model
    cache: KVCache
    new_tokens: int
    milliseconds: list[float] = field(default_factory=list)


def packed_module(ref: str) -> tuple[Any, dict[str, Any]]:
    module, config = module_of(ref, torch.float32)
    scheme = Scheme(4, 64, False)
    for name, layer in list(module.named_modules()):
        if isinstance(layer, torch.nn.Linear) and "layers." in name:
            owner, _, local = name.rpartition(".")
            scales, zeros = affine.minmax_params(layer.weight, scheme)
            q = QuantTensor(affine.quantize(layer.weight, scales, zeros, scheme), scales, zeros, scheme)
            setattr(module.get_submodule(owner), local, QuantLinear(pack(q, device=CPU), layer.bias))
    round_head(module, 8, device=CPU, dtype=torch.float32, kernel=None)
    return module, config


def engines(options: argparse.Namespace, *, numba: bool) -> list[Engine]:
    """Over one module; torch's own kernels where ``numba`` is False, as on a machine without the extra."""
    installed = threads.available
    if not numba:
        threads.available = lambda: False  # type: ignore[assignment]
    try:
        module, config = packed_module(options.model)
        made = []
        for bits in options.kv_bits.split(",") if numba else ["16", "4"]:
            plan = KVPlan(KVScheme.of(bits))
            model = Model(module, config, device=CPU, dtype=torch.float32, read_tokenizer=NoTokenizer, kv_plan=plan)
            if (model.fast_step is not None) != numba:
                raise SystemExit(f"{options.model}: the compiled step is {'not ' if numba else ''}taken.")
            new = options.new_tokens if numba else options.torch_tokens
            name = f"KV{bits}, {'compiled step' if numba else 'torch alone'}".replace("KVk", "K").replace("K4v", "K4V")
            made.append(Engine(name, model, filled(model, options.context - new), new))
            print(f"{name}: filled", file=sys.stderr)
    finally:
        threads.available = installed
    return made


@torch.inference_mode()
def filled(model: Model, tokens: int) -> KVCache:
    cache = model.new_cache(tokens + 192)
    config, first = model.module.config, cache.layers[0]
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(0)
    first.expect(None, tokens)
    first.append(*(torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(2)))
    first.trim()
    specs = [layer.spec for layer in cache.layers]
    if any(spec.window is not None for spec in specs):
        raise SystemExit("layers with a sliding window do not hold the whole context; use another model.")
    cache.layers = [first, *(copy.deepcopy(first) for _ in specs[1:])]
    return cache


@torch.inference_mode()
def decode(engine: Engine) -> float:
    """Milliseconds a token."""
    cache = engine.cache.fork([0])
    seam, token = transformers_cache(cache), 1
    start = time.perf_counter()
    for _ in range(engine.new_tokens):
        hidden = engine.model.step(torch.tensor([[token]]), seam)
        token = int(engine.model.head(hidden)[0, -1].argmax())
    spent = time.perf_counter() - start
    cache.select([])
    return 1e3 * spent / engine.new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kv-bits", default="16,8,4,3,k4v2,2")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--torch-tokens", type=int, default=4, help="tokens of a round for torch alone; 0 leaves it out"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine()
    made = engines(options, numba=True) + (engines(options, numba=False) if options.torch_tokens else [])
    for number in range(options.rounds + 1):
        for engine in made:
            spent = decode(engine)
            if number:  # the first round pays for page faults and compilation
                engine.milliseconds.append(spent)
    rows = [row_of(engine, made) for engine in made]
    store(options, {"context": options.context, "filled_with": "random keys and values"}, machine, rows)
    for row in rows:
        print(f"{row['milliseconds_per_token']:8.2f} ms  x{row['times_16_bit']:.2f} of 16 bit  {row['engine']}")


def row_of(engine: Engine, made: list[Engine]) -> dict[str, Any]:
    kind = engine.name.partition(", ")[2]
    base = next(e for e in made if e.name.startswith("KV16") and e.name.endswith(kind))
    middle = statistics.median(engine.milliseconds)
    return {
        "engine": engine.name,
        "milliseconds_per_token": round(middle, 2),
        "milliseconds_per_token_runs": [round(v, 2) for v in engine.milliseconds],
        "times_16_bit": round(middle / statistics.median(base.milliseconds), 2),
        "tokens_per_round": engine.new_tokens,
        "cache_bytes": engine.cache.nbytes(),
        "weight_bytes_per_token": weight_bytes_per_step(engine.model, 1),
    }


if __name__ == "__main__":
    main()
