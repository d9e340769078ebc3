"""What engines ask of the parts that tensor parallelism gives to a rank, beside whole heads and groups."""

from __future__ import annotations

from quantkit.convert.engines.conditions import int8_activations
from quantkit.convert.engines.rules import Checkpoint, fused_rows


def packed_zeros(c: Checkpoint, ranks: int) -> str | None:
    """Object if zero points, packed along the rows, do not give a rank whole words."""
    if all(weight.scheme.symmetric for weight in c.linears):
        return None
    for name, bits, rows, _ in fused_rows(c, ranks):
        if rows * bits % 32:
            return f"{name}: {rows:g} rows a rank do not fill whole words of zero points."
    return None


def marlin_tiles(c: Checkpoint, ranks: int) -> str | None:
    """Object to shapes that do not fill Marlin's tiles: SGLang checks them and does not pad."""
    if int8_activations(c):
        return None
    for name, _, rows, inputs in fused_rows(c, ranks):
        if rows % 64:
            return f"{name}: {rows:g} rows a rank (with its siblings) are no multiple of 64."
        if inputs % 128:
            return f"{name}: {inputs:g} inputs a rank are no multiple of 128."
    return None


def divisible(c: Checkpoint, ranks: int) -> str | None:
    """Object to a matrix that cannot be split evenly."""
    for name, _, rows, inputs in fused_rows(c, ranks):
        if rows % 1 or inputs % 1:
            return f"{name} cannot be split evenly."
    return None


def int8_tiles(c: Checkpoint, ranks: int) -> str | None:
    """Object to shapes that SGLang's int8_scaled_mm does not take: rows of whole 16 bytes, 8 outputs at a time."""
    if not int8_activations(c):
        return None
    for name, _, rows, inputs in fused_rows(c, ranks):
        if rows % 8 or inputs % 16:
            return f"{name}: {rows:g} rows and {inputs:g} inputs a rank are no multiples of 8 and 16."
    return None
