"""SmoothQuant's factors: equation 4 over everything that reads a fold."""

from __future__ import annotations

import torch

from quantkit.algorithms.smooth import FoldReader, smooth_factors
from quantkit.core import affine
from quantkit.core.rounding.activations import round_tokens
from quantkit.core.scheme import Scheme


def reader(inputs: list[float], weights: list[float], channels: list[int] | None = None) -> FoldReader:
    return FoldReader(torch.tensor(inputs), torch.tensor(weights), torch.tensor(channels or range(len(inputs))))


def test_factors_are_equation_4_up_to_a_common_factor() -> None:
    found = smooth_factors([reader([16.0, 1.0, 4.0], [1.0, 4.0, 1.0])], 3)
    expected = torch.tensor([4.0, 0.5, 2.0])  # sqrt(max|x| / max|w|)
    torch.testing.assert_close(found / found[0], expected / expected[0])
    torch.testing.assert_close(found.log().mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    whole = smooth_factors([reader([16.0, 1.0, 4.0], [1.0, 4.0, 1.0])], 3, alpha=1.0)
    torch.testing.assert_close(whole / whole[1], torch.tensor([16.0, 1.0, 4.0]))


def test_the_largest_of_all_readers_and_of_shared_columns_counts() -> None:
    """Two linears; the second repeats each channel in two columns, as query heads repeat a value head."""
    both = [reader([4.0, 1.0], [1.0, 1.0]), reader([1.0, 1.0, 9.0, 2.0], [1.0, 1.0, 1.0, 0.5], [0, 1, 0, 1])]
    alone = smooth_factors([reader([9.0, 2.0], [1.0, 1.0])], 2)
    torch.testing.assert_close(smooth_factors(both, 2), alone)


def test_channels_that_are_never_used_keep_factor_1() -> None:
    found = smooth_factors([reader([0.0, 4.0, 1.0], [1.0, 1.0, 0.0])], 3)
    torch.testing.assert_close(found, torch.ones(3))  # one used channel is its own mean
    assert bool((smooth_factors([reader([0.0], [0.0])], 1) == 1).all())


def test_smoothing_lowers_the_error_of_a_product_with_outliers() -> None:
    """Two channels 60 times as large as the rest: what the paper is about."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(200, 64, generator=generator), torch.randn(48, 64, generator=generator)
    x[:, [3, 40]] *= 60
    scheme = Scheme(8, None, activations="int8")

    def error(s: torch.Tensor) -> float:
        scale, zeros = affine.minmax_params(weight * s, scheme)
        codes = affine.quantize(weight * s, scale, zeros, scheme)
        y = round_tokens(x / s) @ affine.dequantize(codes, scale, zeros, scheme).T
        return float((y - x @ weight.T).norm())

    one = FoldReader(x.abs().amax(0), weight.abs().amax(0), torch.arange(64))
    assert error(smooth_factors([one], 64)) < 0.4 * error(torch.ones(64))
