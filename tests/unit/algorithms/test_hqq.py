"""Data-free rounding: against the extremes, against enumeration, and its channel factors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.algorithms.awq import Consumer
from quantkit.algorithms.hqq import channel_factors, hqq, search_channel_factors
from quantkit.core import affine
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError


def weighted(w: torch.Tensor, back: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return ((back - w).double().square() * gain.double()).sum(1)


@settings(max_examples=25, deadline=None)
@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 16, 24]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_weighted_error_is_never_above_that_of_the_extremes(
    bits: int, group: int | None, symmetric: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(12, 40, generator=g) * torch.rand(12, 1, generator=g)
    gain = torch.rand(40, generator=g) ** 3 + 1e-3
    scheme = Scheme(bits, group, symmetric)
    found, plain = (hqq(w, scheme, how, gain).quantized.dequantize() for how in ("search", "minmax"))
    assert bool((weighted(w, found, gain) <= weighted(w, plain, gain) * (1 + 1e-5)).all())


def best_of_a_fine_grid(groups: torch.Tensor, gain: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Oracle: the least weighted error of each group over every zero and 200 scales.

    Groups are float ``[groups, width]``, like gain.
    """
    step = 2 * groups.abs().amax(1, keepdim=True) / (scheme.levels - 1)
    best = torch.full((len(groups),), torch.inf, dtype=torch.float64)
    for shrink in torch.logspace(-0.9, 0.25, 200).tolist():
        scale = (step * shrink).half().float()
        for zero in [scheme.midpoint] if scheme.symmetric else range(scheme.levels):
            codes = (groups / scale + zero).round().clamp(0, scheme.levels - 1)
            error = (((codes - zero) * scale - groups).double().square() * gain.double()).sum(1)
            best = torch.minimum(best, error)
    return best


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_groups_are_close_to_the_best_of_a_fine_grid(bits: int, symmetric: bool, heavy: bool) -> None:
    """Three groups a row, the last one short."""
    g = torch.Generator().manual_seed(bits)
    w, gain = torch.randn(32, 40, generator=g), torch.rand(40, generator=g) ** 2 + 0.05
    w = w**3 if heavy else w
    scheme = Scheme(bits, 16, symmetric)
    found, plain = (hqq(w, scheme, how, gain).quantized.dequantize() for how in ("search", "minmax"))
    best, near, far = [], [], []
    for part in torch.arange(40).split(16):
        best.append(best_of_a_fine_grid(w[:, part], gain[part].expand(32, -1), scheme))
        near.append(weighted(w[:, part], found[:, part], gain[part]))
        far.append(weighted(w[:, part], plain[:, part], gain[part]))
        assert bool((near[-1] <= far[-1] * (1 + 1e-5)).all())  # of each group by itself, not of the row only
    least, mine, extremes = (float(torch.cat(one).sum()) for one in (best, near, far))
    assert mine < (1.09 if symmetric else 1.14) * least
    assert mine < 0.92 * extremes


def test_inputs_that_are_large_are_rounded_more_exactly() -> None:
    w = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    gain = torch.ones(32)
    gain[:4] = 1000
    scheme = Scheme(4, 16, symmetric=False)
    error = [(hqq(w, scheme, "search", i).quantized.dequantize() - w).square().mean(0) for i in (gain, None)]
    assert float(error[0][:4].sum()) < 0.7 * float(error[1][:4].sum())


def test_permuting_outputs_permutes_codes() -> None:
    w = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    scheme = Scheme(4, 16, symmetric=False)
    assert torch.equal(hqq(w[order], scheme).quantized.codes, hqq(w, scheme).quantized.codes[order])


def test_where_no_input_was_ever_anything_but_zero_all_count_alike() -> None:
    w = torch.randn(6, 24, generator=torch.Generator().manual_seed(4))
    scheme = Scheme(4, 8, symmetric=False)
    assert hqq(w, scheme, "search", torch.zeros(24)).quantized.equal(hqq(w, scheme).quantized)


def test_an_importance_that_is_not_finite_is_refused() -> None:
    spoiled = torch.ones(24)
    spoiled[3] = torch.nan
    with pytest.raises(NumericsError, match="not finite"):
        hqq(torch.ones(6, 24), Scheme(4, 8, symmetric=False), "search", spoiled)


def test_zero_weights_stay_zero() -> None:
    back = hqq(torch.zeros(3, 16), Scheme(4, 8, symmetric=False)).quantized.dequantize()
    assert torch.equal(back, torch.zeros(3, 16))


def test_factors_are_the_root_of_the_sizes_around_one() -> None:
    size = torch.tensor([0.25, 1.0, 4.0])
    factors = channel_factors(size, 0.5)
    assert float(factors.log().sum()) == pytest.approx(0, abs=1e-5)
    assert float(factors[2] / factors[0]) == pytest.approx(4.0, rel=0.05)
    torch.testing.assert_close(channel_factors(size * 100, 0.5), factors)
    assert bool((channel_factors(torch.tensor([0.0, 1.0]), 0.5) > 0).all())


def weighted_error(weight: torch.Tensor, factors: torch.Tensor, square: torch.Tensor, scheme: Scheme) -> float:
    """Of rounding between the extremes."""
    step, zeros = affine.minmax_params(weight * factors, scheme)
    codes = affine.quantize(weight * factors, step, zeros, scheme)
    back = affine.dequantize(codes, step, zeros, scheme) / factors
    return float(((back - weight).square() * square).sum())


@pytest.mark.parametrize("scheme", [Scheme(4, 16, symmetric=False), Scheme(8, None)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_factors_that_are_chosen_are_never_worse_than_none(scheme: Scheme, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    size = torch.randn(64, generator=g).exp()
    weight = torch.randn(24, 64, generator=g) * torch.randn(64, generator=g).exp()
    consumer = Consumer(weight, torch.diag(size.square()), torch.arange(64), scheme)
    factors = search_channel_factors([consumer], 64)
    plain, chosen = (weighted_error(weight, s, size.square(), scheme) for s in (torch.ones(64), factors))
    assert chosen <= plain
    usual = weighted_error(weight, channel_factors(size, 0.5), size.square(), scheme)
    assert chosen <= usual


def test_factors_that_would_widen_whole_rows_are_left_out() -> None:
    size = torch.ones(32)
    size[0] = 4.0  # read more, and the largest weight as well: scaled up it sets the range of all others
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = 100.0
    consumer = Consumer(weight, torch.diag(size.square()), torch.arange(32), Scheme(8, None))
    assert torch.equal(search_channel_factors([consumer], 32), torch.ones(32))


def test_inputs_that_are_not_finite_are_refused() -> None:
    consumer = Consumer(torch.ones(2, 8), torch.full((8, 8), torch.inf), torch.arange(8), Scheme(8, None))
    with pytest.raises(NumericsError, match="not finite"):
        search_channel_factors([consumer], 8)


@pytest.mark.parametrize("bits", [3, 4])
def test_weights_of_another_size_get_the_same_codes(bits: int) -> None:
    """By a power of two nothing else may change.

    What the half-quadratic start calls an outlier is one relative to the step.
    """
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(3)) ** 3
    scheme = Scheme(bits, 64, symmetric=False)
    first, second = (hqq(w * size, scheme).quantized for size in (1.0, 1 / 32))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scales, second.scales * 32)
