"""Scheme: how one weight becomes integers. Frozen, validated once, consumed by everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.errors import RequestError

SCALE_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one weight ``[out_features, in_features]`` becomes integers.

    bits: 2 to 8.
    group_size: number of inputs that share a scale, or None for one group per output row (per channel).
    symmetric: the zero point is ``2**(bits-1)`` and is not stored.
    scale_dtype: the dtype that scales are stored in; codes are chosen for the rounded scale.
    activations: None for floating point, or "int8": the weight's inputs are rounded at run time too, symmetric, one
        scale per token (``core.activations``); such weights have 8 bits, one scale per channel, no zero points: what
        integer matrix units multiply.

    Raises RequestError for a value outside its range, and for activations that do not go with the weights.

    >>> Scheme(bits=4, group_size=128).groups(576)      # 4 * 128 + 64: the last group is shorter
    5
    """

    bits: int
    group_size: int | None = 128
    symmetric: bool = True
    scale_dtype: str = "float16"
    activations: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise RequestError(f"bits={self.bits}: quantkit quantizes to 2, 3, 4, 5, 6, 7 or 8 bits.")
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise RequestError(
                f"group_size={self.group_size}: a group size is a positive number of inputs "
                "(32, 64 or 128 load in most engines), or 'channel' for one scale per output row."
            )
        if not isinstance(self.symmetric, bool):
            raise RequestError(f"symmetric={self.symmetric!r}: a scheme is symmetric or not, True or False.")
        if self.scale_dtype not in SCALE_DTYPES:
            raise RequestError(f"scale_dtype={self.scale_dtype!r}: scales are stored as {' or '.join(SCALE_DTYPES)}.")
        if self.activations not in (None, "int8"):
            raise RequestError(
                f"activations={self.activations!r}: activations stay in floating point (none) or are int8."
            )
        if self.activations is not None and (self.bits, self.group_size, self.symmetric) != (8, None, True):
            raise RequestError(
                f"{self.describe()}: int8 activations go with weights of 8 bits, one scale per channel, symmetric. "
                "Use --bits 8 --group-size channel --sym, or --activations none."
            )

    @property
    def levels(self) -> int:
        """Number of codes, ``2**bits``; codes run from 0 to levels - 1."""
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric scheme, ``2**(bits-1)``."""
        return 1 << (self.bits - 1)

    @property
    def torch_scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale_dtype]

    def width(self, in_features: int) -> int:
        """Inputs per group for a weight with this many inputs (the last group may be shorter)."""
        return min(self.group_size or in_features, in_features)

    def groups(self, in_features: int) -> int:
        """Number of groups along ``in_features``; the last one may be shorter."""
        return -(-in_features // self.width(in_features))

    def describe(self) -> str:
        """Return a short name for people: ``W4 g128 asym``, ``W8A8 channel sym``."""
        group = "channel" if self.group_size is None else f"g{self.group_size}"
        activations = "" if self.activations is None else "A8"
        return f"W{self.bits}{activations} {group} {'sym' if self.symmetric else 'asym'}"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that ``from_json`` reads back.

        Activations are in it only where they are quantized, so that a quantkit which does not know them reads
        weight-only models and refuses the others.
        """
        activations = {} if self.activations is None else {"activations": self.activations}
        return {
            "bits": self.bits,
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "scale_dtype": self.scale_dtype,
            **activations,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scheme:
        """Undo ``to_json``. Raises RequestError for unknown or missing keys: an unknown key is never dropped."""
        unknown = set(data) - {"bits", "group_size", "symmetric", "scale_dtype", "activations"}
        if unknown or "bits" not in data:
            raise RequestError(f"not a quantkit scheme: {dict(data)} (unknown keys: {sorted(unknown) or 'none'})")
        return cls(**dict(data))
