"""Make a small copy of a fused module, with random weights: every width and count in it becomes a small one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quantkit.core.empty_build import MOST_TENSOR
from quantkit.errors import UnsupportedModel
from quantkit.model.mixture.layout import ExpertLayout

PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INNER = 4, 16, 8
MORE = 2  # choices that are no experts
SMALL = 1 << 20  # weights of a module that is tried as it is


def shrunken_usual(module: Any, layout: ExpertLayout, generator: torch.Generator) -> Any:
    """Copy a module of the usual layout, with random weights of small shapes."""
    small = copy.copy(module)
    shapes = {"gate_up_proj": (2 * PROBE_INNER, PROBE_HIDDEN), "down_proj": (PROBE_HIDDEN, PROBE_INNER)}
    values: dict[str, nn.Parameter | None] = {}
    for fused in layout.fused:
        shape = shapes[fused.name]
        stored = shape[::-1] if fused.transposed else shape
        values[fused.name] = _random((PROBE_EXPERTS, *stored), generator)
        if fused.bias:
            values[fused.bias] = _random((PROBE_EXPERTS, shape[0]), generator)
    small.__dict__["_parameters"] = values
    small.num_experts = PROBE_EXPERTS
    _run_plainly(small)
    return small


def shrunken(module: nn.Module, parent: nn.Module | None, count: int) -> tuple[nn.Module, nn.Module | None]:
    """Copy a fused module and the one that holds it, with random weights.

    count: experts in flat matrices; 0 where they are not flat.

    Returns both; the second one runs the first.
    """
    sizes = _sizes(module, count)
    generator = torch.Generator().manual_seed(0)
    small = _copied(module, sizes, generator)
    if parent is None:
        return small, None
    holder = _copied(parent, sizes, generator, {id(module): small})
    return small, holder


def _sizes(module: nn.Module, count: int) -> dict[int, int]:
    """Map each count and width of a module to a small one, so that what is twice another one stays twice as large."""
    shapes = [tuple(p.shape) for p in module._parameters.values() if p is not None]
    if sum(torch.Size(shape).numel() for shape in shapes) <= SMALL:
        return {}
    counts = sorted({count} if count else {shape[0] for shape in shapes})
    widths = sorted({d for s in shapes for d in s[1:]} | ({s[0] // count for s in shapes} if count else set[int]()))
    sizes: dict[int, int] = {}
    fresh = iter(range(PROBE_INNER, 64 * PROBE_INNER, 2 * PROBE_INNER))
    for width in widths:
        sizes[width] = 2 * sizes[width // 2] if width % 2 == 0 and width // 2 in sizes else next(fresh)
    for number, size in enumerate(counts):
        sizes[size] = PROBE_EXPERTS + MORE * number
        if number:
            sizes[size - counts[0]] = MORE * number
    if count:
        sizes |= {s[0]: PROBE_EXPERTS * sizes[s[0] // count] for s in shapes}
    return sizes


def _copied(
    module: nn.Module,
    sizes: Mapping[int, int],
    generator: torch.Generator,
    known: Mapping[int, nn.Module] | None = None,
) -> nn.Module:
    """Copy a module with what is below it; known: copies made before, by the id of the original."""
    made = copy.copy(module)
    for key, value in list(vars(made).items()):
        if type(value) is int:
            made.__dict__[key] = sizes.get(value, value)
    made.__dict__["_parameters"] = {
        name: None if p is None else _random(tuple(sizes.get(d, d) for d in p.shape), generator)
        for name, p in module._parameters.items()
    }
    made.__dict__["_modules"] = {
        name: None if child is None else (known or {}).get(id(child)) or _copied(child, sizes, generator, known)
        for name, child in module._modules.items()
    }
    _run_plainly(made)
    return made


def _run_plainly(module: Any) -> None:
    """Take the module's plain loop, not a grouped kernel that wants certain widths."""
    config = getattr(module, "config", None)
    if config is not None:
        module.config = copy.copy(config)
        module.config._experts_implementation = "eager"


def _random(shape: tuple[int, ...], generator: torch.Generator) -> nn.Parameter:
    if 4 * math.prod(shape) > MOST_TENSOR:
        raise UnsupportedModel(
            f"config.json asks for a matrix of {' x '.join(map(str, shape))} beside small experts, wider than in any"
            " known model. The file is damaged: download it again."
        )
    return nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)
