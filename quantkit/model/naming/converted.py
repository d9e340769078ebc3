"""Parameters of towers that transformers computes from stored tensors: it splits, permutes or stacks them.

A tower is copied as it is stored, so that this is needed only where it runs. Matrices of the language model that would
need it are not read so: what is quantized must be written back as it was stored.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.source import Source
from quantkit.model.language import towers
from quantkit.model.naming import Naming

# What an operation raises that gets tensors of other shapes or numbers than it expects.
MISFIT = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, eq=False)
class Converted:
    """Stored tensors from which transformers computes parameters.

    transform: its rule, a ``WeightConverter``. target: the name that it gives the first parameter. stored: the pattern
    that each tensor matches, and its name, in order.
    """

    transform: Any
    target: str
    stored: tuple[tuple[str, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors."""
        return tuple(name for _, name in self.stored)

    def values(self, model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Compute the parameters, by name. read: gives a stored tensor."""
        rule = copy.deepcopy(self.transform)  # it collects tensors in itself
        for pattern, name in self.stored:
            rule.add_tensor(self.target, name, pattern, partial(read, name))
        found = rule.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def find_converted(model: nn.Module, source: Source, naming: Naming) -> dict[str, Converted]:
    """Return how parameters of towers are computed that no stored tensor holds as they are, by parameter.

    model: the skeleton. source: its checkpoint. naming: of the skeleton.
    """
    inside = tuple(f"{tower}." for tower in towers(model))
    if not inside or not naming.converters:
        return {}
    groups: dict[tuple[int, str], list[tuple[str, str]]] = {}
    rules: dict[int, Any] = {}
    for stored in sorted(source.names(), key=_in_order):
        matched = None if naming.parts_of(stored) else naming.converter(stored)
        if matched is not None:
            rule, target, pattern = matched
            rules[id(rule)] = rule
            groups.setdefault((id(rule), target), []).append((pattern, stored))
    found: dict[str, Converted] = {}
    for (rule_id, target), tensors in groups.items():
        one = Converted(rules[rule_id], target, tuple(tensors))
        shapes = _shapes(one, model, source)
        if shapes and all(name.startswith(inside) and _fits(model, name, shape) for name, shape in shapes.items()):
            found.update(dict.fromkeys(shapes, one))
    return found


def _shapes(one: Converted, model: nn.Module, source: Source) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes that a rule would give, computed without numbers; none if it cannot take these tensors."""

    def read(name: str) -> Tensor:
        info = source.info(name)
        return torch.empty(info.shape, dtype=info.dtype, device="meta")

    try:
        return {name: tuple(value.shape) for name, value in one.values(model, read).items()}
    except MISFIT:
        return {}


def _fits(model: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    owner, _, local = name.rpartition(".")
    try:
        parameter = model.get_submodule(owner)._parameters.get(local)
    except AttributeError:
        return False
    return parameter is not None and tuple(parameter.shape) == shape


def _in_order(name: str) -> list[Any]:
    """Return a key that sorts numbers in names by their value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
