"""The block stage: every linear gets what its algorithm, called by hand, gives for its weight and statistics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import Layer, first_block, groups_of, targets_of
from torch import Tensor

from quantkit.algorithms.awq import awq
from quantkit.algorithms.gptq import GPTQOptions, Loops, gptq
from quantkit.algorithms.hqq import hqq
from quantkit.algorithms.rtn import rtn
from quantkit.algorithms.tune import block_error
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.results import BlockResult, InputGroup, decision_sha256
from quantkit.convert.stages.block import Solver, quantize_block
from quantkit.convert.stages.tune import TuneInputs
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError
from quantkit.formats import writer_format
from quantkit.model.stepper import run_block

PREFIX = "model.layers.0"
W4, W8 = Scheme(4, 16, False), Scheme(8, 16, False)
NATIVE = writer_format("native")


def solver(layer: Layer, method: str, left_out: str = "", **options: Any) -> Solver:
    """Four bits for every linear but v_proj, which gets eight, and the one that is left out."""
    targets = targets_of(layer, W4)
    values = f"{PREFIX}.self_attn.v_proj"
    targets[values] = replace(targets[values], scheme=W8)
    targets.pop(f"{PREFIX}.{left_out}", None)
    asked = ConvertOptions(source="model", out=Path("out"), method=method, group_size=16, **options)
    return Solver(options=asked, format=NATIVE, targets=targets, loops=Loops())


def by_hand(method: str, weight: Tensor, hessian: Tensor, scheme: Scheme) -> QuantTensor:
    """One linear alone: rows do not know of each other, so stacking them with others must not matter."""
    if method == "gptq":
        return gptq(weight, hessian, scheme, GPTQOptions(damping=0.01, scales="search"), Loops()).quantized
    if method == "awq":
        return awq(weight, hessian, scheme, "search", 0.01).quantized
    if method == "hqq":
        return hqq(weight, scheme, "search", hessian.diagonal()).quantized
    return rtn(weight, scheme, "search").quantized


@pytest.mark.parametrize("method", ["rtn", "hqq", "gptq", "awq"])
def test_each_linear_becomes_what_its_algorithm_makes_of_it_alone(method: str) -> None:
    layer, result = first_block(), BlockResult()
    groups = groups_of(layer)
    of = solver(layer, method, left_out="self_attn.o_proj")
    before = {name: parameter.clone() for name, parameter in layer.block.named_parameters()}
    quantize_block(of, PREFIX, layer.block, groups, result)
    reports = {report.name: report for report in result.layers}
    assert set(reports) == set(of.targets) == set(result.digests)
    for group in groups:
        for name in group.names:
            after, weight = layer.block.get_parameter(f"{name}.weight"), before[f"{name}.weight"]
            if name == "self_attn.o_proj":
                assert torch.equal(after, weight)
                continue
            assert group.hessian is not None
            full = f"{PREFIX}.{name}"
            expected = by_hand(method, weight, group.hessian, of.targets[full].scheme)
            assert torch.equal(after, expected.dequantize()), name
            parts = {part: result.parts[f"{full}.{part}"] for part in NATIVE.encode(expected)}
            stored = NATIVE.decode(parts, expected.scheme)
            assert decision_sha256(stored) == decision_sha256(expected) == result.digests[full]
            error, h = (weight - after).double(), group.hessian
            relative = (
                torch.trace(error @ h @ error.t()) / torch.trace(weight.double() @ h @ weight.double().t())
            ).sqrt()
            assert reports[full].relative_output_error == pytest.approx(float(relative), rel=1e-3)
            assert reports[full].relative_weight_error == pytest.approx(float(error.norm() / weight.norm()), rel=1e-4)
            assert (reports[full].tokens, reports[full].weights) == (group.tokens, weight.numel())
    assert torch.equal(layer.block.get_parameter("input_layernorm.weight"), before["input_layernorm.weight"])


def test_a_linear_that_no_token_reached_is_rounded_and_the_report_says_so() -> None:
    layer, result = first_block(), BlockResult()
    weight = layer.block.get_parameter("mlp.down_proj.weight").clone()
    quantize_block(solver(layer, "gptq"), PREFIX, layer.block, [InputGroup(("mlp.down_proj",))], result)
    (report,) = result.layers
    assert report.fallback == "rounded: no calibration token reached this layer"
    assert report.relative_output_error is None
    assert torch.equal(
        layer.block.get_parameter("mlp.down_proj.weight"), rtn(weight, W4, "search").quantized.dequantize()
    )


def test_damping_that_had_to_be_raised_is_noted() -> None:
    layer, result = first_block(), BlockResult()
    hessian = torch.ones(64, 64, dtype=torch.float64) - 0.01 * torch.eye(64)  # eigenvalues below 0, as sums may give
    group = InputGroup(("mlp.down_proj",), hessian, 1)
    quantize_block(solver(layer, "gptq", damping=1e-12), PREFIX, layer.block, [group], result)
    (report,) = result.layers
    assert report.damping is not None
    assert report.damping > 1e-12
    (note,) = result.notes
    assert note.startswith(f"{PREFIX}.mlp.down_proj: damping raised from 1e-12 to {report.damping:g}")


def test_a_weight_that_cannot_be_quantized_is_named() -> None:
    layer = first_block()
    with torch.no_grad():
        layer.block.get_parameter("mlp.up_proj.weight")[3, 5] = 1e9  # its scale is larger than any float16
    with pytest.raises(NumericsError, match=r"^model\.layers\.0\.mlp\."):
        quantize_block(solver(layer, "rtn"), PREFIX, layer.block, groups_of(layer), BlockResult())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    layer = first_block()
    with torch.no_grad():
        layer.block.get_parameter("mlp.up_proj.weight")[3, 5] = value
    with pytest.raises(NumericsError, match=r"^model\.layers\.0\.mlp\.up_proj: the weight holds NaN or infinite"):
        quantize_block(solver(layer, "rtn"), PREFIX, layer.block, groups_of(layer), BlockResult())


def test_int8_activations_are_rounded_in_front_of_the_quantized_linears_only() -> None:
    layer = first_block()
    of = solver(layer, "rtn", left_out="mlp.down_proj")
    targets = {name: replace(one, scheme=replace(W8, group_size=None, symmetric=True, activations="int8"))
               for name, one in of.targets.items()}  # fmt: skip
    quantize_block(replace(of, targets=targets), PREFIX, layer.block, groups_of(layer), BlockResult())
    up, down = layer.block.get_submodule("mlp.up_proj"), layer.block.get_submodule("mlp.down_proj")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    step = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / step).round().clamp(-127, 127) * step
    torch.testing.assert_close(up(x), rounded @ up.weight.t(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(up(x), x @ up.weight.t(), rtol=1e-4, atol=1e-5)
    y = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(down(y), y @ down.weight.t())


def test_a_tuned_block_is_nearer_to_the_original_than_an_untuned_one() -> None:
    """On the windows that nothing was learned from; measured here, with the blocks' own forward."""
    original = first_block()
    targets = [run_block(original.block, window, original.single) for window in original.states.split(1)]
    channels = 0.5 + torch.rand(32, generator=torch.Generator().manual_seed(5))
    errors, results = [], []
    for learns in (False, True):
        layer, result = first_block(), BlockResult()
        inputs = TuneInputs([layer.states], [torch.cat(targets)], channels, layer.single)
        of = solver(layer, "tune", tune_steps=40)
        quantize_block(of, PREFIX, layer.block, groups_of(layer), result, inputs if learns else None)
        held = [
            block_error(run_block(layer.block, layer.states[index : index + 1], layer.single), targets[index], channels)
            for index in (0, 8)
        ]
        errors.append(float(sum(held)) / len(held))
        results.append(result)
    assert not results[0].tuning
    facts = results[1].tuning[PREFIX]
    assert errors == pytest.approx([facts["before"], facts["after"]], rel=1e-4)
    assert errors[1] < errors[0]
    assert 0 < facts["step"] <= 40
    assert results[1].digests.keys() == results[0].digests.keys()
    assert results[1].digests != results[0].digests
