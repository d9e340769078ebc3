"""Compute bytes, operations and floors of the GPU linears, without a GPU; one JSON.

    python eval/kernels/predict.py [--out eval/results/gpu_predicted.json]

A floor is the larger of bytes over the measured copy bandwidth and operations over the measured matrix rate of an H200
(4.3 TB/s counting reads and writes, 790 TFLOP/s in bf16, both seen on random data). A kernel may miss its floor, never
beat it; ``gpu_linear.py`` measures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COPY = 4.3e12  # bytes a second
MATRIX = 790e12  # bf16 operations a second
INTEGER = 132 * 64 * 1.755e9  # integer instructions a second (lanes), half the rate of floating point
INSTRUCTIONS = {4: 1.1, 8: 1.5}  # integer instructions a weight on the matrix path (kernels/triton/unpack.py)
GROUP = 128
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# (out, in) of fused linears: q, k, v in one matrix, gate and up in one
SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}


def weight_bytes(rows: int, cols: int, bits: int, *, zeros: bool = True) -> int:
    """Bytes of the layout in runtime/kernels/triton/layout.py: codes, fp16 scales, zeros of one byte."""
    return rows * cols * bits // 8 + rows * cols // GROUP * (3 if zeros else 2)


def floor(rows: int, cols: int, tokens: int, bits: int) -> dict[str, float]:
    """Microseconds: of the bytes, of the operations, of the integer instructions, and the largest.

    bits 16: no dequantizing.
    """
    weights = rows * cols * 2 if bits == 16 else weight_bytes(rows, cols, bits)
    moved = weights + 2 * tokens * (rows + cols)
    times = {"bytes_us": moved / COPY * 1e6, "matrix_us": 2.0 * rows * cols * tokens / MATRIX * 1e6}
    if bits < 16:
        times["integer_us"] = rows * cols * INSTRUCTIONS[bits] * max(1, tokens // 128) / INTEGER * 1e6
    return {"bytes": moved, **times, "floor_us": max(times.values())}


def dequantize_once(rows: int, cols: int, tokens: int, bits: int) -> float:
    """Microseconds of writing the weights out in bf16 and multiplying them.

    One after the other, nothing kept in the cache.
    """
    return (weight_bytes(rows, cols, bits) + 2 * rows * cols) / COPY * 1e6 + floor(rows, cols, tokens, 16)["floor_us"]


def table() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for layer, (rows, cols) in SHAPES.items():
        for tokens in TOKENS:
            dense, four = floor(rows, cols, tokens, 16), floor(rows, cols, tokens, 4)
            both = dequantize_once(rows, cols, tokens, 4)
            found.append(
                {
                    "layer": layer,
                    "shape": [rows, cols],
                    "tokens": tokens,
                    "operations": 2 * rows * cols * tokens,
                    "bf16": dense,
                    "int4": four,
                    "int8": floor(rows, cols, tokens, 8),
                    "int4_dequantize_once_us": both,
                    "int4_fused_speedup_at_most": dense["floor_us"] / four["floor_us"],
                    "int4_dequantize_once_speedup": dense["floor_us"] / both,
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "gpu_predicted.json")
    out = parser.parse_args().out
    facts = {"copy_bytes_per_s": COPY, "matrix_flop_per_s": MATRIX, "integer_per_s": INTEGER, "group": GROUP}
    rows = [_rounded(row) for row in table()]
    out.write_text(json.dumps({"device": "NVIDIA H200 (rates measured, times computed)", **facts, "rows": rows}) + "\n")
    for row in rows:
        at_most, once = row["int4_fused_speedup_at_most"], row["int4_dequantize_once_speedup"]
        print(f"{row['layer']:12} {row['tokens']:5} tokens: fused at most {at_most:5} x bf16, dequantize once {once} x")


def _rounded(value):  # type: ignore[no-untyped-def]
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
