"""Find how fused experts are laid out, by experiment, and replace them by linears.

Nothing is assumed: how the tensors are laid out and which half is the gate is found on a shrunken copy of the module
with random weights, and the module that takes its place must compute what the original computes. What does not fit is
refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quantkit.errors import UnsupportedModel
from quantkit.model.language import language_model, name_of
from quantkit.model.mixture.experts import Experts, fill, flat_count, is_fused
from quantkit.model.mixture.layout import GATED, ExpertLayout, Fused, usual
from quantkit.model.mixture.shrink import PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INNER, shrunken, shrunken_usual
from quantkit.model.mixture.stand_in import WrongWay
from quantkit.model.mixture.trial import REFUSALS, Call, calls, is_linear_in

USUAL = ("gate_up_proj", "down_proj")
USUAL_BIASES = tuple(f"{name}_bias" for name in USUAL)
TOLERANCE = 1e-5  # relative, float32
BEND = 1e-5  # relative second difference of what is linear; some families compute it in float32
PROBE_TOKENS, PROBE_TOP = 12, 2


def unfuse_experts(model: nn.Module) -> None:
    """Replace every fused expert module of a skeleton (parameters on meta), in place.

    Other weights of three dimensions (blocks of a recurrence, tables) are left.

    Raises UnsupportedModel, naming the module, for experts that are not understood.
    """
    layouts: dict[tuple[type, tuple[int, ...]], ExpertLayout | None] = {}
    decoder = language_model(model)  # a tower's three-dimensional weights are no experts
    for name, module in list(decoder.named_modules(prefix=name_of(model, decoder))):
        if not is_fused(module):
            continue
        shapes = tuple(d for p in module.parameters(recurse=False) for d in p.shape)
        key = (type(module), shapes)
        owner, _, local = name.rpartition(".")
        if key not in layouts:
            kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
            where = f"{kind}: {name} ({type(module).__name__})"
            try:
                layouts[key] = find_layout(module, where, parent=model.get_submodule(owner))
            except UnsupportedModel:
                if _speaks_of_experts(name, module):
                    raise
                layouts[key] = None  # something else of three dimensions: it stays as it is
        layout = layouts[key]
        if layout is not None:
            setattr(model.get_submodule(owner), local, Experts(module, layout))


def _speaks_of_experts(name: str, module: nn.Module) -> bool:
    """Whether a module calls what it holds experts: what is not understood of those is refused."""
    return any("expert" in word.lower() for word in (name, type(module).__name__, *vars(module)))


@torch.no_grad()
def find_layout(module: nn.Module, where: str, *, parent: nn.Module | None = None) -> ExpertLayout:
    """Find the layout of a fused module by experiment on a shrunken copy.

    parent: the module that holds it, which is run where the fused module cannot be by itself.

    Raises UnsupportedModel naming ``where``.
    """
    names = {name for name, p in module._parameters.items() if p is not None}
    loaded = any(True for child in module.children() for _ in child.parameters())
    reason = ""
    if hasattr(module, "_apply_gate") and not loaded and names in (set(USUAL), {*USUAL, *USUAL_BIASES}):
        layout, reason = _usual_layout(module, where)
        if layout is not None:
            return layout
    if len(names & set(USUAL_BIASES)) == 0 and all(module.get_parameter(n).dim() in (2, 3) for n in names):
        layout, trouble = _own_layout(module, parent)
        if layout is not None:
            return layout
        reason = reason or trouble
    raise UnsupportedModel(
        f"{where}: weights of three dimensions ({', '.join(sorted(names))}) that are no experts as quantkit knows them"
        f" ({reason or 'not one matrix per expert'}); not supported."
    )


def _usual_layout(module: Any, where: str) -> tuple[ExpertLayout | None, str]:
    """Try hidden states, chosen experts and their weights in, ``_apply_gate`` between the two projections.

    Returns the layout, or None and what is wrong with it.
    """
    interleaved = gates_alternate(module)
    if interleaved is None:
        raise UnsupportedModel(f"{where}: which of its outputs are gates is not understood; not supported.")
    bias = module._parameters.get(USUAL_BIASES[0]) is not None
    gate_up, down = (module.get_parameter(name) for name in USUAL)
    reason = "no layout of its weights makes sense"
    for transposed in (False, True):
        inner, hidden = (down.shape[1], down.shape[2]) if transposed else (down.shape[2], down.shape[1])
        if tuple(gate_up.shape[1:]) != ((hidden, 2 * inner) if transposed else (2 * inner, hidden)):
            continue
        if gate_up.shape[0] != down.shape[0]:
            continue
        layout = usual(transposed=transposed, interleaved=interleaved, bias=bias)
        error = _difference(module, layout)
        if error <= TOLERANCE:
            return layout, ""
        reason = f"one linear per expert computes something else, relative error {error:.1e}"
    return None, reason


def gates_alternate(module: Any) -> bool | None:
    """Tell whether gates and ups alternate, or all gates come first; None if neither shows.

    Changing ``up`` changes the activation's result evenly, changing ``gate`` does not. A linear activation shows it for
    both: then the halves are equals. Where both are bent, what transformers says of the module counts.
    """
    generator = torch.Generator().manual_seed(0)
    gate, up, step = (torch.randn(1, PROBE_INNER, generator=generator, dtype=torch.float64) for _ in range(3))

    def bend(fused: Fused, of_gate: bool) -> float:
        d = step * 0.1
        at = [(gate + d * k, up) if of_gate else (gate, up + d * k) for k in (-1, 0, 1)]
        low, mid, high = (module._apply_gate(fused.join(both)) for both in at)
        return float((low - 2 * mid + high).abs().max() / (high - low).abs().max().clamp(min=1e-30))

    orders = [Fused("gate_up_proj", GATED, interleaved=interleaved) for interleaved in (False, True)]
    fitting = [fused for fused in orders if _acts_per_channel(module, fused)]
    for fused in fitting:
        if bend(fused, False) < BEND:
            return fused.interleaved
        if bend(fused, True) >= BEND and getattr(module, "is_concatenated", None) is not fused.interleaved:
            return fused.interleaved if hasattr(module, "is_concatenated") else None
    return None


def _acts_per_channel(module: Any, fused: Fused) -> bool:
    """Whether result i depends on the i-th gate and the i-th up only, in this order of outputs."""
    base = torch.linspace(-1, 1, PROBE_INNER, dtype=torch.float64)[None]
    changed = base.clone()
    changed[0, 0] += 1
    before = module._apply_gate(fused.join((base, base.flip(1))))
    if before.shape != base.shape:
        return False
    for other in (fused.join((changed, base.flip(1))), fused.join((base, base.flip(1) + (changed - base)))):
        moved = (module._apply_gate(other) - before).abs()[0] > 1e-12
        if not bool(moved[0]) or bool(moved[1:].any()):
            return False
    return True


def _difference(module: nn.Module, layout: ExpertLayout) -> float:
    """Relative difference between a shrunken random copy of a fused module and the linears made from it."""
    generator = torch.Generator().manual_seed(0)
    small = shrunken_usual(module, layout, generator)
    linears = Experts(small, layout)
    fill(linears, small)
    x = torch.randn(PROBE_TOKENS, PROBE_HIDDEN, generator=generator)
    scores = torch.rand(PROBE_TOKENS, PROBE_EXPERTS - 1, generator=generator)  # the last expert is never chosen
    weights, chosen = scores.topk(PROBE_TOP, dim=-1)
    return _error(linears(x, chosen, weights), small(x, chosen, weights))


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _own_layout(module: nn.Module, parent: nn.Module | None) -> tuple[ExpertLayout | None, str]:
    """Try the module's own forward, or its parent's, with linears where it reads its parameters."""
    count = flat_count(module)
    names = [name for name, p in module._parameters.items() if p is not None]
    if not count and any(module.get_parameter(name).dim() != 3 for name in names):
        return None, "matrices beside those of the experts"
    fused = {name: Fused(name, ("linear",) if name == "weight" else (name,), flat=count > 0) for name in names}
    reason = "no way to call them was found"
    small, small_parent = shrunken(module, parent, count)
    for call in calls(small, small_parent, count):
        try:
            return _tried(small, call, fused), ""
        except _Different as error:
            return None, str(error)
        except REFUSALS as error:
            reason = f"its weights are used in another way: {error}"
    return None, reason


class _Different(Exception):
    """The linears compute something else."""


def _tried(small: nn.Module, call: Call, fused: dict[str, Fused]) -> ExpertLayout:
    """Return the layout with which the linears compute what the module computes in a call.

    Raises _Different, or NotOneExpert for a module that does more with its parameters than multiply.
    """
    fused = dict(fused)
    for _ in range(len(fused) + 1):
        layout = ExpertLayout(tuple(fused.values()), tuple(e.projections for e in fused.values()), own=True)
        try:
            call.check(small, layout)
        except WrongWay as error:
            old = fused[error.name]
            fused[error.name] = Fused(old.name, old.projections, not old.transposed, old.interleaved, "", old.flat)
            continue
        break
    if "gate_up_proj" in fused:
        fused["gate_up_proj"] = _halved(small, call, fused["gate_up_proj"])
    layout = ExpertLayout(tuple(fused.values()), (), own=True)
    order, difference = call.check(small, layout)
    if not difference <= TOLERANCE:
        raise _Different(f"one linear per expert computes something else, relative error {difference:.1e}")
    by_name = {entry.name: entry.projections for entry in fused.values()}
    groups = tuple(tuple(p for name in names for p in by_name[name]) for names in order)
    if sorted(p for group in groups for p in group) != sorted(layout.projections):
        raise _Different("it does not run each of its matrices once")
    return ExpertLayout(layout.fused, groups, own=True)


def _halved(small: Any, call: Call, both: Fused) -> Fused:
    """Split what holds gate and up, where it shows which is which: the result is linear in ``up`` alone."""
    if hasattr(small, "_apply_gate"):
        order = gates_alternate(small)
        orders = [] if order is None else [order]
    else:
        orders = [False, True]
    for interleaved in orders:
        halves = Fused(both.name, GATED, both.transposed, interleaved, "", both.flat)
        linear = [is_linear_in(small, call, halves, projection) for projection in GATED]
        if hasattr(small, "_apply_gate") or linear == [False, True]:
            return halves
    return both
