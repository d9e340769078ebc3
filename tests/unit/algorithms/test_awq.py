"""AWQ: factors against no factors, clipping against searched rounding, and what happens when numbers go wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.algorithms import LARGEST_FACTOR
from quantkit.algorithms.awq import Consumer, _ranges, awq, rough_factors, search_factors
from quantkit.algorithms.gptq import proxy_loss
from quantkit.algorithms.rtn import rtn
from quantkit.core import affine
from quantkit.core.scheme import Scheme

W4 = Scheme(4, 32, symmetric=False)


def problem(rows: int = 24, cols: int = 64, seed: int = 0, outlier: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(400, cols, generator=g) @ (torch.eye(cols) + 0.3 * torch.randn(cols, cols, generator=g))
    x[:, 5] *= outlier
    return torch.randn(rows, cols, generator=g), (x.t() @ x).double() / 400


def one(weight: Tensor, hessian: Tensor, scheme: Scheme = W4) -> Consumer:
    return Consumer(weight, hessian, torch.arange(weight.shape[1]), scheme)


def solve(weight: Tensor, hessian: Tensor, factors: Tensor, scheme: Scheme = W4) -> Tensor:
    """What the folded, quantized linear computes with, in the original's units."""
    s = factors.double()
    q = awq(weight * factors, hessian / torch.outer(s, s), scheme).quantized
    return q.dequantize() / factors


@settings(max_examples=20, deadline=None)
@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 16, 24, 64]),
    symmetric=st.booleans(),
    outlier=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_awq_is_never_worse_than_rounding(
    bits: int, group: int | None, symmetric: bool, outlier: float, seed: int
) -> None:
    w, h = problem(seed=seed, outlier=outlier)
    scheme = Scheme(bits, group, symmetric)
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(64).double()  # what the ranges are chosen with
    clipped = proxy_loss(w, awq(w, h, scheme).quantized.dequantize(), damped)[0]
    rounded = proxy_loss(w, rtn(w, scheme, "search", damped.diagonal()).quantized.dequantize(), damped)[0]
    assert clipped <= rounded * 1.0001
    found = search_factors([one(w, h, scheme)], 64)
    assert found.loss <= found.plain_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_callers_statistics_stay_as_they_are(dtype: torch.dtype) -> None:
    """They are float32 on a GPU, float64 on a CPU, and the report reads them afterwards."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator, dtype=dtype)
    hessian = x.t() @ x / len(x)
    before = hessian.clone()
    awq(torch.randn(8, 32, generator=generator), hessian, Scheme(4, 16, False))
    assert torch.equal(hessian, before)


def test_a_channel_with_large_inputs_is_protected() -> None:
    w, h = problem(outlier=100.0)
    found = search_factors([one(w, h)], 64)
    assert int(found.values.argmax()) == 5
    assert found.loss < 0.75 * found.plain_loss
    protected, plain = (proxy_loss(w, solve(w, h, s), h)[0] for s in (found.values, torch.ones(64)))
    assert protected < 0.8 * plain


def test_scaled_and_rounded_beats_rounding_where_inputs_differ_in_size() -> None:
    w, h = problem(rows=48, cols=64, seed=3)
    size = torch.logspace(-1, 1, 64)[torch.randperm(64, generator=torch.Generator().manual_seed(0))].double()
    h = h * torch.outer(size, size)
    found = search_factors([one(w, h)], 64)
    rounded = rtn(w, W4, "search", h.diagonal()).quantized.dequantize()
    assert proxy_loss(w, solve(w, h, found.values), h)[0] < 0.85 * proxy_loss(w, rounded, h)[0]


def test_clipping_counts_correlations_between_groups() -> None:
    """Two equal inputs in different groups: their errors can cancel, which no group sees alone."""
    g = torch.Generator().manual_seed(0)
    half = torch.randn(400, 32, generator=g)
    x = torch.cat([half, half], dim=1)
    w, h = torch.randn(64, 64, generator=g), (x.t() @ x).double() / 400
    alone = torch.block_diag(h[:32, :32], h[32:, 32:])
    together, apart = (awq(w, hessian, W4).quantized.dequantize() for hessian in (h, alone))
    assert proxy_loss(w, together, h)[0] < 0.9 * proxy_loss(w, apart, h)[0]


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_are_nearly_the_best_of_all_pairs_and_the_last_group_has_its_best(symmetric: bool) -> None:
    """Oracle: every pair of candidate ranges for rows of two groups of four, by the loss of the whole row."""
    scheme, found, apart, best = Scheme(3, 4, symmetric), 0.0, 0.0, 0.0
    for seed in range(12):
        w, h = problem(rows=6, cols=8, seed=seed)
        h.diagonal().add_(0.01 * h.diagonal().mean())  # as awq does itself
        start = rtn(w, scheme, "search", h.diagonal().float()).quantized.dequantize()
        sides = []  # of each group: error [candidates, rows, 4]
        for columns in (slice(0, 4), slice(4, 8)):
            tried = [
                affine.dequantize(affine.quantize(w[:, columns], *r, scheme), *r, scheme)
                for r in _ranges(w[:, columns], scheme)
            ]
            sides.append(torch.stack([start[:, columns], *tried]) - w[:, columns])
        left, right = sides
        every = torch.cat([left[:, None].expand(-1, len(right), -1, -1), right[None].expand(len(left), -1, -1, -1)], -1)
        losses = ((every.double() @ h) * every).sum(-1)  # [left, right, rows]
        error = awq(w, h, scheme, damping=0.0).quantized.dequantize() - w
        mine = ((error.double() @ h) * error).sum(1)
        assert bool((mine >= losses.amin((0, 1)) * (1 - 1e-5)).all())
        own = (left - error[:, :4]).abs().sum(-1).argmin(0)  # which candidate each row's first group has
        assert torch.allclose(mine, losses[own, :, torch.arange(6)].amin(1), rtol=1e-4)
        alone = ((start - w).double() @ h * (start - w)).sum(1)
        found, apart, best = (
            found + float(mine.sum()),
            apart + float(alone.sum()),
            best + float(losses.amin((0, 1)).sum()),
        )
    assert found < 1.15 * best
    assert found < 0.9 * apart


@pytest.mark.parametrize("symmetric", [True, False])
def test_permuting_outputs_permutes_codes_and_leaves_factors(symmetric: bool) -> None:
    w, h = problem(outlier=20.0)
    scheme = Scheme(4, 32, symmetric)
    rows = torch.randperm(len(w), generator=torch.Generator().manual_seed(1))
    plain, moved = awq(w, h, scheme).quantized, awq(w[rows], h, scheme).quantized
    assert torch.equal(moved.codes, plain.codes[rows])
    assert torch.equal(moved.scales, plain.scales[rows])
    found, again = search_factors([one(w, h, scheme)], 64), search_factors([one(w[rows], h, scheme)], 64)
    assert torch.allclose(found.values, again.values)
    assert again.loss == pytest.approx(found.loss)


def test_rough_factors_need_only_the_size_of_inputs_and_do_nearly_what_the_search_does() -> None:
    w, h = problem(outlier=100.0)
    size = h.diagonal().sqrt()
    rough = rough_factors([w[:10], w[10:]], size, W4)
    losses = {
        name: proxy_loss(w, solve(w, h, s), h)[0]
        for name, s in {"rough": rough, "found": search_factors([one(w, h)], 64).values, "none": torch.ones(64)}.items()
    }
    assert int(rough.argmax()) == 5
    assert losses["rough"] < 0.8 * losses["none"]
    assert losses["rough"] < 1.25 * losses["found"]
    torch.testing.assert_close(rough.log().mean(), torch.tensor(0.0), atol=1e-5, rtol=0)


def test_rough_factors_are_one_where_inputs_are_alike_or_unknown() -> None:
    w, _ = problem()
    assert bool((rough_factors([w], torch.ones(64), W4) == 1).all())
    assert bool((rough_factors([w], torch.full((64,), float("nan")), W4) == 1).all())


def test_channels_shared_by_columns_get_one_factor() -> None:
    w, h = problem()
    channels = torch.arange(64) % 16
    found = search_factors([Consumer(w, h, channels, W4)], 16)
    assert found.values.shape == (16,)
    assert found.loss <= found.plain_loss


def test_every_consumer_counts() -> None:
    """Whoever has most of the loss decides; the share scales it."""
    a, b = problem(seed=1, outlier=100.0), problem(seed=2)
    alone = search_factors([one(*a)], 64).values
    ignored = search_factors([one(*a), Consumer(*b, torch.arange(64), W4, share=1e-9)], 64).values
    torch.testing.assert_close(alone, ignored, rtol=1e-3, atol=1e-3)


def test_factors_are_those_the_producer_can_hold() -> None:
    w, h = problem()
    h = h * torch.outer(*[torch.logspace(-2, 2, 64).double()] * 2)
    power = lambda s: 2.0 ** torch.round(s.log2())  # noqa: E731
    found = search_factors([one(w, h)], 64, power)
    assert torch.equal(found.values.log2(), found.values.log2().round())
    assert not torch.equal(found.values, torch.ones(64))


def test_factors_are_bounded() -> None:
    w, h = problem(outlier=1e6)
    found = search_factors([one(w, h)], 64)
    assert 1 / LARGEST_FACTOR <= float(found.values.min()) <= float(found.values.max()) <= LARGEST_FACTOR


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_a_loss_that_is_not_finite_leaves_the_fold_alone_and_says_so(bad: float) -> None:
    w, h = problem()
    h = h.clone()
    h[3, 3] = bad
    found = search_factors([one(w, h)], 64)
    assert torch.equal(found.values, torch.ones(64))
    assert "not finite" in (found.fallback or "")


def test_statistics_that_are_not_finite_fall_back_to_rounding_and_say_so() -> None:
    w, h = problem()
    h[0, 1] = float("nan")
    solution = awq(w, h, W4)
    assert solution.quantized.equal(rtn(w, W4, "search").quantized)
    assert "not finite" in (solution.fallback or "")


def test_inputs_that_were_never_seen_do_no_harm() -> None:
    w, h = problem()
    h[7], h[:, 7] = 0, 0
    found = search_factors([one(w, h)], 64)
    assert bool(torch.isfinite(found.values).all())
    assert bool(torch.isfinite(solve(w, h, found.values)).all())


def test_short_last_groups_and_single_groups_are_solved() -> None:
    w, h = problem()
    for scheme in (Scheme(4, 24, symmetric=False), Scheme(4, None, symmetric=True)):
        q = awq(w, h, scheme).quantized
        assert q.codes.shape == w.shape
        assert int(q.codes.max()) <= 15
