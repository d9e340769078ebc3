"""Layers that predict further tokens (MTP): a checkpoint stores them, transformers has no module for them.

They are copied under their names, or quantized with ``--quantize-mtp``: engines draft with them. Which of their
matrices are linears is seen from the decoder blocks: the same name inside the block, and the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import RequestError
from quantkit.model.skeleton import Blocks, block_linears
from quantkit.model.weights import FLOATS, Weights


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of the checkpoint without a module: its shape, as ``nn.Linear`` has it ``[out, in]``."""

    out_features: int
    in_features: int


def matrices_without_module(weights: Weights) -> dict[str, StoredMatrix]:
    """Return the floating-point matrices that no parameter of the skeleton is read from, by module name."""
    used = {name for ref in weights.sources.values() for name in (ref.joined or (ref.name,))}
    found = {}
    for name in weights.source.names():
        if name in used or not name.endswith(".weight"):
            continue
        info = weights.source.info(name)
        if len(info.shape) == 2 and info.dtype in FLOATS:
            found[name.removesuffix(".weight")] = StoredMatrix(*info.shape)
    return found


def mtp_names(weights: Weights, blocks: Blocks) -> list[str]:
    """Return what the stored names of layers that predict further tokens begin with: ``model.layers.61.``, ``mtp.``"""
    known = _linears_inside_a_block(weights, blocks)
    roots = {ref.name.partition(".")[0] for ref in weights.sources.values()}
    begins = {
        name[:at] if name.partition(".")[0] in roots else f"{name.partition('.')[0]}."
        for name, matrix in matrices_without_module(weights).items()
        for at in _starts(name)
        if matrix in known.get(name[at:], ())
    }
    return sorted(begins)


def mtp_linears(weights: Weights, blocks: Blocks) -> dict[str, StoredMatrix]:
    """Return the linears of layers that predict further tokens, by module name in the checkpoint.

    Raises RequestError if the checkpoint stores none.
    """
    known = _linears_inside_a_block(weights, blocks)
    found = {
        name: matrix
        for name, matrix in matrices_without_module(weights).items()
        if any(matrix in known.get(name[at:], ()) for at in _starts(name))
    }
    if not found:
        raise RequestError(
            f"--quantize-mtp: {weights.source.path} stores no layers that predict further tokens, or none whose linears"
            " are named as those of its decoder blocks. Leave it out."
        )
    return found


def _linears_inside_a_block(weights: Weights, blocks: Blocks) -> dict[str, set[StoredMatrix]]:
    """Return the shapes that a linear has in any block, by its stored name inside the block (``mlp.up_proj``)."""
    known: dict[str, set[StoredMatrix]] = {}
    for index, block in enumerate(blocks.modules):
        for local, linear in block_linears(block).items():
            stored = weights.names[f"{blocks.name(index)}.{local}.weight"].removesuffix(".weight")
            inside = stored.partition(f".{index}.")[2]
            known.setdefault(inside, set()).add(StoredMatrix(linear.out_features, linear.in_features))
    return known


def _starts(name: str) -> list[int]:
    """Return where a name begins anew behind one of its dots."""
    return [at + 1 for at, letter in enumerate(name) if letter == "."]
