"""Complete the statistics of experts that saw few tokens with the layer's average.

An expert's Hessian H_e is a mean over the n tokens that were routed to it. With fewer tokens than inputs d it has no
full rank: solving on it fits the few tokens that came by. The mean H over everything that any expert of the layer
received at the same projection (for gate and up: every token of the layer, as often as it was routed) fills the gap::

    n >= d      H_e
    0 < n < d   (n H_e + (d - n) H) / d
    n = 0       H

The largest entries of its inputs become those of the whole layer. So a starved expert is still quantized for the inputs
of its layer, and the report names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quantkit.calibrate.stats import Hessian, InputRoot
from quantkit.errors import NumericsError
from quantkit.model.mixture.experts import expert_linears


@dataclass(frozen=True)
class Starved:
    """Experts of one module that fewer tokens reached than they have inputs: index -> tokens."""

    module: str
    tokens: dict[int, int]
    inputs: int

    def describe(self) -> str:
        """For the report: which experts, and what was done."""
        each = ", ".join(f"{index} ({count})" for index, count in sorted(self.tokens.items()))
        return (
            f"{self.module}: {len(self.tokens)} experts saw fewer tokens than their {self.inputs} inputs; their "
            f"statistics were completed with the layer's average. Expert (tokens): {each}"
        )


def share_statistics(
    block: nn.Module, groups: Sequence[tuple[str, ...]], hessians: Sequence[Hessian | InputRoot]
) -> list[Starved]:
    """Complete the statistics of starved experts, in place.

    groups, hessians: as ``observe`` takes and gives them.

    Raises NumericsError if no token reached any expert of a module.
    """
    of_expert = expert_linears(block)
    pools: dict[tuple[str, str], dict[int, Hessian]] = {}
    for names, hessian in zip(groups, hessians, strict=True):
        if names[0] in of_expert:
            assert isinstance(hessian, Hessian)  # ``observe`` keeps no inputs of experts
            module, index = of_expert[names[0]]
            projection = names[0].rpartition(".")[2]
            pools.setdefault((module, projection), {})[index] = hessian
    widest: dict[str, Starved] = {}
    for (module, _), pool in pools.items():
        starved = _complete(module, pool)
        if starved.tokens and (module not in widest or starved.inputs > widest[module].inputs):
            widest[module] = starved
    return list(widest.values())


def _complete(module: str, pool: dict[int, Hessian]) -> Starved:
    width = next(iter(pool.values())).sum.shape[0]
    tokens = {index: hessian.tokens for index, hessian in pool.items() if hessian.tokens < width}
    total = sum(hessian.tokens for hessian in pool.values())
    if not total:
        raise NumericsError(f"{module}: no calibration token reached any of its experts; its router is damaged.")
    if tokens:
        everything = sum(hessian.sum for hessian in pool.values()) / total
        largest = torch.stack([hessian.largest for hessian in pool.values()]).amax(0)
        for index in tokens:
            hessian = pool[index]
            hessian.largest = largest.clone()
            hessian.sum += everything * (width - hessian.tokens)
            hessian.tokens = width
    return Starved(module, tokens, width)
