"""Bits under a budget: as good as trying every choice."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.algorithms.allocate import Choices, Option, allocate
from quantkit.errors import NumericsError, RequestError

WIDTHS = (8, 4, 3, 2)
parts = st.lists(
    st.fixed_dictionaries({bits: st.floats(0, 100, allow_subnormal=False) for bits in WIDTHS}), min_size=1, max_size=5
)


def total(sensitivity: list[dict[int, float]], chosen: tuple[int, ...] | list[int]) -> float:
    return sum(part[bits] for part, bits in zip(sensitivity, chosen, strict=True))


@settings(max_examples=150, deadline=None)
@given(parts, st.floats(2, 9))
def test_no_choice_within_the_budget_is_better(sensitivity: list[dict[int, float]], budget: float) -> None:
    found = allocate(sensitivity, budget)
    most = math.floor(budget * len(sensitivity) + 1e-6)
    assert sum(found) <= most
    best = min(
        total(sensitivity, tried) for tried in itertools.product(WIDTHS, repeat=len(sensitivity)) if sum(tried) <= most
    )
    assert total(sensitivity, found) == pytest.approx(best, rel=1e-9, abs=1e-12)


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


options = st.lists(
    st.builds(Option, st.integers(1, 60), st.floats(0, 100, allow_subnormal=False)), min_size=1, max_size=4
)
unlike = st.lists(options, min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(unlike, st.integers(0, 300), st.integers(1, 9))
def test_parts_of_any_size_are_chosen_as_well_as_by_trying_all(
    parts: list[list[Option]], budget: int, unit: int
) -> None:
    scaled = [[Option(option.cost * unit, option.sensitivity) for option in part] for part in parts]
    least = sum(min(option.cost for option in part) for part in scaled)
    if budget < least:
        with pytest.raises(RequestError, match=f"least possible is {least}"):
            Choices(scaled).within(budget)
        return
    tried = [
        (sum(option.sensitivity for option in choice), sum(option.cost for option in choice))
        for choice in itertools.product(*scaled)
        if sum(option.cost for option in choice) <= budget
    ]
    chosen = [part[i] for part, i in zip(scaled, Choices(scaled).within(budget), strict=True)]
    assert sum(option.cost for option in chosen) <= budget
    assert sum(option.sensitivity for option in chosen) == pytest.approx(min(tried)[0], rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(unlike, st.integers(2, 40))
def test_on_a_coarse_grid_the_budget_still_holds_and_more_of_it_never_costs_more_sensitivity(
    parts: list[list[Option]], states: int
) -> None:
    choices = Choices(parts, states)
    sensitivity = []
    for budget in range(choices.least, choices.most + 1):
        chosen = [part[i] for part, i in zip(parts, choices.within(budget), strict=True)]
        assert sum(option.cost for option in chosen) <= budget
        sensitivity.append(sum(option.sensitivity for option in chosen))
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(sensitivity))
    assert sensitivity[-1] == pytest.approx(sum(min(option.sensitivity for option in part) for part in parts))


@settings(max_examples=100, deadline=None)
@given(unlike, st.integers(2, 40))
def test_on_a_coarse_grid_a_choice_is_as_good_as_the_best_for_a_step_less_per_part(
    parts: list[list[Option]], states: int
) -> None:
    """Oracle: every choice. Rounding up wastes less than a step for each part."""
    choices = Choices(parts, states)
    step = -(-(choices.most - choices.least) // states)
    tried = [
        (sum(option.cost for option in choice), sum(option.sensitivity for option in choice))
        for choice in itertools.product(*parts)
    ]
    for budget in range(choices.least, choices.most + 1):
        found = sum(part[i].sensitivity for part, i in zip(parts, choices.within(budget), strict=True))
        within = [sensitivity for cost, sensitivity in tried if cost <= budget - len(parts) * (step - 1)]
        assert not within or found <= min(within) * (1 + 1e-9) + 1e-12
