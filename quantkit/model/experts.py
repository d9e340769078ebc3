"""Unfuse 3-D expert weights: one ``nn.Linear`` per expert and projection.

transformers 5 keeps the experts of a mixture in one module with a tensor per projection, ``gate_up_proj [E, 2I, H]``
and ``down_proj [E, H, I]`` (gpt_oss transposed, interleaved and with biases), whatever the checkpoint stores.
Statistics, quantizers and engines know experts one at a time. Nothing is assumed: how the tensors are laid out and
which half is the gate is found on a shrunken copy of the module with random weights, and the module that takes its
place must compute what the original computes. What does not fit is refused by name.

The router is what stands beside the experts in the module that holds them, and owns weights itself (``gate``,
``router``, ``shared_expert_gate``): it decides discretely, costs next to nothing, and engines load it in 16 bit. It is
not quantized.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UnsupportedModel
from quantkit.model.language import language_model, name_of

FUSED = ("gate_up_proj", "down_proj")
BIASES = {name: f"{name}_bias" for name in FUSED}
TOLERANCE = 1e-5  # relative, float32
PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INNER, PROBE_TOKENS, PROBE_TOP = 4, 16, 8, 12, 2


@dataclass(frozen=True)
class ExpertLayout:
    """How a fused module stores its experts.

    transposed: ``[E, in, out]`` instead of ``[E, out, in]``.
    interleaved: outputs of ``gate_up_proj`` alternate gate, up instead of all gates before all ups.
    bias: whether each projection has one (``gate_up_proj_bias [E, 2I]``).
    """

    transposed: bool
    interleaved: bool
    bias: bool

    def halves(self, size: int) -> dict[str, slice]:
        """Return where gate and up lie among the ``2I`` outputs."""
        if self.interleaved:
            return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        return {"gate_proj": slice(0, size // 2), "up_proj": slice(size // 2, None)}

    def pick(self, fused: Tensor, local: str) -> Tensor:
        """Cut a parameter (``gate_proj.weight``) out of one expert's entry of a fused tensor.

        fused: ``[2I, H]`` or ``[H, 2I]`` (weight), ``[2I]`` (bias).
        Returns ``[out, in]`` or ``[out]``, in memory of its own.
        """
        projection, _, kind = local.partition(".")
        value = fused.t() if kind == "weight" and self.transposed else fused
        if projection != "down_proj":
            value = value[self.halves(value.shape[0])[projection]]
        return value.clone(memory_format=torch.contiguous_format)


class Expert(nn.Module):
    """One expert: ``down_proj(activation(gate_proj(x), up_proj(x)))``."""

    def __init__(self, hidden: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias, device="meta")
        self.up_proj = nn.Linear(hidden, inner, bias, device="meta")
        self.down_proj = nn.Linear(inner, hidden, bias, device="meta")


class Experts(nn.ModuleList):
    """Takes the place of a fused module: same call, same result, one ``Expert`` per index.

    layout: how the fused tensors it stands for were laid out. The activation is the original module's own.
    """

    def __init__(self, fused: nn.Module, layout: ExpertLayout) -> None:
        down: Any = fused.down_proj
        count, *sizes = down.shape
        inner, hidden = sizes if layout.transposed else reversed(sizes)
        super().__init__(Expert(hidden, inner, layout.bias).requires_grad_(False) for _ in range(count))
        self.layout = layout
        self.signature = inspect.signature(type(fused).forward)
        gate = copy.copy(fused)  # without parameters: its activation function, and the numbers that it uses
        gate.__dict__["_parameters"] = {}
        self.__dict__["gate"] = gate  # no submodule: it has nothing to load

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the chosen experts; one that no token chose does not run.

        Arguments are hidden ``[tokens, H]``, chosen experts int64 ``[tokens, k]`` and their weights ``[tokens, k]``;
        returns ``[tokens, H]``.
        """
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
        expert: Any = self[index]
        gate, up = expert.gate_proj(x), expert.up_proj(x)
        join = _alternating if self.layout.interleaved else _concatenated
        y: Tensor = expert.down_proj(self.__dict__["gate"]._apply_gate(join(gate, up)))
        return y


def _concatenated(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([gate, up], dim=-1)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], dim=-1).flatten(-2)


def is_fused(module: nn.Module) -> bool:
    """Tell whether a module owns weights of three dimensions: experts in one piece, whatever their class is called."""
    convolution = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return not convolution and any(p is not None and p.dim() == 3 for p in module._parameters.values())


def is_routing(parent: nn.Module, child: nn.Module) -> bool:
    """Tell whether a child is a router: it has weights of its own, in the module that also holds the experts."""
    beside = any(isinstance(m, Experts) or is_fused(m) for m in parent.children() if m is not child)
    return beside and not isinstance(child, Experts) and not is_fused(child) and "weight" in child._parameters


def routers(model: nn.Module) -> set[str]:
    """Name the routers below a model or a block."""
    return {
        f"{name}.{local}" if name else local
        for name, parent in model.named_modules()
        for local, child in parent.named_children()
        if is_routing(parent, child)
    }


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
        for projection in ("gate_proj", "up_proj", "down_proj")
    }


def expert_groups(name: str, experts: Experts) -> list[tuple[str, ...]]:
    """Group the linears of each expert that read one tensor, whether or not a token reaches it.

    Gate and up share the routed state.
    """
    groups: list[tuple[str, ...]] = []
    for index in range(len(experts)):
        groups += [(f"{name}.{index}.gate_proj", f"{name}.{index}.up_proj"), (f"{name}.{index}.down_proj",)]
    return groups


def unfuse_experts(model: nn.Module) -> None:
    """Replace every fused expert module of a skeleton (parameters on meta), in place.

    Raises UnsupportedModel, naming the module, for three-dimensional weights that are no experts of a known build.
    """
    layouts: dict[tuple[type, tuple[int, ...]], ExpertLayout] = {}
    decoder = language_model(model)  # a tower's three-dimensional weights are no experts
    for name, module in list(decoder.named_modules(prefix=name_of(model, decoder))):
        if not is_fused(module):
            continue
        shapes = tuple(d for p in module.parameters(recurse=False) for d in p.shape)
        key = (type(module), shapes)
        if key not in layouts:
            kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
            layouts[key] = find_layout(module, f"{kind}: {name} ({type(module).__name__})")
        owner, _, local = name.rpartition(".")
        setattr(model.get_submodule(owner), local, Experts(module, layouts[key]))


@torch.no_grad()
def find_layout(module: nn.Module, where: str) -> ExpertLayout:
    """Find the layout of a fused module by experiment on a shrunken copy. Raises UnsupportedModel naming ``where``."""
    bias = _checked_parameters(module, where)
    gate_up, down = (module.get_parameter(name) for name in FUSED)
    interleaved = _interleaved(module, where)
    reason = "no layout of its weights makes sense"
    for transposed in (False, True):
        inner, hidden = (down.shape[1], down.shape[2]) if transposed else (down.shape[2], down.shape[1])
        expected = (hidden, 2 * inner) if transposed else (2 * inner, hidden)
        if tuple(gate_up.shape[1:]) != expected:
            continue
        layout = ExpertLayout(transposed, interleaved, bias)
        error = _difference(module, layout)
        if error <= TOLERANCE:
            return layout
        reason = f"one linear per expert computes something else (relative error {error:.1e})"
    raise UnsupportedModel(f"{where}: its experts are not understood ({reason}); not supported.")


def _checked_parameters(module: nn.Module, where: str) -> bool:
    """Whether there are biases. Raises UnsupportedModel for names other than those of a gated expert module."""
    names = {name for name, p in module._parameters.items() if p is not None}
    known = set(FUSED) | set(BIASES.values())
    if any(True for _ in module.children()):
        names |= {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if not hasattr(module, "_apply_gate") or not set(FUSED) <= names or names not in (set(FUSED), known):
        raise UnsupportedModel(
            f"{where}: weights of three dimensions ({', '.join(sorted(names))}) that are no experts as quantkit knows"
            " them; convolutions and state-space layers are not supported."
        )
    return names == known


def _interleaved(module: Any, where: str) -> bool:
    """Which outputs are gates: changing ``up`` changes the activation's result evenly, changing ``gate`` does not.

    Raises UnsupportedModel if neither order shows that. A linear activation shows it for both: then the halves are
    equals.
    """
    generator = torch.Generator().manual_seed(0)
    gate, up, step = (torch.randn(1, PROBE_INNER, generator=generator, dtype=torch.float64) for _ in range(3))

    def bend(join: Any, of_gate: bool) -> float:
        d = step * 0.1
        at = [(gate + d * k, up) if of_gate else (gate, up + d * k) for k in (-1, 0, 1)]
        low, mid, high = (module._apply_gate(join(g, u)) for g, u in at)
        return float((low - 2 * mid + high).abs().max() / (high - low).abs().max().clamp(min=1e-30))

    for interleaved, join in ((False, _concatenated), (True, _alternating)):
        if _acts_per_channel(module, join) and bend(join, False) < 1e-9:
            return interleaved
    raise UnsupportedModel(f"{where}: which of its outputs are gates is not understood; not supported.")


def _acts_per_channel(module: Any, join: Any) -> bool:
    """Whether result i depends on the i-th gate and the i-th up only, in this order of outputs."""
    base = torch.linspace(-1, 1, PROBE_INNER, dtype=torch.float64)[None]
    changed = base.clone()
    changed[0, 0] += 1
    before = module._apply_gate(join(base, base.flip(1)))
    if before.shape != base.shape:
        return False
    for other in (join(changed, base.flip(1)), join(base, base.flip(1) + (changed - base))):
        moved = (module._apply_gate(other) - before).abs()[0] > 1e-12
        if not bool(moved[0]) or bool(moved[1:].any()):
            return False
    return True


def _difference(module: nn.Module, layout: ExpertLayout) -> float:
    """Relative difference between a shrunken random copy of a fused module and the linears made from it."""
    generator = torch.Generator().manual_seed(0)
    small = _shrunken(module, layout, generator)
    linears = Experts(small, layout)
    fill(linears, small)
    x = torch.randn(PROBE_TOKENS, PROBE_HIDDEN, generator=generator)
    scores = torch.rand(PROBE_TOKENS, PROBE_EXPERTS - 1, generator=generator)  # the last expert is never chosen
    weights, chosen = scores.topk(PROBE_TOP, dim=-1)
    expected = small(x, chosen, weights)
    return float((linears(x, chosen, weights) - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _shrunken(module: Any, layout: ExpertLayout, generator: torch.Generator) -> Any:
    small = copy.copy(module)
    shapes = {"gate_up_proj": (2 * PROBE_INNER, PROBE_HIDDEN), "down_proj": (PROBE_HIDDEN, PROBE_INNER)}
    values: dict[str, nn.Parameter | None] = {}
    for name, shape in shapes.items():
        stored = shape[::-1] if layout.transposed else shape
        values[name] = nn.Parameter(torch.randn(PROBE_EXPERTS, *stored, generator=generator), requires_grad=False)
        if layout.bias:
            values[BIASES[name]] = nn.Parameter(
                torch.randn(PROBE_EXPERTS, shape[0], generator=generator), requires_grad=False
            )
    small.__dict__["_parameters"] = values
    small.num_experts = PROBE_EXPERTS
    config = getattr(module, "config", None)
    if config is not None:  # the module's plain loop, not a grouped kernel that wants certain widths
        small.config = copy.copy(config)
        small.config._experts_implementation = "eager"
    return small


def fill(linears: Experts, fused: nn.Module) -> None:
    """Give unfused experts the weights of the module they stand for (not on meta)."""
    for index, expert in enumerate(linears):
        for local, _ in list(expert.named_parameters()):
            projection, _, kind = local.partition(".")
            source: Any = fused._parameters[fused_name(local)]
            value = linears.layout.pick(source[index], local)
            expert.get_submodule(projection)._parameters[kind] = nn.Parameter(value, requires_grad=False)


def fused_name(local: str) -> str:
    """Name the fused parameter that holds an expert's parameter: ``up_proj.bias`` -> ``gate_up_proj_bias``."""
    projection, _, kind = local.partition(".")
    name = "down_proj" if projection == "down_proj" else "gate_up_proj"
    return name if kind == "weight" else BIASES[name]
