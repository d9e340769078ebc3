"""Measure where each CPU kernel of quantkit/runtime stops being the fastest: tokens x layer shape, one JSON.

    python eval/kernels/cpu_linear.py [--threads 1] [--out eval/results/cpu_linear.json]

For every layout: seconds of its few-token kernel, of "dequantize into a scratch buffer, then the vendor's matmul", and
of a float32 ``F.linear`` for comparison; GB/s counts the packed bytes read. The crossover is the smallest number of
tokens from which "dequantize" is faster; runtime/layers/linear.py carries the table. The best of several runs counts,
because other jobs may share the cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.runtime.layers.linear import CROSSOVER, KERNELS, pack

SHAPES = {
    "smollm2 q_proj": (576, 576),
    "smollm2 gate_proj": (1536, 576),
    "smollm2 down_proj": (576, 1536),
    "1B down_proj": (2048, 5632),
}
SCHEMES = {"int4": Scheme(4, 64, False), "int8": Scheme(8, None), "int8 g128": Scheme(8, 128, False)}
TOKENS = (1, 4, 8, 12, 16, 24, 32, 48, 64, 128)


def best_of(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run within a time budget (three runs at least)."""
    run()
    best, spent, count = float("inf"), 0.0, 0
    while count < 3 or spent < seconds:
        start = time.perf_counter()
        run()
        elapsed = time.perf_counter() - start
        best, spent, count = min(best, elapsed), spent + elapsed, count + 1
    return best


def measure(name: str, shape: tuple[int, int], scheme: Scheme, seconds: float) -> list[dict[str, object]]:
    weight = torch.randn(shape)
    scales, zeros = affine.minmax_params(weight, scheme)
    q = QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)
    packed = pack(q, device=torch.device("cpu"))
    few, dequantize = KERNELS[CROSSOVER[packed.layout][0]], KERNELS["dequantize"]
    rows: list[dict[str, object]] = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1])
        row: dict[str, object] = {
            "layer": name,
            "shape": list(shape),
            "scheme": scheme.describe(),
            "layout": packed.layout,
            "tokens": tokens,
        }
        row["few_seconds"] = best_of(lambda x=x: few(x, packed, None), seconds)
        row["dequantize_seconds"] = best_of(lambda x=x: dequantize(x, packed, None), seconds)
        row["float32_seconds"] = best_of(lambda x=x: torch.nn.functional.linear(x, weight), seconds)
        row["few_gb_per_s"] = packed.nbytes() / float(str(row["few_seconds"])) / 1e9
        rows.append(row)
    return rows


def activation_dtypes(seconds: float) -> list[dict[str, object]]:
    """Time torch's packed matmuls for one token, by the dtype of the activations.

    It is why kernels/cpu_torch.py gives them bf16. Seconds.
    """
    out_features, in_features = 2048, 5632
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    signed = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    rows: list[dict[str, object]] = []
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x, scale = torch.randn(1, in_features).to(dtype), torch.rand(out_features).to(dtype)
        both = torch.rand(in_features // 64, out_features, 2).to(dtype)
        int4 = best_of(lambda x=x, b=both: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, b), seconds)
        int8 = best_of(lambda x=x, s=scale: torch.ops.aten._weight_int8pack_mm(x, signed, s), seconds)
        rows.append({"dtype": str(dtype).removeprefix("torch."), "int4_seconds": int4, "int8_seconds": int8})
    return rows


def crossovers(rows: list[dict[str, object]]) -> dict[str, int | None]:
    """(scheme, layer) -> the smallest number of tokens from which "dequantize" is always the faster."""
    found: dict[str, int | None] = {}
    for key in dict.fromkeys((str(r["scheme"]), str(r["layer"])) for r in rows):
        mine = [r for r in rows if (r["scheme"], r["layer"]) == key]
        slower = [i for i, r in enumerate(mine) if float(str(r["few_seconds"])) <= float(str(r["dequantize_seconds"]))]
        after = (max(slower) + 1) if slower else 0
        found[" / ".join(key)] = int(str(mine[after]["tokens"])) if after < len(mine) else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.05, help="time budget of one measurement")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            for scheme in SCHEMES.values():
                rows += measure(name, shape, scheme, options.seconds)
        dtypes = activation_dtypes(options.seconds)
    result = {
        "command": f"python eval/kernels/cpu_linear.py --threads {options.threads} --seconds {options.seconds}",
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": options.threads,
        "activation_dtypes": dtypes,
        "crossover_tokens": crossovers(rows),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(result["crossover_tokens"], indent=1))


if __name__ == "__main__":
    main()
