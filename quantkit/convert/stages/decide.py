"""Decisions that need measuring, made before the first block: bits within a budget, channel and token importance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quantkit.algorithms.guide import Guide
from quantkit.calibrate.data import CalibrationWindows
from quantkit.checkpoint.storage.record import AGAIN
from quantkit.convert.job.work_folder import Work
from quantkit.convert.plan.bit_budget import BitBudget, chosen_targets
from quantkit.convert.plan.plan import Unquantized, find_unquantized
from quantkit.convert.plan.targets import Target, head_embeddings
from quantkit.convert.results import TOKENS, WINDOWS, BlockResult, BudgetChoice, Measured
from quantkit.convert.stages.sensitivity import SensitivityPass
from quantkit.core.host import OnStep
from quantkit.errors import WorkFolderError
from quantkit.model.language import text_config
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.skeleton import Blocks
from quantkit.model.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What the loop over blocks works with, beside the plan; it never changes afterwards.

    targets: those of the plan, or the ones chosen within the bit budget.
    unquantized: tensors in 16 bit, in the same way.
    choice: the choice within the bit budget, None without one.
    channels: by block, float32 [hidden], importance of each channel of its output; None where nothing needs it.
    guides: by block, what predicts token-importance weights; None where nothing needs them.
    """

    targets: Mapping[str, Target]
    unquantized: Unquantized
    choice: BudgetChoice | None = None
    channels: Sequence[Tensor] | None = None
    guides: Sequence[Guide | None] | None = None

    def head_embeddings(self) -> list[Target]:
        """Return the quantized weights outside the blocks: head and embeddings."""
        return head_embeddings(self.targets)


def decide(
    planned: Decisions,
    work: Work,
    on_step: OnStep,
    *,
    measuring: SensitivityPass,
    windows: CalibrationWindows,
    budget: BitBudget | None,
    rewritten: Sequence[str],
) -> Decisions:
    """Measure sensitivity, and choose by it.

    Measurements and choice are kept in the work folder: a resumed job goes on with the same.

    planned: the targets of the plan, with a bit budget provisional ones.
    work: the job's work folder.
    on_step: called with the number of steps done and of all steps.
    measuring: the sensitivity pass.
    windows: the text that ``measuring`` reads.
    budget: the bit budget, None without one.
    rewritten: 16-bit parameters that a fold may scale.

    Raises what ``SensitivityPass.measure`` raises, NumericsError for a sensitivity that is not finite, WorkFolderError
    if measurements in the work folder do not fit this job.
    """
    weights = measuring.weights
    if work.finished is not None:  # all is written; what is in it follows from the options that were chosen
        return planned if budget is None else _apply(planned, budget, _kept_choice(budget, work), weights, rewritten)
    measured = work.measured()
    if measured is None:
        measured = measuring.measure(() if budget is None else budget.units, on_step)
        work.keep_measured(measured)
    elif not _fits(measuring, budget, measured):
        raise WorkFolderError(f"{work.folder}: what was measured there is not of this model. {AGAIN}")
    decisions = replace(planned, channels=measured.channels, guides=measured.guides)
    if budget is None:
        return decisions
    return _apply(decisions, budget, _choose(budget, measured, windows), weights, rewritten)


def _fits(measuring: SensitivityPass, budget: BitBudget | None, measured: Measured) -> bool:
    """Tell whether kept measurements have the numbers that the pass would give: by unit, option, block and channel."""
    count, width = len(measuring.blocks), int(text_config(measuring.model).hidden_size)
    guides = measured.guides
    return (
        _fits_options(budget, measured.sensitivity)
        and [len(channels) for channels in measured.channels] == [width] * count
        and (guides is not None) == bool(measuring.guided)
        and (guides is None or len(guides) == count)
        and all(guide is None or len(guide.center) == width + 1 for guide in guides or ())
    )


def _fits_options(budget: BitBudget | None, sensitivity: list[list[float]]) -> bool:
    """Tell whether there is a number for each option of each unit."""
    options = [] if budget is None else [len(unit.options) for unit in budget.units]
    return [len(costs) for costs in sensitivity] == options


def _kept_choice(budget: BitBudget, work: Work) -> BudgetChoice:
    """Return what an earlier process chose. Raises WorkFolderError if there is no such choice in this budget."""
    choice = work.choice
    counts = [len(unit.options) for unit in budget.units]
    if (
        choice is None
        or not _fits_options(budget, choice.sensitivity)
        or len(choice.taken) != len(counts)
        or not all(0 <= index < count for index, count in zip(choice.taken, counts, strict=True))
    ):
        raise WorkFolderError(f"{work.folder / 'job.json'}: 'choice' is not of this model. {AGAIN}")
    return choice


def _choose(budget: BitBudget, measured: Measured, windows: CalibrationWindows) -> BudgetChoice:
    """Choose the options that add least KL divergence within the budget."""
    used = windows.ids[:WINDOWS, :TOKENS]
    measured_on: dict[str, Any] = {"text": windows.name, "windows": used.shape[0], "tokens": used.shape[1]}
    taken = budget.choices(measured.sensitivity).within(budget.budget - budget.fixed)
    return BudgetChoice(tuple(taken), measured.sensitivity, measured_on)


def _apply(
    decisions: Decisions, budget: BitBudget, choice: BudgetChoice, weights: Weights, rewritten: Sequence[str]
) -> Decisions:
    """Return the decisions with the schemes that were chosen for the units of a bit budget."""
    schemes = [unit.options[index] for unit, index in zip(budget.units, choice.taken, strict=True)]
    targets = chosen_targets(decisions.targets, budget.units, schemes)
    unquantized = find_unquantized(weights, targets, rewritten)
    return replace(decisions, targets=targets, unquantized=unquantized, choice=choice)


def importance_of_tokens(
    decisions: Decisions, blocks: Blocks, index: int, groups: Sequence[tuple[str, ...]], result: BlockResult
) -> Guide | None:
    """Return what predicts token-importance weights for the quantized linears of a block, None without any.

    If importance was asked for but could not be measured, ``result`` gets a note; not for experts, of which the plan's
    warnings already speak.

    decisions: hold the guides, by block.
    blocks: the blocks of the model.
    index: the number of the block.
    groups: names, inside the block, of linears that read one tensor.
    result: gets the note.
    """
    if decisions.guides is None:
        return None
    prefix, block = blocks.name(index), blocks.modules[index]
    guide = decisions.guides[index]
    quantized = {name for group in groups for name in group if f"{prefix}.{name}" in decisions.targets}
    missing = sorted(quantized - set(() if guide is None else guide.linears) - set(expert_linears(block)))
    if missing:
        result.notes.append(
            f"{prefix}: every token counts the same for {', '.join(missing)}, no finite gradient was measured there"
        )
    return None if guide is None else guide.only(quantized)
