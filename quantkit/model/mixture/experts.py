"""Unfuse 3-D expert weights: one ``nn.Linear`` per expert and projection.

transformers 5 keeps the experts of a mixture in one module with a tensor per projection, ``gate_up_proj [E, 2I, H]``
and ``down_proj [E, H, I]`` in most families, whatever the checkpoint stores. Statistics, quantizers and engines know
experts one at a time. How the tensors are laid out is found by experiment (``mixture/find.py``); here are the modules
that take the place of the fused ones.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.mixture.layout import ExpertLayout, Fused
from quantkit.model.mixture.stand_in import StandIn


class _Linear(nn.Linear):
    """A linear that draws no numbers when it is made: there are thousands, on meta."""

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    """The linears of one expert, by projection."""

    def __init__(self, sizes: dict[str, tuple[int, int, bool]]) -> None:
        super().__init__()
        for projection, (inputs, outputs, bias) in sizes.items():
            setattr(self, projection, _Linear(inputs, outputs, bias, device="meta"))


class Experts(nn.Module):
    """Takes the place of a fused module: same call, same result, one ``Expert`` per index.

    layout: how the fused tensors it stands for were laid out. The activation is the original module's own, and so is
    the whole forward where ``layout.own``.
    choices: how many there are to choose from, in each tensor: some of them may be no experts (of identity).
    """

    def __init__(self, fused: nn.Module, layout: ExpertLayout) -> None:
        super().__init__()
        shapes = {name: tuple(fused.get_parameter(name).shape) for name in layout.names()}
        self.layout, self.shapes = layout, shapes
        self.choices = tuple(experts_in(fused, entry) for entry in layout.fused)
        sizes = {}
        for entry in layout.fused:
            one = entry.shape_of_one(shapes[entry.name], experts_in(fused, entry))
            inputs, outputs = one if entry.transposed else one[::-1]
            for projection in entry.projections:
                sizes[projection] = inputs, outputs // len(entry.projections), bool(entry.bias)
        for index in range(min(self.choices)):
            self.add_module(str(index), Expert(sizes).requires_grad_(False))
        self.signature = inspect.signature(type(fused).forward)
        own: Any = copy.copy(
            fused
        )  # without parameters: its forward, its activation function, the numbers that it uses
        own.__dict__["_parameters"] = {}
        own.__dict__["_modules"] = dict(own._modules)
        if getattr(own, "config", None) is not None:  # the plain loop, not a grouped kernel
            own.config = copy.copy(own.config)
            own.config._experts_implementation = "eager"
        for name, child in own._modules.items():
            if child is not None and any(True for _ in child.parameters()):
                self.add_module(name, child)
        self.__dict__["own"] = own  # no submodule: what it has to load is a child of this one

    def __len__(self) -> int:
        return min(self.choices)

    def __getitem__(self, index: int) -> Expert:
        return self.get_submodule(str(range(len(self))[index]))  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Expert]:
        return (self[index] for index in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "own" not in self.__dict__ or name.startswith("__"):
                raise
            return self._stand_ins()[name] if name in self.shapes else getattr(self.__dict__["own"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen experts; one that no token chose does not run.

        Arguments are those of the fused module. In most families hidden ``[tokens, H]``, chosen experts int64
        ``[tokens, k]`` and their weights ``[tokens, k]``; returns ``[tokens, H]``.
        """
        if self.layout.own:
            own = self.__dict__["own"]
            own.__dict__.update(self._stand_ins())
            return own(*args, **kwargs)
        hidden, chosen, weights = self._arguments(args, kwargs)
        out = torch.zeros_like(hidden)
        for index in chosen.unique().tolist():
            token, place = torch.where(chosen == index)
            y = self._one(index, hidden[token]) * weights[token, place, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _arguments(self, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        if not kwargs:
            hidden, chosen, weights = args
        else:
            _, hidden, chosen, weights = self.signature.bind(self, *args, **kwargs).args
        return hidden, chosen, weights

    def _one(self, index: int, x: Tensor) -> Tensor:
        both, down = self.layout.fused
        inner = self.__dict__["own"]._apply_gate(self.run(both, index, x))
        return self.run(down, index, inner)

    def run(self, fused: Fused, index: int, x: Tensor) -> Tensor:
        """Run what a fused parameter holds of one expert on ``x [rows, in]``; returns ``[rows, out]``."""
        expert = self[index]
        return fused.join([getattr(expert, projection)(x) for projection in fused.projections])

    def _stand_ins(self) -> dict[str, StandIn]:
        tensors = itertools.chain(self.parameters(), self.buffers())
        like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))

        def stand_in(fused: Fused) -> StandIn:
            def run(index: int, x: Tensor) -> Tensor:
                return self.run(fused, index, x)

            return StandIn(fused.name, self.shapes[fused.name], fused.transposed, run, like)

        return {fused.name: stand_in(fused) for fused in self.layout.fused}


def experts_in(module: nn.Module, fused: Fused) -> int:
    """Return how many experts one of a fused module's parameters holds."""
    return flat_count(module) if fused.flat else module.get_parameter(fused.name).shape[0]


def flat_count(module: nn.Module) -> int:
    """Return how many experts a module's matrices hold one after another; 0 if that is not what they are.

    They are two or more of the same shape, and the module says how many experts there are.
    """
    matrices = [p for p in module._parameters.values() if p is not None]
    if len(matrices) < 2 or any(p.dim() != 2 or p.shape != matrices[0].shape for p in matrices):
        return 0
    counts = {v for k, v in vars(module).items() if "expert" in k and type(v) is int and v > 1}
    return counts.pop() if len(counts) == 1 and not matrices[0].shape[0] % min(counts) else 0


def is_fused(module: nn.Module) -> bool:
    """Tell whether a module owns weights of three dimensions, or matrices one after another.

    Those are experts in one piece, whatever their class is called, or something else that is no linear.
    """
    convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    solid = any(len(shape) == 3 and min(shape[1:]) > 1 for shape in shapes)
    return not convolution and (solid or flat_count(module) > 0)


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Iterate over unfused experts below a model or a block, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield name, module


def expert_linears(block: nn.Module) -> dict[str, tuple[str, int]]:
    """Map the linears of a block's experts: name -> (name of the experts' module, index of the expert)."""
    return {
        f"{name}.{index}.{projection}": (name, index)
        for name, experts in expert_modules(block)
        for index in range(len(experts))
        for projection in experts.layout.projections
    }


def expert_groups(name: str, experts: Experts) -> list[tuple[str, ...]]:
    """Group the linears of each expert that read one tensor, whether or not a token reaches it.

    Gate and up share the routed state.
    """
    return [
        tuple(f"{name}.{index}.{projection}" for projection in group)
        for index in range(len(experts))
        for group in experts.layout.groups
    ]


def fill(linears: Experts, fused: nn.Module) -> None:
    """Give unfused experts the weights of the module they stand for (not on meta)."""
    for index, expert in enumerate(linears):
        for local, _ in list(expert.named_parameters()):
            projection, _, kind = local.partition(".")
            holder = linears.layout.holder(local)
            source = fused.get_parameter(linears.layout.fused_name(local))
            entries = source.unflatten(0, (len(linears), -1)) if holder.flat else source
            value = linears.layout.pick(entries[index], local)
            expert.get_submodule(projection)._parameters[kind] = nn.Parameter(value, requires_grad=False)
