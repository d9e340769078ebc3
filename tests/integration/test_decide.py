"""What is decided before the first block: from what was stored it is the same as from measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.convert.job.work_folder import Work
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import Plan, make_plan
from quantkit.convert.run import decide_plan
from quantkit.convert.stages.decide import Decisions

SHORT: dict[str, Any] = dict(
    method="gptq", group_size=32, format="native", samples=4, seq_len=48, guided=True, matmul_precision="float32"
)


def decided(
    source: Path, out: Path, text: Path, *, finish: bool = False, **options: Any
) -> tuple[Plan, Decisions, list[tuple[int, int]]]:
    """Plan, decisions, and the steps of measuring that were told. The job is left as a kill would leave it."""
    plan = make_plan(ConvertOptions(source=str(source), out=out, calibration=str(text), **{**SHORT, **options}))
    work, steps = Work(plan), []
    try:
        decisions = decide_plan(plan, plan.inputs, work, lambda done, total: steps.append((done, total)))
        if finish:
            work.finish({}, decisions.choice)
    finally:
        work.release()
    return plan, decisions, steps


def assert_same(mine: Decisions, theirs: Decisions) -> None:
    assert mine.targets == theirs.targets
    assert mine.unquantized == theirs.unquantized
    assert mine.choice == theirs.choice
    assert mine.channels is not None
    assert theirs.channels is not None
    assert mine.guides is not None
    assert theirs.guides is not None
    for one, other in zip(mine.channels, theirs.channels, strict=True):
        assert torch.equal(one, other)
    for guide, again in zip(mine.guides, theirs.guides, strict=True):
        assert guide is not None
        assert again is not None
        assert (guide.linears, guide.outputs) == (again.linears, again.outputs)
        for key, value in guide.to_store().items():
            assert torch.equal(value, again.to_store()[key]), key


@pytest.mark.parametrize("options", [{"bits": 4}, {"target_bpw": 8.0}], ids=["bits", "budget"])
def test_stored_measurements_give_the_same_decisions_as_measuring(
    options: dict[str, Any], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    _, first, steps = decided(tiny_original, tmp_path / "out", calibration_text, **options)
    _, again, none = decided(tiny_original, tmp_path / "out", calibration_text, **options, resume=True)
    _, anew, others = decided(tiny_original, tmp_path / "other", calibration_text, **options)
    assert steps
    assert none == []  # nothing is measured twice
    assert steps == others
    assert_same(first, again)
    assert_same(first, anew)


def test_without_anything_to_measure_the_decisions_are_the_plans(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    plan, decisions, steps = decided(tiny_original, tmp_path / "out", calibration_text, bits=4, guided=False)
    assert (decisions.targets, decisions.unquantized) == (plan.targets, plan.unquantized)
    assert (decisions.choice, decisions.channels, decisions.guides, steps) == (None, None, None, [])


def test_a_budget_is_kept_and_a_finished_job_knows_what_was_chosen(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    plan, first, _ = decided(tiny_original, tmp_path / "out", calibration_text, target_bpw=8.0, finish=True)
    assert plan.budget is not None
    assert first.choice is not None
    spent = sum(costs[index] for costs, index in zip(plan.budget.costs, first.choice.taken, strict=True))
    assert plan.budget.fixed + spent <= plan.budget.budget
    for unit, index in zip(plan.budget.units, first.choice.taken, strict=True):
        for name in unit.members:  # None: 16 bit, so no target
            assert (first.targets[name].scheme if name in first.targets else None) == unit.options[index]
    assert len({target.scheme for target in first.targets.values()}) > 1  # there was something to choose
    (tmp_path / ".out.work" / "measured.json").unlink()
    _, again, steps = decided(tiny_original, tmp_path / "out", calibration_text, target_bpw=8.0, resume=True)
    assert steps == []
    assert (again.targets, again.unquantized, again.choice) == (first.targets, first.unquantized, first.choice)
