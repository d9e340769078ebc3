"""The block formats that each tensor of a GGUF file may get within a size, and what everything else takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from quantkit.checkpoint.gguf_files.out_config import config_fields
from quantkit.checkpoint.gguf_files.out_names import Names
from quantkit.convert.gguf.names import config_of, written_names
from quantkit.convert.gguf.types import quantizable
from quantkit.core.blocks import KINDS, BlockKind
from quantkit.model.weights import Weights

# in rows that blocks of 256 divide; of two formats of one size the one that loses less
OF_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0")
OF_32 = ("IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def possible_kinds(in_features: int) -> tuple[BlockKind, ...]:
    """Return the block formats that rows of ``in_features`` weights can have, by their size.

    >>> [kind.name for kind in possible_kinds(96)]
    ['IQ4_NL', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0']
    """
    return tuple(KINDS[name] for name in (OF_32 if in_features % 256 else OF_256))


def by_tensor(weights: Weights, stored: Mapping[str, str]) -> dict[str, list[str]]:
    """Return modules by the tensor of the file that holds them: the experts of a layer are one.

    stored: names in the checkpoint by module, without ``.weight``.
    """
    names = Names(config_of(weights.model))
    found: dict[str, list[str]] = {}
    for module, name in stored.items():
        found.setdefault(names.place(f"{name}.weight").name, []).append(module)
    return found


def float_bytes(weights: Weights, rounded: Iterable[str]) -> int:
    """Count the bytes of all tensors that are not rounded: matrices in float16, all else in float32.

    rounded: names in the checkpoint of the others, without ``.weight``.
    """
    config = config_of(weights.model)
    names, extra = Names(config), config_fields(config)[1]
    parameters = {stored: name for name, stored in weights.names.items()}
    left_out = {f"{name}.weight" for name in rounded}
    total = sum(4 * tensor.numel() for tensor in extra.values())
    for name in written_names(weights):
        if name in left_out:
            continue
        known = parameters.get(name)
        shape = tuple(weights.source.info(name).shape if known is None else weights.tensor(known).shape)
        total += prod(shape) * (2 if quantizable(names.place(name).name, shape) else 4)
    return total
