"""Head and embedding in the 16 bits in which a checkpoint stores them, where the run-time dtype is float32 (CPU).

They are the largest matrices of a small model. Read as they lie in the file they are half as large, on the way too, and
the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from quantkit.model.language import name_of, output_embeddings
from quantkit.model.weights import Weights
from quantkit.runtime.kernels.cpu_layouts import HalfWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear

HALVES = (torch.bfloat16, torch.float16)


def hold_16_bit(module: Any, weights: Weights, separate: Collection[str], kernel: str | None) -> set[str]:
    """Give head and embedding their stored 16 bits; return the names of the parameters that have a value now.

    module: the skeleton; changed in place.
    weights: its stored tensors.
    separate: parameters that are not tied, whatever the config says.
    kernel: a name from ``KERNELS``, None for the measured choice.
    """
    embedding, head = module.get_input_embeddings(), output_embeddings(module)
    held: dict[str, HalfWeight] = {}
    # a kind of embedding of its own may look at the ids themselves, and keeps its weight unless the head shares it
    shared = embedding is not None and f"{name_of(module, embedding)}.weight" in weights.tied.values()
    if (type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and shared)) and not embedding.max_norm:
        _hold(f"{name_of(module, embedding)}.weight", weights, held, "")
    if type(head) is nn.Linear:
        name = f"{name_of(module, head)}.weight"
        twin = weights.tied.get(name, "")
        same = twin in held and name not in separate and weights.stored_alike(name, twin)
        _hold(name, weights, held, twin if same else "")
    for name, packed in held.items():
        owner, local = _owner(module, name)
        layer = getattr(owner, local)
        made = (
            QuantEmbedding(packed, layer, weights.dtype)
            if isinstance(layer, nn.Embedding)
            else QuantLinear(packed, layer.bias, kernel, weights.dtype)
        )
        setattr(owner, local, made)
    return set(held)


def _hold(name: str, weights: Weights, held: dict[str, HalfWeight], twin: str) -> None:
    """Read one matrix into ``held``, or let it be its twin's; leave it out where it is stored in more bits."""
    if name not in weights.names or weights.source.info(weights.stored(name)).dtype not in HALVES:
        return
    if twin:
        held[name] = held[twin]
        return
    view = weights.view(name)
    if view.value.dim() == 2 and view.value.dtype in HALVES:
        held[name] = HalfWeight(view.value, view.forget)


def _owner(module: Any, parameter: str) -> tuple[Any, str]:
    """Return the module that holds the layer of a parameter, and the layer's name in it."""
    owner, _, local = parameter.removesuffix(".weight").rpartition(".")
    return module.get_submodule(owner), local
