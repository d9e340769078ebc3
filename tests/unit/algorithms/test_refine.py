"""Refinement: never worse, a local optimum that enumeration confirms, rows on their own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.algorithms.refine import descend, fit_scales, refine, row_losses
from quantkit.algorithms.rtn import rtn
from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme


def problem(rows: int, cols: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(300, cols, generator=g) @ (torch.eye(cols) + 0.4 * torch.randn(cols, cols, generator=g))
    return torch.randn(rows, cols, generator=g), x.t() @ x / 300


def losses(w: torch.Tensor, q: QuantTensor, codes: torch.Tensor, scales: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return row_losses(w.double(), codes, scales, q.zeros, q.scheme, h.double())


@settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group=st.sampled_from([None, 16, 20]),
    symmetric=st.booleans(),
    refit=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_sweep_lowers_the_loss_of_each_row_or_leaves_it(
    bits: int, group: int | None, symmetric: bool, refit: bool, seed: int
) -> None:
    w, h = problem(6, 48, seed)
    q = rtn(w, Scheme(bits, group, symmetric)).quantized
    before = losses(w, q, q.codes, q.scales, h)
    codes, scales = q.codes, q.scales
    for _ in range(3):
        codes, scales = refine(w, codes, scales, q.zeros, q.scheme, h, sweeps=1, refit=refit)
        after = losses(w, q, codes, scales, h)
        assert bool((after <= before * (1 + 1e-5)).all())
        before = after
    assert refit or torch.equal(scales, q.scales)


def test_refined_codes_cannot_be_bettered_by_changing_one() -> None:
    w, h = problem(4, 12, 3)
    scheme = Scheme(2, 4, symmetric=False)
    q = rtn(w, scheme).quantized
    codes, scales = refine(w, q.codes, q.scales, q.zeros, scheme, h, sweeps=20, refit=False)
    found = losses(w, q, codes, scales, h)
    for column, code in itertools.product(range(12), range(4)):
        changed = codes.clone()
        changed[:, column] = code
        assert bool((losses(w, q, changed, scales, h) >= found * (1 - 1e-5)).all())


def test_one_visit_of_a_column_finds_the_best_of_its_codes() -> None:
    """Oracle: all codes of the only column that is not exact."""
    w, h = problem(16, 5, 4)
    scheme = Scheme(3, None, symmetric=False)
    scales, zeros = affine.minmax_params(w, scheme)
    codes = affine.quantize(w, scales, zeros, scheme)
    exact = affine.dequantize(codes, scales, zeros, scheme)
    exact[:, 0] = w[:, 0]
    start = codes.clone()
    start[:, 0] = 7 - start[:, 0]
    found = descend(exact, start, scales, zeros, scheme, h)
    every = []
    for code in range(8):
        start[:, 0] = code
        every.append(row_losses(exact, start, scales, zeros, scheme, h))
    # the first column is visited first, while the others are exact
    assert torch.equal(found[:, 0].long(), torch.stack(every).argmin(0))


def test_fitted_scales_are_the_least_squares_solution() -> None:
    w, h = problem(5, 24, 5)
    scheme = Scheme(4, 8, symmetric=False)
    q = rtn(w, scheme).quantized
    assert q.zeros is not None
    fitted = fit_scales(w, q.codes, q.scales, q.zeros, scheme, h)
    root = torch.linalg.cholesky(h.double())
    for row in range(5):
        steps = (q.codes[row].double() - affine.expand_groups(q.zeros, 24, scheme)[row].double())[:, None]
        of_groups = steps * torch.nn.functional.one_hot(affine.group_index(24, scheme), 3).double()
        best = torch.linalg.lstsq(root.t() @ of_groups, root.t() @ w[row].double()[:, None]).solution[:, 0]
        torch.testing.assert_close(fitted[row].double(), best, rtol=2e-3, atol=0)


def test_groups_of_zeros_keep_their_scale() -> None:
    w, h = problem(3, 16, 6)
    w[:, 8:] = 0
    q = rtn(w, Scheme(4, 8, symmetric=False)).quantized
    codes, scales = refine(w, q.codes, q.scales, q.zeros, q.scheme, h)
    assert torch.equal(scales[:, 1], q.scales[:, 1])
    back = affine.dequantize(codes, scales, q.zeros, q.scheme)
    assert bool(torch.isfinite(back).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_permuting_outputs_permutes_the_result(symmetric: bool) -> None:
    w, h = problem(9, 32, 7)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    q = rtn(w, Scheme(3, 16, symmetric)).quantized
    codes, scales = refine(w, q.codes, q.scales, q.zeros, q.scheme, h)
    zeros = None if q.zeros is None else q.zeros[order]
    again = refine(w[order], q.codes[order], q.scales[order], zeros, q.scheme, h)
    assert torch.equal(again[0], codes[order])
    assert torch.equal(again[1], scales[order])
