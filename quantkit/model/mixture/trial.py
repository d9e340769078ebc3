"""Call a fused module in the ways that families call theirs, and compare it with its linears."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.mixture.experts import Experts, fill
from quantkit.model.mixture.layout import ExpertLayout, Fused

TOKENS, TOP = 12, 2
BEND = 1e-4  # relative second difference of what is linear, in float32
# What a module raises over arguments that are not its own.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError,
            ValueError)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """Arguments that a fused module takes.

    parent: the module that is called, and holds the fused one; None where that is called itself.
    arguments: of the call.
    expected: what the original returns.
    """

    parent: nn.Module | None
    arguments: tuple[Any, ...]
    expected: Tensor

    def run(self, original: nn.Module, other: nn.Module) -> Tensor:
        """Call with another module in the place of the fused one."""
        if self.parent is None:
            return _result(other(*self.arguments))
        runner = copy.copy(self.parent)
        runner.__dict__["_modules"] = {
            name: other if child is original else child for name, child in self.parent._modules.items()
        }
        return _result(runner(*self.arguments))

    def check(self, small: nn.Module, layout: ExpertLayout) -> tuple[list[list[str]], float]:
        """Run the linears of a layout in the place of a fused module.

        Returns the parameters that were read, those that one tensor met together, in their order; and the relative
        difference of the results. Raises NotOneExpert if the module does more than multiply with them.
        """
        linears = _Watched(small, layout)
        fill(linears, small)
        found = self.run(small, linears)
        scale = self.expected.abs().max().clamp(min=1e-30)
        return linears.order(), float((found - self.expected).abs().max() / scale)


class _Watched(Experts):
    """Experts that note which of their parameters one tensor meets."""

    def __init__(self, fused: nn.Module, layout: ExpertLayout) -> None:
        super().__init__(fused, layout)
        self.__dict__["seen"] = []

    def run(self, fused: Fused, index: int, x: Tensor) -> Tensor:
        self.__dict__["seen"].append((index, x, fused.name))
        return super().run(fused, index, x)

    def order(self) -> list[list[str]]:
        """List the parameters in the order of their first use, together where they read the same numbers."""
        seen = self.__dict__["seen"]
        groups: list[tuple[Tensor, list[str]]] = []
        first = seen[0][0] if seen else None
        for index, x, name in seen:
            if index != first:
                continue
            together = next((names for other, names in groups if other is x or _equal(other, x)), None)
            if together is None:
                groups.append((x, [name]))
            else:
                together.append(name)
        return [names for _, names in groups]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def calls(small: nn.Module, parent: nn.Module | None, count: int) -> Iterator[Call]:
    """Iterate over the calls that a fused module understands, of those that are known.

    count: experts in flat matrices; 0 where they are not flat.
    """
    shapes = [tuple(p.shape) for p in small._parameters.values() if p is not None]
    experts = count and min(v for k, v in vars(small).items() if "expert" in k and type(v) is int and v > 1)
    experts = experts or min(shape[0] for shape in shapes)
    widths = dict.fromkeys(d for shape in shapes for d in (shape[1:] if len(shape) > 2 else shape[::-1]))
    for runner in (None, parent):
        module = small if runner is None else runner
        if module is None:
            continue
        for width in sorted(widths):
            for arguments in _arguments(experts, width):
                try:
                    expected = _result(module(*arguments))
                except REFUSALS:
                    continue
                if bool(torch.isfinite(expected).all()) and bool(expected.any()):
                    yield Call(runner, arguments, expected)


def _result(value: Any) -> Tensor:
    first = value[0] if isinstance(value, tuple) else value
    if not isinstance(first, Tensor):
        raise TypeError("no tensor")
    return first


def _arguments(experts: int, width: int) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, width, generator=generator)
    scores = torch.rand(TOKENS, max(1, experts - 1), generator=generator)  # the last expert is never chosen
    weights, chosen = scores.topk(min(TOP, scores.shape[1]), dim=-1)
    yield x, chosen, weights
    # all tokens for one expert after the other, those that it does not take are zeros
    taken = torch.rand(experts * TOKENS, 1, generator=generator) < 0.5
    yield (torch.randn(experts * TOKENS, width, generator=generator) * taken,)
    # sorted by expert, and how many each one takes
    sizes = [TOKENS // experts + 1] * (experts - 1)
    yield torch.randn(sum(sizes), width, generator=generator), [*sizes, 0]
    # every expert for every token, and the weight of each
    yield x[None], torch.rand(1, TOKENS, experts, generator=generator)


def is_linear_in(small: nn.Module, call: Call, fused: Fused, projection: str) -> bool:
    """Tell whether a call's result changes evenly with one projection's outputs."""
    parameter = small.get_parameter(fused.name)
    before = parameter.data.clone()
    step = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1
    outputs = step if fused.transposed else step.transpose(-1, -2)
    keep = torch.zeros(outputs.shape[-1], dtype=torch.bool)
    keep[fused.part(projection, len(keep))] = True
    outputs[..., ~keep] = 0
    found = []
    for times in (-1, 0, 1):
        parameter.data = before + times * step
        found.append(call.run(small, small))
    parameter.data = before
    low, mid, high = found
    change = (high - low).abs().max()
    return bool(change > 0) and float((low - 2 * mid + high).abs().max() / change) < BEND
