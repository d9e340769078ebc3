"""The Hessian accumulator."""

import pytest
import torch

from quantkit.calibrate.stats import Hessian, InputRoot
from quantkit.errors import NumericsError


@pytest.mark.parametrize("width", [5, 300, 1030])
def test_result_is_the_mean_outer_product(width: int) -> None:
    x = torch.randn(3, 50, width, generator=torch.Generator().manual_seed(0))
    h = Hessian(width)
    h.add(x)
    rows = x.reshape(-1, width).double()
    torch.testing.assert_close(h.result(), rows.t() @ rows / 150, rtol=1e-5, atol=1e-5)
    assert torch.equal(h.result(), h.result().t())


def test_adding_halves_equals_adding_the_whole() -> None:
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    whole, halves = Hessian(20), Hessian(20)
    whole.add(x)
    halves.add(x[:30])
    halves.add(x[30:])
    torch.testing.assert_close(whole.result(), halves.result(), rtol=1e-6, atol=1e-6)
    assert halves.tokens == 64


def test_non_finite_tokens_are_dropped_and_counted() -> None:
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(2))
    clean, dirty = Hessian(8), Hessian(8)
    clean.add(torch.cat([x[:3], x[5:]]))
    x[3, 1], x[4, 7] = float("nan"), float("inf")
    dirty.add(x)
    assert dirty.dropped == 2
    torch.testing.assert_close(clean.result(), dirty.result(), rtol=1e-6, atol=1e-6)


def test_a_token_whose_square_overflows_is_dropped() -> None:
    h = Hessian(4)
    h.add(torch.tensor([[1.0, 1, 1, 1], [1e25, 1, 1, 1], [3e16, 1, 1, 1]]))
    assert (h.tokens, h.dropped) == (2, 1)
    assert bool(torch.isfinite(h.result("x") if h.tokens > 9 else h.sum).all())


def test_too_many_non_finite_tokens_stop_the_job_naming_the_layer() -> None:
    x = torch.ones(10, 4)
    x[:2] = float("nan")
    h = Hessian(4)
    h.add(x)
    with pytest.raises(NumericsError, match=r"model\.layers\.7.*2 of 10"):
        h.result("model.layers.7")


def test_a_layer_without_data_is_named() -> None:
    with pytest.raises(NumericsError, match="lonely"):
        Hessian(4).result("lonely")


def test_the_cross_moment_is_the_mean_of_what_is_missing_times_what_is_there() -> None:
    x, y = torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(3))
    h = Hessian(6)
    h.add(x[:15], y[:15])
    h.add(x[15:], y[15:])
    assert h.cross is not None
    torch.testing.assert_close(h.cross / 40, (y - x).double().t() @ x.double() / 40, rtol=1e-5, atol=1e-6)
    same = Hessian(6)
    same.add(x, x)
    assert same.cross is not None
    assert not bool(same.cross.any())


def test_a_token_is_dropped_where_the_original_is_not_finite_either() -> None:
    x, y = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(4))
    clean, dirty = Hessian(4), Hessian(4)
    clean.add(x[2:], y[2:])
    y[0, 1], x[1, 2] = float("inf"), float("nan")
    dirty.add(x, y)
    assert (dirty.tokens, dirty.dropped) == (28, 2)
    torch.testing.assert_close(dirty.cross, clean.cross)
    torch.testing.assert_close(dirty.result(), clean.result())


def test_weighted_tokens_count_as_often_as_their_weight_says() -> None:
    x, y = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(5))
    times = torch.tensor([1, 3, 2, 1, 1, 4, 1, 1, 2, 1, 1, 1])
    weighted, repeated = Hessian(5), Hessian(5)
    weighted.add(x[:7], y[:7], 0.5 * times[:7].float())
    weighted.add(x[7:], y[7:], 0.5 * times[7:].float())
    repeated.add(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0))
    torch.testing.assert_close(weighted.result(), repeated.result(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weighted.mean_cross(), repeated.mean_cross(), rtol=1e-5, atol=1e-6)
    assert (weighted.tokens, repeated.tokens) == (12, 19)
    assert torch.equal(weighted.largest, repeated.largest)  # what is the largest is no mean


def test_the_weight_of_a_dropped_token_is_dropped_with_it() -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(6))
    weights = torch.linspace(0.1, 3, 20)
    clean, dirty = Hessian(4), Hessian(4)
    clean.add(x[1:], weights=weights[1:])
    x[0, 2] = float("nan")
    dirty.add(x, weights=weights)
    assert dirty.dropped == 1
    torch.testing.assert_close(clean.result(), dirty.result(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_few_inputs_kept_as_they_are_stand_for_their_hessian(weighted: bool) -> None:
    x = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(0))
    x[0, 4, 7] = float("nan")
    importance = torch.rand(9) + 0.5 if weighted else None
    root, hessian = InputRoot(40), Hessian(40)
    for batch in x:
        root.add(batch, weights=importance)
        hessian.add(batch, weights=importance)
    found = root.result()
    assert (root.tokens, root.dropped, found.shape) == (17, 1, (17, 40))
    assert torch.equal(root.largest, hessian.largest)
    torch.testing.assert_close(found.double().t() @ found.double(), hessian.result(), rtol=1e-5, atol=1e-6)


def test_inputs_that_nobody_gave_are_refused_as_a_hessian_is() -> None:
    with pytest.raises(NumericsError, match="lonely: no calibration token"):
        InputRoot(4).result("lonely")
