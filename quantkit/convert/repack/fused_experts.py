"""Experts of a dense checkpoint as transformers reads them: where it does not gather them itself, they are fused here.

Checkpoints of most families store experts one by one, and transformers gathers them on loading. Those of gpt-oss store
all experts of a layer in one tensor: of experts named one by one plain transformers would find none, and run others,
random ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UnsupportedModel
from quantkit.model.mixture.layout import Fused
from quantkit.model.naming import Naming
from quantkit.model.skeleton import build_skeleton

ONE_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


@dataclass(frozen=True, slots=True)
class Stack:
    """A fused parameter.

    fused: how it holds its experts. parts: the stored tensors that it is made of, by expert and projection.
    """

    fused: Fused
    parts: tuple[tuple[str, ...], ...]

    def shape(self, one: Sequence[int]) -> tuple[int, ...]:
        """Return the parameter's shape. one: that of a part, ``[out, in]`` or ``[out]``."""
        outputs, *inputs = one
        outputs *= len(self.fused.projections)
        inner = (*inputs, outputs) if self.fused.transposed else (outputs, *inputs)
        return (len(self.parts), *inner)

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the parameter. read: gives a part; all have one shape and dtype."""
        whole: Tensor | None = None
        for index, names in enumerate(self.parts):
            parts = [read(name) for name in names]
            joined = self.fused.join([part.t() if part.dim() == 2 else part for part in parts])
            entry = joined.t() if joined.dim() == 2 and not self.fused.transposed else joined
            if whole is None:
                whole = torch.empty((len(self.parts), *entry.shape), dtype=entry.dtype)
            whole[index] = entry
        assert whole is not None
        return whole


def fused_stacks(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, Stack]:
    """Return the parameters that have to be fused, by name; none for a model whose structure is not known.

    names: of the stored tensors. config: content of config.json.
    """
    if not any(ONE_EXPERT.search(name) for name in names):
        return {}
    try:
        naming = Naming(build_skeleton(dict(config)))
    except UnsupportedModel:
        return {}
    stored, stacks = set(names), {}
    for owner, experts in naming.experts.items():
        for fused in experts.layout.fused:
            for parameter, kind in ((fused.name, "weight"), (fused.bias, "bias")):
                parts = tuple(
                    tuple(f"{owner}.{index}.{projection}.{kind}" for projection in fused.projections)
                    for index in range(len(experts))
                )
                known = parameter and not fused.flat and not naming.gathers(f"{owner}.0.{fused.projections[0]}.weight")
                if known and stored.issuperset(name for one in parts for name in one):
                    stacks[f"{owner}.{parameter}"] = Stack(fused, parts)
    return stacks
