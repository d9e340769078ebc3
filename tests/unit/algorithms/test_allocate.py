"""Bits under a budget: as good as trying every choice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.algorithms.allocate import allocate
from quantkit.errors import NumericsError, RequestError

WIDTHS = (8, 4, 3, 2)
parts = st.lists(
    st.fixed_dictionaries({bits: st.floats(0, 100, allow_subnormal=False) for bits in WIDTHS}), min_size=1, max_size=5
)


def total(damage: list[dict[int, float]], chosen: tuple[int, ...] | list[int]) -> float:
    return sum(part[bits] for part, bits in zip(damage, chosen, strict=True))


@settings(max_examples=150, deadline=None)
@given(parts, st.floats(2, 9))
def test_no_choice_within_the_budget_is_better(damage: list[dict[int, float]], budget: float) -> None:
    found = allocate(damage, budget)
    most = math.floor(budget * len(damage) + 1e-6)
    assert sum(found) <= most
    best = min(total(damage, tried) for tried in itertools.product(WIDTHS, repeat=len(damage)) if sum(tried) <= most)
    assert total(damage, found) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_where_rounding_costs_most_bits_are_spent() -> None:
    tame, wild = ({bits: weight * 4.0**-bits for bits in WIDTHS} for weight in (1, 1000))
    assert allocate([tame, wild], 3) == [2, 4]
    assert allocate([tame, tame], 3) == [3, 3]
    assert allocate([tame, wild], 8) == [8, 8]


def test_of_equals_the_fewest_bits_are_taken() -> None:
    assert allocate([dict.fromkeys(WIDTHS, 1.0)] * 3, 8) == [2, 2, 2]


@pytest.mark.parametrize("budget", [3.0, 2.9999999999, 10 / 3])
def test_a_budget_is_met_to_the_last_bit(budget: float) -> None:
    steep = [{bits: 10.0**-bits for bits in WIDTHS}] * 3
    assert sum(allocate(steep, budget)) == math.floor(budget * 3 + 1e-6)


def test_impossible_budgets_and_broken_measurements_are_refused() -> None:
    steep = {bits: 10.0**-bits for bits in WIDTHS}
    with pytest.raises(RequestError, match=r"budget of 1\.9 .* fewest possible are 2"):
        allocate([steep] * 4, 1.9)
    with pytest.raises(NumericsError, match="not finite"):
        allocate([steep | {3: math.nan}], 3)
    assert allocate([], 3) == []
