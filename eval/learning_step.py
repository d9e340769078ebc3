"""What a step of `--method tune` takes in float32 and with `--matmul-precision bf16`, side by side.

Measured on one block of a model, 2,048 tokens a step.

    python eval/learning_step.py MODEL [--threads 1]    # writes eval/results/learning_step.json

The two modes take turns; the ratio is of their fastest runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from quantkit.algorithms.rtn import rtn
from quantkit.algorithms.tune import TuneOptions, tune
from quantkit.calibrate.matmul_precision import matmul_precision, model_runs
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan
from quantkit.convert.stages.embed import embed
from quantkit.core.precision import cpu_has_amx, exact_products
from quantkit.core.scheme import Scheme
from quantkit.evaluate.environment import hardware, versions
from quantkit.model.stepper import forward_block, given, run_block

OUT = Path(__file__).parent / "results" / "learning_step.json"
STEPS, ROUNDS = 4, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    plan = make_plan(
        ConvertOptions(asked.model, Path("unused"), method="tune", group_size=64, samples=18, seq_len=1024)
    )
    assert plan.inputs.calibration is not None
    cpu = torch.device("cpu")
    found = embed(plan.model, plan.blocks, plan.weights, plan.inputs.calibration.ids, cpu, None)
    plan.weights.load(plan.blocks.name(0), cpu)
    block, call = plan.blocks.modules[0], found.single[0]
    inputs = [window for state in found.states for window in state.split(1)]
    targets = [run_block(block, x, call) for x in inputs]
    weights = {name.removesuffix(".weight"): p.detach() for name, p in block.named_parameters() if p.dim() == 2}
    start = {name: rtn(weight, Scheme(4, 64, False)).quantized for name, weight in weights.items()}

    def forward(values: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        with given(block, {f"{name}.weight": value for name, value in values.items()}):
            return forward_block(block, hidden, call)

    def seconds(mode: str, steps: int) -> float:
        begun = time.perf_counter()
        with exact_products(), matmul_precision(mode), model_runs(cpu):
            tune(forward, weights, start, inputs, targets, TuneOptions(steps=steps, checks=1))  # type: ignore[arg-type]
        return time.perf_counter() - begun

    fastest = {(mode, steps): float("inf") for mode in ("float32", "bf16") for steps in (1 + STEPS, 1)}
    for _ in range(ROUNDS):
        for mode, steps in fastest:
            fastest[mode, steps] = min(fastest[mode, steps], seconds(mode, steps))
    # what is before and behind the steps is taken off
    best = {mode: (fastest[mode, 1 + STEPS] - fastest[mode, 1]) / STEPS for mode in ("float32", "bf16")}
    result = {
        "model": Path(asked.model).name, "block": 0, "tokens": 2048, "threads": asked.threads, "amx": cpu_has_amx(),
        "seconds": {mode: round(value, 4) for mode, value in best.items()},
        "bf16_over_float32": round(best["bf16"] / best["float32"], 3),
        "hardware": hardware(), "versions": versions(),
    }  # fmt: skip
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
