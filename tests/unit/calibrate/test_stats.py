"""The Hessian accumulator."""

import pytest
import torch

from quantkit.calibrate.stats import Hessian
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
