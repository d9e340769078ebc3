"""What an allocation chose and from what: for report, JSON and manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.algorithms.allocate import Choices
from quantkit.convert.allocation import Allocation
from quantkit.convert.probe import Unit
from quantkit.convert.targets import Target
from quantkit.core.host import size_text

POINTS = 12  # of the curve, besides the chosen one


def summary(
    allocation: Allocation,
    choices: Choices,
    damage: Sequence[Sequence[float]],
    taken: Sequence[int],
    targets: Mapping[str, Target],
    measured_on: Mapping[str, Any],
) -> dict[str, Any]:
    """damage: of every option of every unit; taken: the options that were chosen. KL in nats per token, of rounding, to second order."""
    spent = allocation.fixed + sum(costs[i] for costs, i in zip(allocation.costs, taken, strict=True))
    rows = []
    for unit, costs, found, chosen in zip(allocation.units, allocation.costs, damage, taken, strict=True):
        words = option_words(unit)
        options = {word: {"bytes": c, "kl": _short(d)} for word, c, d in zip(words, costs, found, strict=True)}
        names = [targets[name].name for name in unit.members]
        rows.append(
            {"names": names, "kind": unit.kind, "scheme": words[chosen], "bytes": costs[chosen], "options": options}
        )
    return {
        "target": allocation.asked,
        "budget_bytes": allocation.budget,
        "bytes": spent,
        "parameters": allocation.parameters,
        "model_bits_per_weight": round(allocation.bits(spent), 5),
        "predicted_kl": _short(sum(found[i] for found, i in zip(damage, taken, strict=True))),
        "measured_on": dict(measured_on),
        "curve": curve(allocation, choices, damage),
        "groups": rows,
    }


def curve(allocation: Allocation, choices: Choices, damage: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """From the least to the most that is possible, evenly in bytes: the best choice there, its size and its damage."""
    found = []
    for point in range(POINTS):
        budget = choices.least + (choices.most - choices.least) * point // (POINTS - 1)
        taken = choices.within(budget)
        spent = allocation.fixed + sum(costs[i] for costs, i in zip(allocation.costs, taken, strict=True))
        total = sum(one[i] for one, i in zip(damage, taken, strict=True))
        found.append({"model_bits_per_weight": round(allocation.bits(spent), 4), "predicted_kl": _short(total)})
    return [point for i, point in enumerate(found) if point not in found[:i]]


def allocation_lines(found: Mapping[str, Any]) -> list[str]:
    """For people: what was reached, the curve it was chosen from, and which kinds of weights got what."""
    lines = [
        f"  target    {found['target']}: {found['model_bits_per_weight']:.4f} bits per weight of the whole model ({size_text(found['bytes'])} of "
        f"{size_text(found['budget_bytes'])}); predicted KL {found['predicted_kl']:.3g} if all were rounded",
        "            bits per weight   predicted KL",
    ]
    points = [(row["model_bits_per_weight"], row["predicted_kl"], "") for row in found["curve"]]
    points.append((found["model_bits_per_weight"], found["predicted_kl"], "  <- chosen"))
    lines += [f"            {bits:15.3f}   {cost:<12.3g}{mark}".rstrip() for bits, cost, mark in sorted(points)]
    kinds: dict[str, Counter[str]] = {}
    for row in found["groups"]:
        kind = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in row["names"]))
        kinds.setdefault(kind, Counter())[row["scheme"]] += 1
    for kind, schemes in kinds.items():
        shown = ", ".join(f"{scheme} x {count}" for scheme, count in sorted(schemes.items()))
        lines.append(f"            {kind}: {shown}")
    return lines


def option_words(unit: Unit) -> list[str]:
    """What each option is called: ``W4 g64 asym``, ``16 bit``."""
    return ["16 bit" if scheme is None else scheme.describe() for scheme in unit.options]


def _short(value: float) -> float:
    return float(f"{value:.5g}")
