"""A budget of bits is met by the best choice at every size.

One that cannot be met is told with numbers that can.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from quantkit.convert.options.options import parse_size
from quantkit.convert.plan.bit_budget import BitBudget, _askable, chosen_targets
from quantkit.convert.plan.targets import Target
from quantkit.convert.report.bit_budget import allocation_lines, curve, summary
from quantkit.convert.results import BudgetChoice, Unit
from quantkit.core.scheme import Scheme

W2, W4, W8 = (Scheme(bits, 32, False) for bits in (2, 4, 8))
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj", "lm_head")
UNITS = (
    Unit(NAMES[:2], "linear", (W2, W4, W8)),
    Unit(NAMES[2:3], "linear", (W2, W4)),
    Unit(NAMES[3:], "head", (W8, None)),
)
COSTS = ((200, 400, 800), (100, 200), (400, 800))
SENSITIVITY = [[0.5, 0.1, 0.01], [0.3, 0.02], [0.004, 0.0]]
TARGETS = {name: Target(name, f"{name}.weight", 8, 32, W4) for name in NAMES}


def budget(size: int = 1200, **changes: Any) -> BitBudget:
    given: dict[str, Any] = dict(
        asked="--target-bpw 4", budget=size, parameters=2000, units=UNITS, costs=COSTS, fixed=50, format="gptq"
    )
    return BitBudget(**{**given, **changes})


def test_what_is_possible_is_the_fixed_bytes_with_the_cheapest_and_the_dearest_options() -> None:
    assert (budget().least, budget().most) == (50 + 200 + 100 + 400, 50 + 800 + 200 + 800)
    assert budget().bits(500) == 2.0


def test_only_a_budget_outside_of_that_is_a_problem_and_its_remedy_is_none() -> None:
    assert [budget(size).problems() for size in (750, 1850)] == [[], []]
    (little,), (much,) = budget(749).problems(), budget(1851).problems()
    assert little.startswith("--target-bpw 4: the least that is possible here is --target-bpw 3.000 or --target-size")
    assert much.startswith("--target-bpw 4: the most that is possible here is --target-bpw 7.400 or --target-size")
    for told in (little, much):
        bits, size = re.findall(r"--target-bpw ([\d.]+) or --target-size (\S+)", told)[0]
        assert budget(int(float(bits) * 2000 / 8 + 1e-6)).problems() == []
        assert size.endswith("KB")
    assert "--format native" in little
    assert "--format native" not in budget(749, format="native").problems()[0]
    assert "nothing is left to choose" in budget(units=(), costs=()).problems()[0]


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 123_456, 99_999_999, 100_000_001, 1_234_567_891, 2 * 10**12 + 7])
def test_a_size_that_is_proposed_can_be_typed_and_is_on_the_right_side(size: int) -> None:
    low, high = parse_size(_askable(size, up=False)) if size >= 1000 else 0, parse_size(_askable(size, up=True))
    assert low <= size <= high
    if size >= 1000:
        assert high - low <= size / 900  # four digits, about


def best(room: int) -> tuple[float, int]:
    """By trying all."""
    return min(
        (sum(kl[i] for kl, i in zip(SENSITIVITY, taken, strict=True)),
         50 + sum(c[i] for c, i in zip(COSTS, taken, strict=True)))
        for taken in itertools.product(*(range(len(costs)) for costs in COSTS))
        if sum(c[i] for c, i in zip(COSTS, taken, strict=True)) <= room
    )  # fmt: skip


def test_each_point_of_the_curve_is_the_best_that_its_bytes_can_buy() -> None:
    points = curve(budget(), SENSITIVITY)
    wanted = [best(700 + 1100 * i // 11) for i in range(12)]
    expected = [{"model_bits_per_weight": 8 * size / 2000, "predicted_kl": pytest.approx(kl)} for kl, size in wanted]
    assert points == [point for i, point in enumerate(expected) if point not in expected[:i]]
    assert [point["predicted_kl"] for point in points] == sorted({p["predicted_kl"] for p in points}, reverse=True)


def test_the_report_tells_what_was_chosen_and_what_else_there_was() -> None:
    choice = BudgetChoice((1, 0, 1), SENSITIVITY, {"text": "t", "windows": 2, "tokens": 3})
    told = summary(budget(), choice, TARGETS)
    assert told["bytes"] == 50 + 400 + 100 + 800
    assert told["model_bits_per_weight"] == 8 * 1350 / 2000
    assert told["predicted_kl"] == pytest.approx(0.1 + 0.3 + 0.0)
    assert [row["scheme"] for row in told["groups"]] == [W4.describe(), W2.describe(), "16 bit"]
    assert told["groups"][0]["names"] == list(NAMES[:2])
    assert told["groups"][0]["options"][W8.describe()] == {"bytes": 800, "kl": 0.01}
    assert told["measured_on"] == {"text": "t", "windows": 2, "tokens": 3}


def test_the_lines_show_the_chosen_point_in_its_place_and_count_the_kinds() -> None:
    choice = BudgetChoice((1, 0, 1), SENSITIVITY, {})
    lines = allocation_lines(summary(budget(), choice, TARGETS))
    assert "5.4000 bits per weight of the whole model (1 kB of 1 kB)" in lines[0]
    (chosen,) = (line for line in lines if "<- chosen" in line)
    assert chosen.split()[:2] == ["5.400", "0.4"]
    bits = [float(line.split()[0]) for line in lines[2 : lines.index(chosen) + 2] if line.split()[0][0].isdigit()]
    assert bits == sorted(bits)
    assert [line.strip() for line in lines[-3:]] == [
        f"up_proj, gate_proj: {W4.describe()} x 1",
        f"up_proj: {W2.describe()} x 1",
        "lm_head: 16 bit x 1",
    ]


def test_targets_get_what_was_chosen_and_what_stays_at_16_bit_is_no_target() -> None:
    ruled = Target("model.layers.9.o_proj", "model.layers.9.o_proj.weight", 8, 32, W8)
    found = chosen_targets({**TARGETS, ruled.name: ruled}, UNITS, (W8, W2, None))
    assert {name: target.scheme for name, target in found.items()} == {
        NAMES[0]: W8, NAMES[1]: W8, NAMES[2]: W2, ruled.name: W8,
    }  # fmt: skip
    assert found[NAMES[0]].parameter == TARGETS[NAMES[0]].parameter
    assert TARGETS[NAMES[0]].scheme == W4  # the plan's own are left as they are
