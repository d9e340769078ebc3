"""Rounding: every code is the nearest there is, and searched ranges never lose against the extremes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.algorithms import Scales
from quantkit.algorithms.rtn import rtn
from quantkit.core.scheme import Scheme


def weight(rows: int = 6, cols: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scales", ["minmax", "search"])
def test_no_other_codes_are_nearer_on_the_same_ranges(scales: Scales, symmetric: bool) -> None:
    w = weight(4, 4)
    q = rtn(w, Scheme(2, 4, symmetric), scales).quantized
    error = (w - q.dequantize()).square().sum(-1)
    offset = torch.full((4, 1), float(q.scheme.midpoint)) if q.zeros is None else q.zeros.float()
    for codes in itertools.product(range(4), repeat=4):
        other = (torch.tensor(codes) - offset) * q.scales.float()
        assert bool(((w - other).square().sum(-1) >= error * (1 - 1e-6)).all())


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 8, 24, 32]),
    symmetric=st.booleans(),
    seed=st.integers(0, 99),
    weighted=st.booleans(),
)
def test_searched_ranges_are_never_worse_than_the_extremes(
    bits: int, group: int | None, symmetric: bool, seed: int, weighted: bool
) -> None:
    w, scheme = weight(seed=seed), Scheme(bits, group, symmetric)
    counts = torch.rand(32, generator=torch.Generator().manual_seed(seed)) if weighted else torch.ones(32)
    plain, searched = (
        ((w - rtn(w, scheme, scales, counts if weighted else None).quantized.dequantize()).square() * counts).sum()
        for scales in ("minmax", "search")
    )
    assert float(searched) <= float(plain) * 1.0001


@pytest.mark.parametrize("scales", ["minmax", "search"])
def test_permuting_outputs_permutes_codes_and_a_groups_inputs_may_be_permuted_too(scales: Scales) -> None:
    w, scheme = weight(), Scheme(4, 8, False)
    plain = rtn(w, scheme, scales).quantized
    rows = torch.randperm(len(w), generator=torch.Generator().manual_seed(1))
    moved = rtn(w[rows], scheme, scales).quantized
    assert torch.equal(moved.codes, plain.codes[rows])
    assert torch.equal(moved.scales, plain.scales[rows])
    within = torch.cat([torch.randperm(8, generator=torch.Generator().manual_seed(i)) + 8 * i for i in range(4)])
    shuffled = rtn(w[:, within], scheme, scales).quantized
    assert torch.equal(shuffled.dequantize(), plain.dequantize()[:, within])


def test_the_weight_stays_as_it_is() -> None:
    w = weight()
    before = w.clone()
    rtn(w, Scheme(4, 8, True), "search", torch.rand(32))
    assert torch.equal(w, before)
