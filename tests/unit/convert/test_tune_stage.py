"""The learning stage: what it hands to ``tune``, and that the errors it tells are those of the block's own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stage_models import Layer, first_block, groups_of
from torch import Tensor, nn

from quantkit.algorithms.rtn import rtn
from quantkit.algorithms.tune import block_error
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.stages.tune import TuneInputs, tune_block
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.model.stepper import run_block

OPTIONS = ConvertOptions(source="model", out=Path("out"), method="tune", group_size=16, tune_steps=24)
CHANNELS = 0.5 + torch.rand(32, generator=torch.Generator().manual_seed(5))
HELD = (0, 8)  # of nine windows


def start_of(layer: Layer) -> dict[str, QuantTensor]:
    return {
        name: rtn(layer.block.get_parameter(f"{name}.weight"), Scheme(3, 16, False), "search").quantized
        for group in groups_of(layer)
        for name in group.names
    }


def inputs_of(layer: Layer, sizes: tuple[int, ...] = (9,)) -> tuple[TuneInputs, list[Tensor]]:
    """The windows in batches of some sizes, and what the unrounded block makes of each."""
    targets = [run_block(layer.block, window, layer.single) for window in layer.states.split(1)]
    states, outputs = layer.states.split(list(sizes)), torch.cat(targets).split(list(sizes))
    return TuneInputs(states, outputs, CHANNELS, layer.single), targets


def error_with(layer: Layer, quantized: dict[str, QuantTensor], targets: list[Tensor]) -> float:
    """On the windows held back, the weights written into a block for good."""
    other = first_block()
    for name, q in quantized.items():
        other.block.get_submodule(name).weight = nn.Parameter(q.dequantize(), requires_grad=False)
    errors = [
        block_error(run_block(other.block, layer.states[i : i + 1], layer.single), targets[i], CHANNELS) for i in HELD
    ]
    return float(sum(errors)) / len(errors)


def test_the_errors_before_and_after_are_those_of_a_block_with_these_weights() -> None:
    layer = first_block()
    before = {name: value.clone() for name, value in layer.block.named_parameters()}
    start, (inputs, targets) = start_of(layer), inputs_of(layer)
    tuned = tune_block(OPTIONS, layer.block, start, inputs)
    assert tuned.trouble is None
    assert tuned.before == pytest.approx(error_with(layer, start, targets), rel=1e-5)
    assert tuned.after == pytest.approx(error_with(layer, tuned.quantized, targets), rel=1e-5)
    assert tuned.after < 0.9 * tuned.before  # three bits: much is to be won
    assert 0 < tuned.step <= OPTIONS.tune_steps
    for name, value in layer.block.named_parameters():  # the block is as it was
        assert torch.equal(value, before[name]), name


def test_how_windows_lie_in_batches_changes_nothing() -> None:
    layer = first_block()
    start = start_of(layer)
    whole, split = (tune_block(OPTIONS, layer.block, start, inputs_of(layer, sizes)[0]) for sizes in ((9,), (1, 5, 3)))
    assert (whole.before, whole.after, whole.step) == (split.before, split.after, split.step)
    for name, q in whole.quantized.items():
        assert torch.equal(q.codes, split.quantized[name].codes)
        assert torch.equal(q.scales, split.quantized[name].scales)


def test_one_window_is_not_enough_to_learn_from_and_what_was_given_stands() -> None:
    layer = first_block()
    start, (inputs, _) = start_of(layer), inputs_of(layer)
    single = TuneInputs([inputs.inputs[0][:1]], [inputs.targets[0][:1]], CHANNELS, layer.single)
    tuned = tune_block(OPTIONS, layer.block, start, single)
    assert tuned.trouble == "1 windows of text can be used, and one is held back: nothing to learn from"
    assert tuned.quantized == start
    assert tuned.step == 0
