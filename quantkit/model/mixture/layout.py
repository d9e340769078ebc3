"""How a fused module stores its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GATED = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Fused:
    """One parameter that holds a matrix of every expert.

    name: of the parameter.
    projections: what it holds of each expert: one linear, or gate and up.
    transposed: ``[E, in, out]`` instead of ``[E, out, in]``.
    interleaved: outputs alternate gate, up instead of all gates before all ups.
    bias: the parameter that holds the biases, ``[E, out]``; "" without.
    flat: experts follow each other in the first dimension, ``[E * out, in]``.
    """

    name: str
    projections: tuple[str, ...]
    transposed: bool = False
    interleaved: bool = False
    bias: str = ""
    flat: bool = False

    def part(self, projection: str, size: int) -> slice:
        """Return where a projection lies among the outputs of one expert."""
        if len(self.projections) == 1:
            return slice(0, size)
        second = self.projections.index(projection)
        if self.interleaved:
            return slice(second, None, 2)
        return slice(size // 2, None) if second else slice(0, size // 2)

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Put what the projections return where the fused matrix has it."""
        if len(outputs) == 1:
            return outputs[0]
        return torch.stack(list(outputs), dim=-1).flatten(-2) if self.interleaved else torch.cat(list(outputs), dim=-1)

    def shape_of_one(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """Return the shape of one expert's entry of a stored tensor, of ``count`` experts."""
        return (shape[0] // count, *shape[1:]) if self.flat else tuple(shape[1:])


@dataclass(frozen=True)
class ExpertLayout:
    """How a fused module stores its experts, and how they are run.

    fused: its parameters.
    groups: projections that read one tensor, in order of execution.
    own: the module's own forward runs, and meets linears where it reads its parameters; else ``Experts`` does what it
        was seen to do.
    """

    fused: tuple[Fused, ...]
    groups: tuple[tuple[str, ...], ...]
    own: bool = False

    @property
    def projections(self) -> tuple[str, ...]:
        return tuple(projection for fused in self.fused for projection in fused.projections)

    def holder(self, local: str) -> Fused:
        """Return what holds an expert's parameter or projection (``up_proj.weight``)."""
        projection = local.partition(".")[0]
        return next(fused for fused in self.fused if projection in fused.projections)

    def fused_name(self, local: str) -> str:
        """Name the fused parameter that holds an expert's parameter: ``up_proj.bias`` -> ``gate_up_proj_bias``."""
        fused = self.holder(local)
        return fused.bias if local.endswith(".bias") else fused.name

    def names(self) -> set[str]:
        """Name the fused parameters."""
        return {name for fused in self.fused for name in (fused.name, fused.bias) if name}

    def pick(self, entry: Tensor, local: str) -> Tensor:
        """Cut a parameter (``gate_proj.weight``) out of one expert's entry of a fused tensor.

        entry: ``[out, in]`` or ``[in, out]`` (weight), ``[out]`` (bias).
        Returns ``[out, in]`` or ``[out]``, in memory of its own.
        """
        projection, _, kind = local.partition(".")
        fused = self.holder(local)
        value = entry.t() if kind == "weight" and fused.transposed else entry
        return value[fused.part(projection, value.shape[0])].clone(memory_format=torch.contiguous_format)


def usual(*, transposed: bool = False, interleaved: bool = False, bias: bool = False) -> ExpertLayout:
    """Return the layout of most families: ``gate_up_proj`` and ``down_proj``, and ``_apply_gate`` between them."""
    biases = ("gate_up_proj_bias", "down_proj_bias") if bias else ("", "")
    return ExpertLayout(
        (
            Fused("gate_up_proj", GATED, transposed, interleaved, biases[0]),
            Fused("down_proj", ("down_proj",), transposed, False, biases[1]),
        ),
        (GATED, ("down_proj",)),
    )
