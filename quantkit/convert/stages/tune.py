"""The learning stage of the loop: all linears of a solved block together, until its output is the original block's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.algorithms.tune import Tuned, TuneOptions, tune
from quantkit.calibrate.matmul_precision import model_runs
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.results import SIGN_STEP_TOKENS
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.activations import straight_through
from quantkit.model.arguments import BlockArguments
from quantkit.model.stepper import forward_block, given, gradients_in_order


@dataclass(frozen=True)
class TuneInputs:
    """What a block learns from: batches float32 ``[windows, tokens, hidden]``, on the host.

    inputs: states in front of the block, behind the quantized blocks.
    targets: the original model's states behind the block.
    channels: float32 [hidden], importance of each channel of the block's output.
    call: its arguments for one window.
    """

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    channels: Tensor
    call: BlockArguments


def tune_block(
    options: ConvertOptions, block: nn.Module, start: Mapping[str, QuantTensor], learn_from: TuneInputs
) -> Tuned:
    """Learn codes and scales of a block's linears.

    options: number of steps and seed.
    block: unrounded float32 weights on the device.
    start: the solution of each linear to start from, by name inside the block.
    learn_from: states in front of and behind the block.
    """

    rounding = {
        name: block.get_submodule(name).register_forward_pre_hook(straight_through(q.scheme))
        for name, q in start.items()
        if q.scheme.activations is not None
    }

    def forward(weights: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        with given(block, {f"{name}.weight": weight for name, weight in weights.items()}):
            return forward_block(block, hidden, learn_from.call)

    weights = {name: block.get_parameter(f"{name}.weight") for name in start}
    windows = max(1, SIGN_STEP_TOKENS // learn_from.inputs[0].shape[1])
    device = next(iter(weights.values())).device
    try:
        with model_runs(device), gradients_in_order(device):
            return tune(
                forward,
                weights,
                start,
                _windows(learn_from.inputs),
                _windows(learn_from.targets),
                TuneOptions(steps=options.tune_steps, windows=windows, seed=options.seed),
                learn_from.channels.to(device),
            )
    finally:
        for handle in rounding.values():
            handle.remove()


def _windows(states: Sequence[Tensor]) -> list[Tensor]:
    """Split states into windows ``[1, tokens, hidden]``, without copying."""
    return [window for state in states for window in torch.split(state, 1)]
