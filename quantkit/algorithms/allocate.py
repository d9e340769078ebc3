"""Bits for many parts under one budget: the choice with the least total damage, exactly.

The damage of a whole is taken for the sum of its parts', each measured alone. With few widths and whole bits the best choice is a small
multiple-choice knapsack, solved by dynamic programming over the bits spent (Kellerer, Pferschy, Pisinger, Knapsack Problems, section 11.5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quantkit.errors import NumericsError, RequestError


def allocate(damage: Sequence[Mapping[int, float]], budget: float) -> list[int]:
    """Bits of each part: least sum of ``damage[part][bits]`` with a mean of at most ``budget`` bits. Of equals, the fewest bits.

    Raises RequestError if every part at its fewest bits is over the budget, NumericsError for a damage that is not finite.
    """
    if not damage:
        return []
    least = sum(min(choices) for choices in damage)
    most = math.floor(budget * len(damage) + 1e-6)
    if most < least:
        raise RequestError(
            f"a budget of {budget:g} bits on average: the fewest possible are {least / len(damage):g}. Use a larger one."
        )
    best: dict[int, float] = {0: 0.0}  # bits spent -> least damage
    steps: list[dict[int, int]] = []  # of each part: bits spent up to it -> its own
    for choices in damage:
        if not all(math.isfinite(cost) for cost in choices.values()):
            raise NumericsError(f"damage that is not finite: {dict(choices)}")
        after: dict[int, float] = {}
        taken: dict[int, int] = {}
        for spent, cost in best.items():
            for bits, more in sorted(choices.items()):
                total = spent + bits
                if total <= most and cost + more < after.get(total, math.inf):
                    after[total], taken[total] = cost + more, bits
        best = after
        steps.append(taken)
    spent = min(best, key=lambda bits: (best[bits], bits))
    chosen = []
    for taken in reversed(steps):
        chosen.append(taken[spent])
        spent -= chosen[-1]
    return chosen[::-1]
