"""Allocate bits to many parts under one budget: the choice with the least total sensitivity.

Sensitivity is what rounding costs: KL added, in nats per token, for weights (``calibrate.sensitivity``), the relative
change of the block's output for a KV cache (``calibrate.cache_sensitivity``). That of a whole is taken for the sum of
its parts', each measured alone. Every part takes one of its options; an option has a cost (bits, bytes) and a
sensitivity. That is the multiple-choice knapsack, solved by dynamic programming over what is spent (Kellerer, Pferschy,
Pisinger, Knapsack Problems, section 11.5): exactly, as long as the costs' common divisor leaves at most ``STATES``
sums. Beyond that costs are rounded up to a grid of ``STATES`` steps: a choice still never exceeds its budget, and
leaves less than parts / ``STATES`` of the range between the least and the most unspent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import NumericsError, RequestError

STATES = 1 << 18


@dataclass(frozen=True, slots=True)
class Option:
    """One way to quantize a part.

    cost: whole units (bits, bytes).
    sensitivity: what rounding costs, in any unit that adds up over parts.
    """

    cost: int
    sensitivity: float


class Choices:
    """The best choice for every budget at once. Of equal sensitivities the one that costs least.

    Raises NumericsError for a sensitivity that is not finite.
    """

    def __init__(self, parts: Sequence[Sequence[Option]], states: int = STATES) -> None:
        for options in parts:
            if not all(math.isfinite(option.sensitivity) for option in options):
                raise NumericsError(f"damage that is not finite: {[option.sensitivity for option in options]}")
        self.parts = [sorted(enumerate(options), key=lambda pair: pair[1].cost) for options in parts]
        self.least = sum(options[0][1].cost for options in self.parts)
        self.most = sum(options[-1][1].cost for options in self.parts)
        above = [option.cost - options[0][1].cost for options in self.parts for _, option in options]
        self._step = max(math.gcd(*above), -(-(self.most - self.least) // states), 1) if above else 1
        self._taken: list[Tensor] = []  # of each part: what is spent up to it -> index into its sorted options
        best = torch.zeros(1, dtype=torch.float64)
        for ordered in self.parts:
            best = self._add(best, ordered)
        self._best = best

    def _steps(self, options: Sequence[tuple[int, Option]]) -> list[int]:
        """Costs above the part's cheapest option, on the grid, rounded up."""
        return [-(-(option.cost - options[0][1].cost) // self._step) for _, option in options]

    def _add(self, best: Tensor, options: Sequence[tuple[int, Option]]) -> Tensor:
        """Least sensitivity by cost spent, with one part more."""
        steps = self._steps(options)
        after = torch.full((len(best) + steps[-1],), math.inf, dtype=torch.float64)
        taken = torch.zeros(len(after), dtype=torch.uint8)
        for index, (step, (_, option)) in enumerate(zip(steps, options, strict=True)):
            there = slice(step, step + len(best))
            total = best + option.sensitivity
            better = total < after[there]
            after[there] = torch.where(better, total, after[there])
            taken[there][better] = index
        self._taken.append(taken)
        return after

    def within(self, budget: int) -> list[int]:
        """Choose an option of each part (index into the options as given) for a total cost of at most ``budget``.

        Raises RequestError if the cheapest options cost more.
        """
        if budget < self.least:
            raise RequestError(f"a budget of {budget}: the least possible is {self.least}. Use a larger one.")
        room = len(self._best) - 1  # where the budget covers everything, rounding up must not forbid anything
        if budget < self.most:
            room = min(room, (budget - self.least) // self._step)
        spent = int(self._best[: room + 1].argmin())  # the first of equals
        chosen = []
        for options, taken in zip(reversed(self.parts), reversed(self._taken), strict=True):
            index = int(taken[spent])
            chosen.append(options[index][0])
            spent -= self._steps(options)[index]
        return chosen[::-1]


def allocate(sensitivity: Sequence[Mapping[int, float]], budget: float) -> list[int]:
    """Choose the bits of each part, all of one size: the least sum of ``sensitivity[part][bits]`` within the budget.

    budget: mean bits of the parts, at most. Of equal sums the one with the fewest bits is taken.

    Raises RequestError if every part at its fewest bits is over the budget, NumericsError for a sensitivity that is not
    finite.
    """
    if not sensitivity:
        return []
    widths = [sorted(choices) for choices in sensitivity]
    least, most = sum(choices[0] for choices in widths), math.floor(budget * len(sensitivity) + 1e-6)
    if most < least:
        raise RequestError(
            f"a budget of {budget:g} bits on average: the fewest possible are {least / len(sensitivity):g}."
            " Use a larger one."
        )
    parts = [
        [Option(bits, choices[bits]) for bits in order] for choices, order in zip(sensitivity, widths, strict=True)
    ]
    chosen = Choices(parts).within(most)
    return [order[index] for order, index in zip(widths, chosen, strict=True)]
