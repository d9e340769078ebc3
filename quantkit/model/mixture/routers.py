"""Find the routers of a mixture: they decide discretely, cost next to nothing, and engines load them in 16 bit.

A router stands beside the experts and has one output per expert (more where some choices are no experts, as in zaya and
longcat_flash); it may own its weight (``gate``), hold a linear for it (``router.layer``), or be a small network that
ends in it. A gate that weighs a whole shared expert has one output. What gives back a hidden state is no router: shared
experts, projections around the experts, attention.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from quantkit.model.mixture.experts import Experts


def routers(model: nn.Module) -> set[str]:
    """Name the routers below a model or a block: the modules that own their weights."""
    return {name for holder, parent in _holders(model) for name in _beside(holder, parent)}


def _holders(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules that hold experts, by name; a wrapper that holds nothing else does not count."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if not isinstance(module, Experts):
            continue
        while name:
            name = name.rpartition(".")[0]
            if _children_with_weights(modules[name]) > 1:
                found[name] = modules[name]
                break
    yield from found.items()


def _children_with_weights(module: nn.Module) -> int:
    return sum(any(True for _ in child.parameters()) for child in module.children())


def _beside(name: str, holder: nn.Module) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    outputs, states = set[int](), set[int]()
    children = dict(holder.named_children())
    routed = {local for local, child in children.items() if any(_counts(m) for m in child.modules())}
    for local in routed:
        for module in children[local].modules():
            outputs |= _counts(module)
            states |= _widths(module)
    outputs.add(sum(outputs))  # routed and shared experts, weighed by one router
    for local, child in children.items():
        if local in routed:
            continue
        owners = {inner: m for inner, m in child.named_modules() if _matrix(m) is not None}
        rows = {_matrix(module)[0] for module in owners.values()}  # type: ignore[index]
        alone = set(owners) == {""} and rows <= {1}
        network = len(owners) > 1 and bool(outputs) and min(outputs) < min(rows) <= 2 * min(outputs)
        if alone or ((rows & outputs or network) and not rows & (states - outputs)):
            yield from (f"{prefix}{local}.{inner}" if inner else f"{prefix}{local}" for inner in owners)


def _matrix(module: nn.Module) -> tuple[int, int] | None:
    """Return the shape of a module's own weight, if it is a matrix."""
    weight = module._parameters.get("weight")
    return (weight.shape[0], weight.shape[1]) if weight is not None and weight.dim() == 2 else None


def _counts(module: nn.Module) -> set[int]:
    """How many outputs a router of these experts may have; empty for what is no experts."""
    return set(module.choices) if isinstance(module, Experts) else set()


def _widths(module: nn.Module) -> set[int]:
    """Widths of the states that experts read and return."""
    if not isinstance(module, Experts):
        return set()
    return {linear.out_features for linear in module[0].children() if isinstance(linear, nn.Linear)}
