"""Linears of a block that stay in 16 bit, found by structure: routers, small gates, weights that are read directly.

* A router decides discretely (``model/mixture/experts.py``).
* A gate of linear attention (``in_proj_a``, ``in_proj_b``) has one output for each head. It decides how fast a state
  forgets, costs next to nothing, and the kernels of engines take no matrix of so few rows.
* A weight that the block's code multiplies itself (``dt_proj.weight @ x`` of mamba) is no packed layer's to hold.
* A kind of linear with a forward of its own may compute something else than ``x @ weight.T`` (groups of inputs, each
  with its own rows, in deepseek_v4).
"""

from __future__ import annotations

import copy
import inspect
import re
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.mixture.experts import expert_linears
from quantkit.model.mixture.routers import routers

# (outputs below which a linear is a gate, share of the block's linear weights that it stays below). Kernels of engines
# (Marlin and others) take multiples of 64 outputs. Published models have up to 128 heads of linear attention: their
# gates are a ten-thousandth of a block, keys and values of one head of attention several times that.
GATES = ((64, 0.01), (129, 0.0005))


def kept_dense(block: nn.Module) -> dict[str, str]:
    """Name the linears below a block (or a model) that stay in 16 bit, each with the reason in words."""
    kept = dict.fromkeys(sorted(routers(block)), "router")
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    whole = sum(linear.in_features * linear.out_features for linear in linears.values())
    experts = expert_linears(block)
    for name, linear in linears.items():
        owner, _, local = name.rpartition(".")
        kind: Any = type(block.get_submodule(owner))
        if not _computes_a_product(linear):
            kept.setdefault(name, "a linear that computes something else")
        elif local in _multiplied(kind):
            kept.setdefault(name, "its weight is multiplied by the block's own code")
        elif name not in experts and _is_gate(linear, whole):
            kept.setdefault(name, f"gate of {linear.out_features} outputs")
    return kept


def _is_gate(linear: nn.Linear, whole: int) -> bool:
    """Tell whether a linear is so small a part of a block of ``whole`` weights that it is a gate."""
    size, rows = linear.in_features * linear.out_features, linear.out_features
    return any(rows < outputs and size < share * whole for outputs, share in GATES)


def _computes_a_product(linear: nn.Linear) -> bool:
    """Tell whether a linear takes rows to as many rows: tried, without numbers, where its forward is its own."""
    kind: Any = type(linear)
    if kind.forward is nn.Linear.forward:
        return True
    tried: Any = copy.copy(linear)
    tried._parameters = {name: None if p is None else p.to("meta") for name, p in linear._parameters.items()}
    for rows in (5, 7):  # whatever they would be divided by
        try:
            found = tried(torch.empty(rows, linear.in_features, device="meta", dtype=linear.weight.dtype))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        if not isinstance(found, Tensor) or found.shape != (rows, linear.out_features):
            return False
    return True


@lru_cache(maxsize=256)
def _multiplied(kind: Any) -> frozenset[str]:
    """Return the names of the layers whose ``weight`` a module's code multiplies itself."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # no source: a class made at run time
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight @", source))
