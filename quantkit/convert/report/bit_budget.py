"""The choice within a bit budget: for report, JSON and manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.checkpoint.storage.record import POSITIVE
from quantkit.convert.options.rules import scheme_words
from quantkit.convert.plan.bit_budget import BitBudget
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import BudgetChoice
from quantkit.core.host import size_text

# of the curve, besides the chosen one
POINTS = 12


# of ``summary``, as checkpoint/storage/record.py checks it
ALLOCATION = {
    "target": str, "budget_bytes": int, "bytes": int, "parameters": POSITIVE, "model_bits_per_weight": float,
    "predicted_kl": float, "measured_on": dict, "curve": [{"model_bits_per_weight": float, "predicted_kl": float}],
    "groups": [
        {"names": [str], "kind": str, "scheme": str, "bytes": int, "options": {str: {"bytes": int, "kl": float}}}
    ],
}  # fmt: skip


def summary(budget: BitBudget, choice: BudgetChoice, targets: Mapping[str, Target]) -> dict[str, Any]:
    """Return the option that was chosen for each unit of a bit budget, and the other options.

    KL is the divergence that rounding adds, in nats per token, to second order.

    budget: the bit budget.
    choice: the chosen options.
    targets: by module name of the skeleton.
    """
    rows = []
    for unit, costs, sensitivities, taken in zip(
        budget.units, budget.costs, choice.sensitivity, choice.taken, strict=True
    ):
        words = [scheme_words(scheme) for scheme in unit.options]
        options = {
            word: {"bytes": cost, "kl": _short(kl)} for word, cost, kl in zip(words, costs, sensitivities, strict=True)
        }
        names = [targets[name].name for name in unit.members]
        rows.append(
            {"names": names, "kind": unit.kind, "scheme": words[taken], "bytes": costs[taken], "options": options}
        )
    size, kl = _cost(budget, choice.sensitivity, choice.taken)
    return {
        "target": budget.asked,
        "budget_bytes": budget.budget,
        "bytes": size,
        "parameters": budget.parameters,
        "model_bits_per_weight": round(budget.bits(size), 5),
        "predicted_kl": _short(kl),
        "measured_on": dict(choice.measured_on),
        "curve": curve(budget, choice.sensitivity),
        "groups": rows,
    }


def curve(budget: BitBudget, sensitivity: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """Return bits and KL of the best choice at sizes from the least to the largest possible, in even steps of bytes.

    budget: the bit budget.
    sensitivity: by unit and option, in nats per token.
    """
    choices = budget.choices(sensitivity)
    points = []
    for point in range(POINTS):
        room = choices.least + (choices.most - choices.least) * point // (POINTS - 1)
        size, kl = _cost(budget, sensitivity, choices.within(room))
        points.append({"model_bits_per_weight": round(budget.bits(size), 4), "predicted_kl": _short(kl)})
    return [point for index, point in enumerate(points) if point not in points[:index]]


def _cost(budget: BitBudget, sensitivity: Sequence[Sequence[float]], taken: Sequence[int]) -> tuple[int, float]:
    """Return the bytes of the checkpoint, and the KL divergence that its rounding adds, in nats per token."""
    size = budget.fixed + sum(costs[index] for costs, index in zip(budget.costs, taken, strict=True))
    return size, sum(kls[index] for kls, index in zip(sensitivity, taken, strict=True))


def allocation_lines(chosen: Mapping[str, Any]) -> list[str]:
    """Describe for people the reached size, the curve that it was chosen from, and the schemes by kind of weight.

    chosen: as ``summary`` returns it.
    """
    lines = [
        (
            f"  target    {chosen['target']}: {chosen['model_bits_per_weight']:.4f} bits per weight of the whole model"
            f" ({size_text(chosen['bytes'])} of {size_text(chosen['budget_bytes'])}); predicted KL"
            f" {chosen['predicted_kl']:.3g} if all were rounded"
        ),
        "            bits per weight   predicted KL",
    ]
    points = [(row["model_bits_per_weight"], row["predicted_kl"], "") for row in chosen["curve"]]
    points.append((chosen["model_bits_per_weight"], chosen["predicted_kl"], "  <- chosen"))
    lines += [f"            {bits:15.3f}   {cost:<12.3g}{mark}".rstrip() for bits, cost, mark in sorted(points)]
    kinds: dict[str, Counter[str]] = {}
    for row in chosen["groups"]:
        kind = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in row["names"]))
        kinds.setdefault(kind, Counter())[row["scheme"]] += 1
    for kind, schemes in kinds.items():
        shown = ", ".join(f"{scheme} x {count}" for scheme, count in sorted(schemes.items()))
        lines.append(f"            {kind}: {shown}")
    return lines


def _short(value: float) -> float:
    return float(f"{value:.5g}")
