"""Prediction of how long a conversion takes here: what it multiplies and passes over, at speeds measured on the spot.

Good for a factor of about two. While the job runs, the time left is counted from the blocks that are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import SIGN_STEP_TOKENS, TOKENS, WINDOWS
from quantkit.model.language import text_config
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.skeleton import Blocks, block_linears
from quantkit.model.twin.shrink import CHOSEN
from quantkit.runtime.kernels.numba import threads

# What stages take beside products, in passes over a weight (``Speed.pass_seconds``), estimated from profiles
# of Qwen2.5-Coder-1.5B, and compared with conversions of SmolLM2-135M: docs/log.md has the runs.
READ_AND_WRITE = 200  # unpack, check, encode, hash, write, read back
FOLDS = 100  # experiments that find what scales what
SEARCH, SEARCH_BY_TORCH = 90, 900  # of ranges, compiled and not
BLOCK_SEARCH, BLOCK_SEARCH_BY_TORCH = 700, 8000  # of scales for GGUF's blocks
BEGIN = 10.0  # seconds: libraries, tokenizer, the sample at the end
# products that solving takes, in out x in x in: GPTQ's loops over columns and refining, AWQ's trials, the report; and
# in x in x in: the factor of a Hessian
SOLVE, AWQ_SOLVE, REPORT, FACTORISE, AWQ_ROWS = 12.0, 4.0, 2.0, 1.2, 22 * 512
REPORTED = 128  # inputs that a report looks at, where inputs themselves are kept
FORWARD_AND_BACK, STEP = 4, 4  # runs of a block that a pass with gradients takes, and a step of learning


@dataclass(frozen=True)
class Speed:
    """What this machine does, measured in a tenth of a second.

    products: multiply-adds a second, of matrices as large as a batch's.
    pass_seconds: seconds of one pass over a weight that lies in the cache.
    """

    products: float
    pass_seconds: float


@dataclass(frozen=True)
class Work:
    """What a conversion does: multiply-adds, and passes over its weights (their number times the passes)."""

    products: float
    passes: float

    def seconds(self, speed: Speed) -> float:
        """Return how long that takes at a speed."""
        return BEGIN + self.products / speed.products + self.passes * speed.pass_seconds


@lru_cache(maxsize=4)
def measure_speed(device: torch.device, precision: str = "float32") -> Speed:
    """Measure the speed of a device, once in a process; products in bf16 if the model runs in it (``precision``)."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left, right = (torch.ones(rows, 1536, device=device, dtype=dtype) for rows in (512, 1536))
    vector = torch.ones(1 << 18, device=device)

    def seconds(work: Callable[[], Any], times: int) -> float:
        work()
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        _wait(device)
        return (time.perf_counter() - began) / times

    with torch.no_grad():
        product = seconds(lambda: left @ right, 4)
        sweep = seconds(lambda: vector.mul_(1.0), 50)
    return Speed(512 * 1536 * 1536 / product, sweep / vector.numel())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_work(
    options: ConvertOptions, model: Any, blocks: Blocks, targets: Mapping[str, Target], inputs: Inputs
) -> Work:
    """Count what a conversion does, from shapes alone.

    options, targets, inputs: of the plan.
    model: the skeleton.
    blocks: its decoder blocks.
    """
    config = text_config(model)
    calibration = inputs.calibration
    tokens = 0 if calibration is None else calibration.ids.numel()
    window = 1 if calibration is None else calibration.ids.shape[-1]
    products, every = 0.0, 0.0
    for index, block in enumerate(blocks.modules):
        shapes = _shapes(block, config, blocks.name(index), targets)
        run = sum(share * out * width for out, width, share in shapes) + 2 * window * config.hidden_size
        every += run
        products += (1.7 + options.paired) * tokens * run  # the first pass ends before the last linear
        products += _solving(options, shapes, tokens)
        if options.method == "tune":
            products += STEP * options.tune_steps * max(SIGN_STEP_TOKENS, window) * run
    if options.method == "tune" or options.guided or options.allocates:
        products += FORWARD_AND_BACK * WINDOWS * TOKENS * every
    if inputs.distil is not None:
        products += (1 + FORWARD_AND_BACK) * inputs.distil.ids.numel() * every
    weights = sum(target.out_features * target.in_features for target in targets.values())
    searched = options.scales == "search"
    compiled = threads.available()
    if options.gguf_type is None:
        search = (SEARCH if compiled else SEARCH_BY_TORCH) if searched else 0
    else:  # gptq searches with error feedback and without
        search = (BLOCK_SEARCH if compiled else BLOCK_SEARCH_BY_TORCH) * (2 if options.method == "gptq" else 1)
    return Work(products, weights * (READ_AND_WRITE + options.folds * FOLDS + search))


def _shapes(block: nn.Module, config: Any, prefix: str, targets: Mapping[str, Target]) -> list[tuple[int, int, float]]:
    """Return ``(out, in, share)`` of every linear to quantize: the share of tokens that reach it."""
    experts = expert_linears(block)
    chosen = next((int(n) for name in CHOSEN if isinstance(n := getattr(config, name, None), int)), 0)
    count = max((index for _, index in experts.values()), default=0) + 1
    share = min(1.0, chosen / count) if chosen else 1.0
    return [
        (linear.out_features, linear.in_features, share if name in experts else 1.0)
        for name, linear in block_linears(block).items()
        if f"{prefix}.{name}" in targets
    ]


def _solving(options: ConvertOptions, shapes: list[tuple[int, int, float]], tokens: int) -> float:
    """Return the products of statistics, solving and the report of one block."""
    inputs = {(width, out, share) for out, width, share in shapes}  # one of each shape: they mostly read the same
    if not tokens:
        return 0.0
    if not options.correlations:  # the inputs themselves, where they are few
        return sum(REPORT * out * width * min(width, REPORTED, share * tokens) for out, width, share in shapes)
    found = sum((0.6 + options.crossed) * share * tokens * width**2 for width, _, share in inputs)
    found += sum(REPORT * out * width**2 for out, width, _ in shapes)
    if options.method in ("gptq", "tune"):
        found += sum(FACTORISE * width**3 for width, _, _ in inputs) + sum(SOLVE * o * w**2 for o, w, _ in shapes)
    if options.method == "awq" or options.folds:
        found += sum(AWQ_ROWS * width**2 for width, _, _ in inputs)
    if options.method == "awq":
        found += sum(AWQ_SOLVE * o * w**2 for o, w, _ in shapes)
    return float(found)
