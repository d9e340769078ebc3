"""Fused linears: those that read the same tensor (q, k, v; gate, up) run as one matrix. For GPUs.

That is fewer launches of larger matrices. Which linears can be fused is found by watching one token run, not by names:
linears of one parent that are called with the very same tensor, one after the other, whose weights have one layout and
one scheme. The model's code stays as it is: the first linear that is called computes for all, the others take their
columns of its result. A linear that is called with another tensor computes again, so the result never depends on the
order of calls.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.runtime.kernels.reference import PackedWeight, WordsWeight
from quantkit.runtime.kernels.triton.layout import ROWS, TritonWeight
from quantkit.runtime.kernels.w8a8 import W8A8Weight
from quantkit.runtime.layers.linear import KERNELS, QuantLinear, linear
from quantkit.runtime.layers.weight_view import WeightView


class _Waiting(threading.local):
    """The input that was computed last, and the columns that no linear has taken yet.

    Each thread has its own, because several may run the model.
    """

    input: Tensor | None = None
    version = 0

    def __init__(self) -> None:
        self.columns: dict[int, Tensor] = {}


class FusedWeight:
    """One weight for several linears.

    splits: the rows of each.
    bias: ``[all rows]`` or None.
    """

    def __init__(self, weight: PackedWeight, splits: list[int], bias: Tensor | None) -> None:
        self.weight, self.splits, self.bias = weight, splits, bias
        self._waiting = _Waiting()

    def take(self, index: int, x: Tensor, kernel: str | None) -> Tensor:
        """Return the output of one linear, ``[..., splits[index]]``; compute all of them if ``x`` is new.

        index: the linear's place among the fused ones.
        x: ``[..., in_features]``.
        kernel: a name from ``KERNELS``, None for the measured choice.
        """
        # in inference mode tensors count no versions; they are not changed there between fused linears, which only read
        # them
        version = 0 if x.is_inference() else x._version
        waiting = self._waiting
        if waiting.input is not x or waiting.version != version or index not in waiting.columns:
            y = linear(x, self.weight, self.bias, kernel=KERNELS[kernel] if kernel else None)
            waiting.columns = dict(enumerate(y.split(self.splits, dim=-1)))
            waiting.input, waiting.version = x, version
        columns = waiting.columns.pop(index)
        if not waiting.columns:
            waiting.input = None  # nothing is kept alive between steps
        return columns


class FusedLinear(QuantLinear):
    """Takes the place of one of several linears that share ``FusedWeight``."""

    def __init__(self, fused: FusedWeight, index: int, kernel: str | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(fused.weight, None, kernel, dtype)
        self.fused, self.index = fused, index
        self.first = sum(fused.splits[:index])
        self.out_features = fused.splits[index]

    @property
    def weight(self) -> WeightView:
        """The linear's rows of the weight, as a model's own code sees them."""
        return WeightView(self.packed, self.dtype, range(self.first, self.first + self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear's columns of the fused product."""
        return self.fused.take(self.index, x, self.kernel)

    def dequantize(self) -> Tensor:
        """Return the linear's rows of the weight, float32 ``[out_features, in_features]``."""
        return self.packed.dequantize()[self.first : self.first + self.out_features]


def fuse_linears(module: Any, device: torch.device) -> list[list[str]]:
    """Replace linears that can be fused, in place; return the names of each group, in the order of their calls.

    module: the model.
    device: where it runs.
    """
    joined = []
    for names in find_fusable(module, device):
        linears = [module.get_submodule(name) for name in names]
        weight = fuse_weights([layer.packed for layer in linears])
        if weight is None:
            continue
        splits = [layer.out_features for layer in linears]
        together = FusedWeight(weight, splits, _join_biases(linears))
        for index, name in enumerate(names):
            parent, _, local = name.rpartition(".")
            setattr(
                module.get_submodule(parent),
                local,
                FusedLinear(together, index, linears[index].kernel, linears[index].dtype),
            )
        joined.append(names)
    return joined


@torch.inference_mode()
def find_fusable(module: Any, device: torch.device) -> list[list[str]]:
    """Return groups of two or more packed linears of one parent that read the same tensor, one after the other.

    They are found by running one token.

    module: the model.
    device: where it runs.
    """
    calls: list[tuple[str, Tensor]] = []  # tensors are kept, so that none takes the place of another
    names = {id(layer): name for name, layer in module.named_modules() if type(layer) is QuantLinear}
    if not names:
        return []

    def record(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls.append((names[id(layer)], inputs[0]))

    hooks = [module.get_submodule(name).register_forward_pre_hook(record) for name in names.values()]
    try:
        module.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[str]] = []
    last: Tensor | None = None
    for name, x in calls:
        if x is last and name.rpartition(".")[0] == groups[-1][0].rpartition(".")[0]:
            groups[-1].append(name)
        else:
            groups.append([name])
        last = x
    seen = [name for name, _ in calls]
    return [group for group in groups if len(group) > 1 and all(seen.count(name) == 1 for name in group)]


def fuse_weights(weights: list[PackedWeight]) -> PackedWeight | None:
    """Stack weights along their rows without packing again; None if layouts, schemes or borders do not allow it."""
    first = weights[0]
    if any(type(w) is not type(first) or w.in_features != first.in_features for w in weights):
        return None
    if not isinstance(first, (TritonWeight, WordsWeight, W8A8Weight)):
        return None
    if any(getattr(w, "scheme", None) != first.scheme for w in weights):
        return None
    if any(getattr(w, "table", "") != getattr(first, "table", "") for w in weights):
        return None
    if isinstance(first, TritonWeight) and any(w.out_features % ROWS for w in weights[:-1]):
        return None  # a brick would hold rows of two
    together = copy.copy(first)
    together.out_features = sum(w.out_features for w in weights)
    together._buffers = {
        name: None if buffer is None else torch.cat([w.get_buffer(name) for w in weights])
        for name, buffer in first._buffers.items()
    }
    return together


def _join_biases(linears: list[Any]) -> Tensor | None:
    present = [layer.bias for layer in linears if layer.bias is not None]
    if not present:
        return None
    parts = [present[0].new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
    return torch.cat([part.detach() for part in parts])
