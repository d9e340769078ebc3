"""``--rule PATTERN=TYPE`` for a GGUF file: the block format that a rule gives to a tensor, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quantkit.convert.gguf.choices import by_tensor
from quantkit.convert.gguf.types import FALLBACKS, Chosen
from quantkit.convert.options.rules import Problem, Rule
from quantkit.core.blocks import KINDS
from quantkit.errors import RequestError
from quantkit.model.weights import Weights


def by_rule(rule: Rule, shape: tuple[int, ...]) -> Chosen | str:
    """Return the format that a rule gives to a matrix, or why its rows cannot have it.

    rule: ``keep`` (F16) or a block format. shape: ``(out_features, in_features)``.
    """
    if rule.block is None:
        return Chosen("F16")
    width = KINDS[rule.block].width
    if shape[-1] % width == 0:
        return Chosen(rule.block)
    other = FALLBACKS.get(rule.block, "keep")
    instead = "keep" if other == "keep" or shape[-1] % KINDS[other].width else other
    return f"rows of {shape[-1]} are no multiple of {width}, a block of {rule.block}. Use {instead.lower()} there."


def one_rule(names: Sequence[str], taken: Mapping[str, Rule]) -> Rule | None:
    """Return the rule that takes a tensor, None if none does.

    names: by which rules may refer to it; a tied matrix has two. taken: rules by name.

    Raises RequestError if they have rules that differ.
    """
    rules = {(rule.keep, rule.block): rule for name in names if (rule := taken.get(name)) is not None}
    if len(rules) > 1:
        texts = " and ".join(f"--rule {rule.text!r}" for rule in rules.values())
        raise RequestError(f"{' and '.join(names)} are one matrix (tied): {texts} contradict each other. Drop one.")
    return next(iter(rules.values()), None)


def split_experts(weights: Weights, formats: Mapping[str, str]) -> list[Problem]:
    """Return the tensors of experts whose parts would have different formats: a layer's experts are one tensor.

    formats: by stored name, without ``.weight``.
    """
    tensors = by_tensor(weights, {name: name for name in formats})
    problems = []
    for tensor, names in tensors.items():
        found = sorted({formats[name] for name in names})
        if len(found) > 1:
            problems.append(Problem(tensor, f"its experts are one tensor, and rules give {' and '.join(found)}."))
    return problems
