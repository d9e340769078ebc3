"""What is measured before the first block, and decided by it: the bits within a size, which channels of a block's output learning looks at, and which tokens count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantkit.algorithms.allocate import Choices, Option
from quantkit.algorithms.guide import Guide
from quantkit.calibrate.data import Windows
from quantkit.convert.allocated import option_words, summary
from quantkit.convert.allocation import Allocation, chosen_targets
from quantkit.convert.block import BlockResult
from quantkit.convert.plan import Plan, unquantized
from quantkit.convert.probe import TOKENS, WINDOWS, Probe
from quantkit.convert.resume import Work
from quantkit.model.experts import expert_linears


def settle(plan: Plan, work: Work, listen: Callable[[int, int], None]) -> None:
    """Give every weight of a plan with a target its scheme, and a plan that learns its ``channels``, one that is guided its ``guides``. What was measured is kept in the work folder:
    a resumed job goes on with the same.

    Raises what ``Probe.measure`` raises, NumericsError for a damage that is not finite.
    """
    allocation, windows = plan.allocation, plan.probe or plan.windows
    if not plan.probes:
        return
    if work.finished is not None:  # all is written; the plan still says what is in it
        if allocation is not None:
            rows = work.finished["allocation"]["groups"]
            taken = [option_words(unit).index(row["scheme"]) for unit, row in zip(allocation.units, rows, strict=True)]
            _apply(plan, allocation, taken)
        return
    assert windows is not None
    measured = work.measured()
    if measured is None:
        probe = Probe(
            plan.weights,
            plan.blocks,
            windows.ids,
            plan.device,
            work.folder,
            plan.options.seed,
            plan.options.scales != "minmax",
            [name for name, target in plan.targets.items() if target.kind == "linear"] if plan.options.guided else (),
            plan.options.folds,
        )
        measured = probe.measure(() if allocation is None else allocation.units, listen)
        work.keep_measured(measured)
    plan.channels, plan.guides = measured.channels, measured.guides
    if allocation is not None:
        _choose(plan, allocation, windows, measured.damage)


def guide_of(plan: Plan, index: int, groups: Sequence[tuple[str, ...]], result: BlockResult) -> Guide | None:
    """What a token counts for the linears of a block that are quantized, of ``groups`` (names inside it); None if nobody asked or nothing is known. Where nothing is, ``result``
    gets a note, but for experts: of those the plan speaks."""
    if plan.guides is None:
        return None
    prefix, block = plan.blocks.name(index), plan.blocks.modules[index]
    found = plan.guides[index]
    quantized = {name for group in groups for name in group if f"{prefix}.{name}" in plan.targets}
    missing = sorted(quantized - set(() if found is None else found.linears) - set(expert_linears(block)))
    if missing:
        result.notes.append(
            f"{prefix}: every token counts the same for {', '.join(missing)}, no finite gradient was measured there"
        )
    return None if found is None else found.only(quantized)


def _choose(plan: Plan, allocation: Allocation, windows: Windows, damage: list[list[float]]) -> None:
    choices = Choices(
        [
            [Option(cost, kl) for cost, kl in zip(costs, found, strict=True)]
            for costs, found in zip(allocation.costs, damage, strict=True)
        ]
    )
    taken = choices.within(allocation.budget - allocation.fixed)
    used = windows.ids[:WINDOWS, :TOKENS]
    measured_on = {"text": windows.name, "windows": used.shape[0], "tokens": used.shape[1]}
    plan.allocated = summary(allocation, choices, damage, taken, plan.targets, measured_on)
    _apply(plan, allocation, taken)


def _apply(plan: Plan, allocation: Allocation, taken: Sequence[int]) -> None:
    schemes = [unit.options[i] for unit, i in zip(allocation.units, taken, strict=True)]
    plan.targets = chosen_targets(plan.targets, allocation.units, schemes)
    plan.plain, plan.split = unquantized(plan.weights, plan.targets, plan.rewritten)
