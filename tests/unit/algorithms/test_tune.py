"""Learned rounding, on blocks small enough to know the best answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.rtn import rtn
from quantkit.algorithms.tune import TuneOptions, block_error, tune
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme

SCHEME = Scheme(4, 8, False)


def windows(count: int, tokens: int, width: int, seed: int = 0) -> list[Tensor]:
    """Correlated inputs, a window each."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator) / width**0.5
    return [torch.randn(1, tokens, width, generator=generator) @ mix for _ in range(count)]


def linear(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x @ weights["w"].t()


def beside_others(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """One output beside large ones that nothing changes: every token then counts alike."""
    return torch.cat([linear(weights, x), torch.full_like(x[..., :1], 10.0)], dim=-1)


def gated(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x + (torch.sigmoid(x @ weights["gate"].t()) * (x @ weights["up"].t())) @ weights["down"].t()


def gated_case() -> tuple[dict[str, Tensor], dict[str, QuantTensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    shapes = {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}
    weights = {name: torch.randn(shape) / 4 for name, shape in shapes.items()}
    start = {name: rtn(weight, Scheme(3, 8, name != "up")).quantized for name, weight in weights.items()}
    x = windows(17, 32, 16)
    return weights, start, x, [gated(weights, one) for one in x]


def test_codes_that_are_off_by_one_are_all_found() -> None:
    torch.manual_seed(1)
    codes = torch.randint(1, 15, (6, 16), dtype=torch.uint8)
    scales, zeros = torch.full((6, 2), 0.125, dtype=torch.float16), torch.full((6, 2), 7, dtype=torch.int16)
    true = QuantTensor(codes, scales, zeros, SCHEME)
    moved = (codes.int() + torch.randint(-1, 2, codes.shape)).to(torch.uint8)
    assert int((moved != codes).sum()) > 40
    x = windows(16, 64, 16)
    weight = true.dequantize()
    found = tune(
        linear,
        {"w": weight},
        {"w": QuantTensor(moved, scales, zeros, SCHEME)},
        x,
        [one @ weight.t() for one in x],
        TuneOptions(scale_rate=0),
    )
    assert torch.equal(found.quantized["w"].codes, codes)
    assert found.before > 1e-3
    assert found.after < 1e-10
    assert found.trouble is None


@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_was_rounded_down_is_rounded_nearly_as_well_as_any_other_choice(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(1, 8) / 3
    nearest = rtn(weight, Scheme(3, None, False)).quantized
    assert nearest.zeros is not None
    exact = weight / nearest.scales.float() + nearest.zeros
    x = windows(16, 128, 8, seed)
    y = [beside_others({"w": weight}, one) for one in x]

    def rounded(up: tuple[int, ...]) -> QuantTensor:
        codes = (exact.floor() + torch.tensor(up)).clamp(0, 7).to(torch.uint8)
        return QuantTensor(codes, nearest.scales, nearest.zeros, nearest.scheme)

    def error(q: QuantTensor) -> float:
        now = {"w": q.dequantize()}
        return (
            sum(float(block_error(beside_others(now, one), two)) for one, two in zip(x[::8], y[::8], strict=True)) / 2
        )

    errors = sorted(error(rounded(up)) for up in itertools.product((0, 1), repeat=8))
    found = tune(beside_others, {"w": weight}, {"w": rounded((0,) * 8)}, x, y, TuneOptions(scale_rate=0, checks=20))
    assert found.before > errors[8]
    assert error(found.quantized["w"]) <= errors[8]  # of 256


def test_scales_learn_where_codes_may_not_move() -> None:
    torch.manual_seed(2)
    weight = torch.randn(4, 16)
    exact = rtn(weight, SCHEME).quantized
    wide = QuantTensor(exact.codes, (exact.scales.float() * 1.04).half(), exact.zeros, SCHEME)
    x = windows(16, 32, 16)
    true = exact.dequantize()
    found = tune(linear, {"w": true}, {"w": wide}, x, [one @ true.t() for one in x], TuneOptions(reach=0.0))
    assert torch.equal(found.quantized["w"].codes, exact.codes)
    assert found.quantized["w"].scales.dtype == torch.float16
    assert found.after < 0.5 * found.before


def test_what_was_measured_is_what_is_returned() -> None:
    weights, start, x, y = gated_case()
    before = {name: q.codes.clone() for name, q in start.items()}
    found = tune(gated, weights, start, x, y)
    assert found.after < 0.9 * found.before
    assert found.step > 0
    assert found.before == pytest.approx(held_error(start, x, y), rel=1e-5)
    assert found.after == pytest.approx(held_error(found.quantized, x, y), rel=1e-5)
    for name, q in found.quantized.items():
        assert q.scheme == start[name].scheme
        assert int(q.codes.max()) <= 7
        assert torch.equal(start[name].codes, before[name])  # inputs are not modified
    up, first = found.quantized["up"], start["up"]
    assert up.zeros is not None
    assert first.zeros is not None
    assert torch.equal(up.zeros, first.zeros)


def test_a_start_that_cannot_be_bettered_is_kept() -> None:
    weights, start, x, _ = gated_case()
    rounded = {name: q.dequantize() for name, q in start.items()}
    found = tune(gated, weights, start, x, [gated(rounded, one) for one in x])
    assert found.step == 0
    assert found.after == found.before == 0
    assert all(found.quantized[name] is q for name, q in start.items())
    assert found.trouble is None


def held_error(found: Mapping[str, QuantTensor], x: list[Tensor], y: list[Tensor]) -> float:
    """``block_error`` of the gated block on the windows that are held back of 17."""
    rounded = {name: q.dequantize() for name, q in found.items()}
    return sum(float(block_error(gated(rounded, x[i]), y[i])) for i in (0, 8, 16)) / 3


def test_learning_noise_does_not_make_the_block_worse_on_text_held_back() -> None:
    """What is learned from is noise, what judges is not: any step away from the start does harm."""
    weights, start, x, y = gated_case()
    noise = windows(17, 32, 16, seed=9)
    mixed = [one if i in (0, 8, 16) else other for i, (one, other) in enumerate(zip(y, noise, strict=True))]
    found = tune(gated, weights, start, x, mixed, TuneOptions(steps=12, scale_rate=0.1))
    assert held_error(found.quantized, x, y) == pytest.approx(held_error(start, x, y), rel=1e-6)
    assert found.before == found.after == pytest.approx(held_error(start, x, y), rel=1e-5)
    assert found.step == 0


def test_channels_that_count_more_are_learned_better() -> None:
    weights, start, x, y = gated_case()
    channels = torch.cat([torch.full((4,), 3.7), torch.full((12,), 0.1)])
    even = tune(gated, weights, start, x, y, TuneOptions(steps=60))
    uneven = tune(gated, weights, start, x, y, TuneOptions(steps=60), channels)

    def error(found: Mapping[str, QuantTensor], count: Tensor) -> float:
        rounded = {name: q.dequantize() for name, q in found.items()}
        return sum(float(block_error(gated(rounded, x[i]), y[i], count)) for i in (0, 8, 16)) / 3

    assert uneven.after == pytest.approx(error(uneven.quantized, channels))
    assert uneven.after < 0.95 * error(even.quantized, channels)
    others = (channels < 1).float()
    assert error(uneven.quantized, others) > 1.05 * error(even.quantized, others)


def test_the_same_again_gives_the_same_codes() -> None:
    weights, start, x, y = gated_case()
    first, second, other = (tune(gated, weights, start, x, y, TuneOptions(steps=30, seed=seed)) for seed in (0, 0, 1))
    for name, q in first.quantized.items():
        assert torch.equal(q.codes, second.quantized[name].codes)
        assert torch.equal(q.scales, second.quantized[name].scales)
    assert any(not torch.equal(q.codes, other.quantized[name].codes) for name, q in first.quantized.items())


def test_windows_that_are_not_finite_are_left_out() -> None:
    weights, start, x, y = gated_case()
    clean = tune(gated, weights, start, x[2:], y[2:], TuneOptions(steps=40))
    x[0], y[1] = x[0] * float("nan"), y[1] + float("inf")
    dirty = tune(gated, weights, start, x, y, TuneOptions(steps=40))
    assert dirty.after == clean.after < clean.before


def test_one_window_teaches_nothing() -> None:
    weights, start, x, y = gated_case()
    found = tune(gated, weights, start, x[:1], y[:1])
    assert found.trouble is not None
    assert "nothing to learn from" in found.trouble
    assert all(found.quantized[name] is q for name, q in start.items())


def test_windows_held_back_that_overflow_are_said_to_be_why_nothing_was_learned() -> None:
    inputs = windows(9, 8, 8)
    weights = {"w": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))}
    targets = [linear(weights, x) for x in inputs]
    inputs[0] = inputs[0] * 1e30  # held back; its output's square is no float32

    found = tune(linear, weights, {"w": rtn(weights["w"], SCHEME).quantized}, inputs, targets, TuneOptions(steps=4))
    assert found.trouble == "the block's error is not finite on the windows held back"
    assert found.step == 0


def test_an_error_that_is_not_finite_ends_learning_with_the_best_so_far() -> None:
    weights, start, x, y = gated_case()
    calls = []

    def breaks(now: Mapping[str, Tensor], one: Tensor) -> Tensor:
        calls.append(1)
        return gated(now, one) * (float("nan") if len(calls) > 110 else 1.0)

    found = tune(breaks, weights, start, x, y)
    assert found.trouble is not None
    assert "learning ended at step 50: the block's error is not finite" in found.trouble
    assert found.step in (15, 30, 45)  # the looks before: 3 windows at the start and at each look, 2 a step
    assert found.after == pytest.approx(held_error(found.quantized, x, y), rel=1e-5)
    assert found.after < 0.98 * held_error(start, x, y)


def test_permuting_outputs_of_linears_permutes_their_codes_and_scales() -> None:
    """The block puts its hidden channels and its output back in order, in float64: nothing else has changed."""
    weights, start, x, y = gated_case()
    shuffled = {name: torch.randperm(len(weight)) for name, weight in weights.items()}
    shuffled["up"] = shuffled["gate"]

    def permuted(now: Mapping[str, Tensor], one: Tensor) -> Tensor:
        back = {name: weight.double()[shuffled[name].argsort()] for name, weight in now.items()}
        return gated(back, one.double())

    def plain(now: Mapping[str, Tensor], one: Tensor) -> Tensor:
        return gated({name: weight.double() for name, weight in now.items()}, one.double())

    def rows(q: QuantTensor, order: Tensor) -> QuantTensor:
        return QuantTensor(q.codes[order], q.scales[order], None if q.zeros is None else q.zeros[order], q.scheme)

    first = tune(plain, weights, start, x, y, TuneOptions(steps=30))
    second = tune(
        permuted,
        {name: weight[shuffled[name]] for name, weight in weights.items()},
        {name: rows(q, shuffled[name]) for name, q in start.items()},
        x, y, TuneOptions(steps=30),
    )  # fmt: skip
    assert first.step > 0
    for name, q in first.quantized.items():
        assert not torch.equal(q.codes, start[name].codes)
        assert second.quantized[name].equal(rows(q, shuffled[name]))


def test_the_order_of_names_decides_nothing() -> None:
    weights, start, x, y = gated_case()
    first = tune(gated, weights, start, x, y, TuneOptions(steps=30))
    backwards = {name: start[name] for name in reversed(start)}
    second = tune(gated, weights, backwards, x, y, TuneOptions(steps=30))
    assert first.after == second.after < first.before
    assert all(second.quantized[name].equal(q) for name, q in first.quantized.items())
