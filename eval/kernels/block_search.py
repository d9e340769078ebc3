#!/usr/bin/env python3
"""Time the search for scales of GGUF's block formats, compiled and in torch, side by side on random weights.

    python eval/kernels/block_search.py --out eval/results/block_search.json

Nanoseconds a weight, the least of some rounds, in as many threads as torch uses (OMP_NUM_THREADS).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import quantkit  # noqa: F401  (offers the compiled twins)
from quantkit.algorithms.kquant import kquant
from quantkit.core import compiled
from quantkit.core.blocks import KINDS
from quantkit.evaluate.environment import hardware, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512)
    args = parser.parse_args()
    weight = torch.randn(args.rows, 1536, generator=torch.Generator().manual_seed(0))
    rows = {}
    for kind in KINDS.values():
        kquant(weight[:8], kind)  # compiles

        def nanoseconds(quick: bool = False) -> float:
            began = time.perf_counter()
            kquant(weight, kind, quick=quick)  # noqa: B023  (called in this round only)
            return (time.perf_counter() - began) * 1e9 / weight.numel()

        found: dict[str, list[float]] = {"compiled": [], "compiled, quick": [], "torch": []}
        for _ in range(args.rounds):
            found["compiled"].append(nanoseconds())
            found["compiled, quick"].append(nanoseconds(quick=True))
            with by_torch():
                found["torch"].append(nanoseconds())
        rows[kind.name] = {name: round(min(seen), 1) for name, seen in found.items()}
        print(kind.name, rows[kind.name], flush=True)
    about = {"unit": "ns a weight", "shape": list(weight.shape), "hardware": hardware(), "versions": versions()}
    data = {**about, "rows": rows}
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@contextmanager
def by_torch() -> Iterator[None]:
    """Inside: no compiled twin is found."""
    before = compiled._offered
    compiled._offered = {}
    try:
        yield
    finally:
        compiled._offered = before


if __name__ == "__main__":
    main()
