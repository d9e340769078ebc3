"""Scheme: how one weight becomes codes. Frozen, validated once, consumed by everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from quantkit.errors import RequestError

SCALE_DTYPES: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# Floating-point numbers (``core.rounding``): bits of a code, group size (0: any that a file has), dtypes of stored
# scales, activations that go with them.
FLOATS: dict[str, tuple[int, int, tuple[str, ...], tuple[str | None, ...]]] = {
    "fp8": (8, 0, ("float32", "bfloat16", "float16"), (None, "fp8")),
    "nvfp4": (4, 16, ("float8_e4m3fn",), (None, "nvfp4")),
    "mxfp4": (4, 32, ("float8_e8m0fnu",), (None, "mxfp4")),
}
# Numbers that the bitsandbytes library rounds to (``formats.bitsandbytes``); a block of 4 bits runs along the weight
# row by row, so that 64 is inputs per scale where rows are multiples of it.
OF_BITSANDBYTES: dict[str, tuple[int, int, tuple[str, ...], tuple[str | None, ...]]] = {
    "nf4": (4, 64, ("float32",), (None,)),
    "nf4-double": (4, 64, ("float32",), (None,)),
    "fp4": (4, 64, ("float32",), (None,)),
    "llm-int8": (8, 0, ("float32",), (None,)),
}
BLOCK = 128  # rows and inputs of a block of fp8 that share a scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one weight ``[out_features, in_features]`` becomes codes: integers, or floating-point numbers.

    bits: 2 to 8.
    group_size: number of inputs that share a scale, or None for one group per output row (per channel).
    symmetric: the zero point is ``2**(bits-1)`` and is not stored.
    scale_dtype: the dtype that scales are stored in; codes are chosen for the rounded scale.
    activations: None for floating point, or "int8": the weight's inputs are rounded at run time too, symmetric, one
        scale per token (``core.rounding.activations``); such weights have 8 bits, one scale per channel, no zero
        points: what integer matrix units multiply. "fp8", "nvfp4" and "mxfp4" round to the numbers of that name.
    number: what a code is: "integer", "fp8", "nvfp4" or "mxfp4" (``core.rounding.scales``), or one of
        ``OF_BITSANDBYTES``; those are symmetric.
    rows: of fp8: output rows that share their scales, 1, a block's number, or None for all.
    global_scale: of one weight in nvfp4: what its block scales are divided by; None until the weight is known.
    input_global_scale: the same of its activations, where they are nvfp4.

    Raises RequestError for a value outside its range, and for activations that do not go with the weights.

    >>> Scheme(bits=4, group_size=128).groups(576)      # 4 * 128 + 64: the last group is shorter
    5
    """

    bits: int
    group_size: int | None = 128
    symmetric: bool = True
    scale_dtype: str = "float16"
    activations: str | None = None
    number: str = "integer"
    rows: int | None = 1
    global_scale: float | None = None
    input_global_scale: float | None = None

    @classmethod
    def of(cls, name: str) -> Scheme:
        """Return what ``--scheme NAME`` stands for, activations in floating point. Raises RequestError.

        >>> Scheme.of("fp8-block").describe(), Scheme.of("nvfp4").describe()
        ('W8 fp8 128x128', 'W4 nvfp4')
        """
        schemes = {
            "fp8": cls(8, None, scale_dtype="float32", number="fp8"),
            "fp8-block": cls(8, BLOCK, scale_dtype="float32", number="fp8", rows=BLOCK),
            "fp8-tensor": cls(8, None, scale_dtype="float32", number="fp8", rows=None),
            "nvfp4": cls(4, 16, scale_dtype="float8_e4m3fn", number="nvfp4"),
            "mxfp4": cls(4, 32, scale_dtype="float8_e8m0fnu", number="mxfp4"),
            **{
                number: cls(bits, size or None, scale_dtype=dtypes[0], number=number)
                for number, (bits, size, dtypes, _) in OF_BITSANDBYTES.items()
            },
        }
        if name not in schemes:
            raise RequestError(f"--scheme {name}: no such scheme. Schemes: {', '.join(schemes)}; integers: --bits.")
        return schemes[name]

    def __post_init__(self) -> None:
        if self.number != "integer":
            self._check_float()
            return
        if (self.rows, self.global_scale, self.input_global_scale) != (1, None, None):
            raise RequestError(f"{self.bits} bits: integers have no shared rows and no global scale.")
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
                f"activations={self.activations!r}: activations stay in floating point (none) or are int8"
                " (fp8 and nvfp4: with --scheme)."
            )
        if self.activations is not None and (self.bits, self.group_size, self.symmetric) != (8, None, True):
            raise RequestError(
                f"{self.describe()}: int8 activations go with weights of 8 bits, one scale per channel, symmetric. "
                "Use --bits 8 --group-size channel --sym, or --activations none."
            )

    def _check_float(self) -> None:
        known = {**FLOATS, **OF_BITSANDBYTES}
        if self.number not in known:
            raise RequestError(f"number={self.number!r}: codes are integer, {', '.join(known)}.")
        bits, size, dtypes, activations = known[self.number]
        fits = self.bits == bits and self.symmetric is True and self.scale_dtype in dtypes
        grouped = self.group_size == size if size else self.group_size is None or self.group_size >= 1
        tied = self.rows == 1 or (self.number == "fp8" and (self.rows is None or self.rows >= 1))
        if not (fits and grouped and tied):
            raise RequestError(
                f"{self.number} has {bits} bits, groups of {size or 'any size'}, scales in {' or '.join(dtypes)} and no"
                f" zero points; not {self.bits} bits, {self.group_size}, {self.scale_dtype}."
            )
        if self.activations not in activations:
            allowed = " or ".join(name or "none" for name in activations)
            raise RequestError(f"--activations {self.activations}: with {self.number} weights they are {allowed}.")
        if self.number != "nvfp4" and (self.global_scale, self.input_global_scale) != (None, None):
            raise RequestError(f"{self.number} has no global scale.")

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
        """The dtype that scales are held in: float32 beside floating-point numbers, whatever the file stores."""
        return SCALE_DTYPES[self.scale_dtype] if self.number == "integer" else torch.float32

    @property
    def stored_scale_dtype(self) -> torch.dtype:
        """The dtype that scales are stored in."""
        dtype: torch.dtype = getattr(torch, self.scale_dtype)
        return dtype

    def scales_stored(self, out_features: int, in_features: int) -> int:
        """Count the scales of a weight: those that rows share once."""
        shared = out_features if self.rows is None else self.rows
        return -(-out_features // max(shared, 1)) * self.groups(in_features)

    def width(self, in_features: int) -> int:
        """Inputs per group for a weight with this many inputs (the last group may be shorter)."""
        return min(self.group_size or in_features, in_features)

    def groups(self, in_features: int) -> int:
        """Number of groups along ``in_features``; the last one may be shorter."""
        return -(-in_features // self.width(in_features))

    def describe(self) -> str:
        """Return a short name for people: ``W4 g128 asym``, ``W8A8 channel sym``, ``W8A8 fp8 channel``."""
        if self.number != "integer":
            activations = "" if self.activations is None else f"A{self.bits}"
            rows = {1: "", None: "tensor"}.get(self.rows, f"{self.rows}x{self.group_size}")
            shape = rows or ("channel" if self.group_size is None else f"g{self.group_size}")
            return f"W{self.bits}{activations} {self.number}" + (f" {shape}" if self.number == "fp8" else "")
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
            **{name: getattr(self, name) for name, usual in _OF_FLOATS.items() if getattr(self, name) != usual},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Scheme:
        """Undo ``to_json``. Raises RequestError for unknown or missing keys: an unknown key is never dropped."""
        unknown = set(data) - {field.name for field in fields(cls)}
        if unknown or "bits" not in data:
            raise RequestError(f"not a quantkit scheme: {dict(data)} (unknown keys: {sorted(unknown) or 'none'})")
        return cls(**dict(data))


_OF_FLOATS: dict[str, Any] = {"number": "integer", "rows": 1, "global_scale": None, "input_global_scale": None}
