"""Tiny models for tests of single stages of a conversion (``from stage_models import ...``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from architectures import tiny_model
from torch import Tensor, nn

from quantkit.checkpoint.source import FolderSource
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import InputGroup
from quantkit.core.scheme import Scheme
from quantkit.model.arguments import BlockArguments
from quantkit.model.mixture.find import unfuse_experts
from quantkit.model.skeleton import Blocks, build_skeleton, find_blocks
from quantkit.model.stepper import input_groups, record
from quantkit.model.weights import Weights

IDS = torch.randint(3, 100, (9, 24), generator=torch.Generator().manual_seed(1))


@dataclass
class Stored:
    """A model in a folder, and its skeleton without weights. original: the same model, whole."""

    original: Any
    model: Any
    blocks: Blocks
    weights: Weights


def stored(folder: Path, kind: str = "llama", **changes: Any) -> Stored:
    """Save a tiny model in float32, and open it as a conversion does."""
    original = tiny_model(kind, **changes)
    original.save_pretrained(folder)
    source = FolderSource(folder)
    model = build_skeleton(source.config)
    return Stored(original, model, find_blocks(model), Weights(model, source))


@dataclass
class Layer:
    """The first block of a tiny model, float32 weights, and what enters it. call: for all windows; single: for one."""

    block: nn.Module
    states: Tensor
    call: BlockArguments
    single: BlockArguments
    names: list[tuple[str, ...]]


def first_block(kind: str = "llama", ids: Tensor = IDS) -> Layer:
    """A fresh one each time: stages change it."""
    model = tiny_model(kind).requires_grad_(False)
    unfuse_experts(model)
    fill(model)
    recording = record(model, find_blocks(model), ids)
    block, call, states = find_blocks(model).modules[0], recording.calls[0], recording.hidden
    single = record(model, find_blocks(model), ids[:1]).calls[0]
    return Layer(block, states, call, single, input_groups(block, states, call))


def fill(model: nn.Module) -> None:
    """Random numbers for the linears of experts, which have no memory once they are no longer fused."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                noise = 0.15 * torch.randn(parameter.shape, generator=generator)
                module._parameters[name] = nn.Parameter(noise, requires_grad=False)


def inputs_of(layer: Layer) -> dict[str, Tensor]:
    """Of every linear, by name inside the block: float64 [all tokens, in], caught while the block runs."""
    caught: dict[str, Tensor] = {}
    linears = {name: module for name, module in layer.block.named_modules() if isinstance(module, nn.Linear)}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: caught.update({name: args[0].reshape(-1, args[0].shape[-1]).double()})
        )
        for name, module in linears.items()
    ]
    layer.block(layer.states, *layer.call.args, **layer.call.kwargs)
    for handle in handles:
        handle.remove()
    return caught


def groups_of(layer: Layer) -> list[InputGroup]:
    """Statistics of the block's inputs, computed here."""
    caught = inputs_of(layer)
    groups = []
    for names in layer.names:
        x = caught[names[0]]
        groups.append(InputGroup(names, x.t() @ x / len(x), len(x), largest=x.abs().amax(0).float()))
    return groups


def targets_of(layer: Layer, scheme: Scheme, prefix: str = "model.layers.0") -> dict[str, Target]:
    """All linears of the block, named like their modules."""
    shapes = {name: layer.block.get_parameter(f"{name}.weight").shape for group in layer.names for name in group}
    return {
        f"{prefix}.{name}": Target(f"{prefix}.{name}", f"{prefix}.{name}.weight", *shape, scheme)
        for name, shape in shapes.items()
    }
