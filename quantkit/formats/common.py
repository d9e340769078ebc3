"""Share what several formats need: group sizes that divide, zero points that fit, weights that no Scheme expresses."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.interface import Refusal

# A pattern with a repeated group, or with many open ends, may take years over one name.
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_OPEN_END = re.compile(r"(?<!\\)[*+]|\{\d*,\}")
MOST_OPEN_ENDS, MOST_PATTERN = 5, 1 << 20
# Ways to divide a name among open ends that may be tried: less than a millisecond.
MOST_WAYS = 50_000
_VARYING = re.compile(r"[|*+?{([]")  # what may make a piece of a pattern match names of several lengths
SCALE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def dividing_group_size(scheme: Scheme, in_features: int) -> int | None:
    """Return the size asked for if it divides, else the largest of 128, 64, 32 that does, else None (per channel)."""
    if scheme.group_size is None or in_features % scheme.group_size == 0:
        return scheme.group_size
    smaller = (size for size in (128, 64, 32) if size < scheme.group_size or scheme.group_size < 32)
    return next((size for size in smaller if in_features % size == 0), None)


def ragged(scheme: Scheme, in_features: int) -> Refusal | None:
    """Explain why a format without short groups cannot hold that width; None if it can."""
    if scheme.group_size is not None and in_features % scheme.group_size:
        return Refusal(f"group size {scheme.group_size} does not divide {in_features} inputs", "Use --format native.")
    return None


def weights_only(scheme: Scheme) -> Refusal | None:
    """Explain why a format whose readers keep activations in 16 bits cannot hold that scheme; None if it can."""
    if scheme.activations is None:
        return None
    return Refusal(
        "its readers know no quantized activations",
        "Use --format compressed-tensors or native, or --activations none.",
    )


def zeros_that_fit(q: QuantTensor, form: str) -> torch.Tensor:
    """Check the zero points of an asymmetric weight against a field of ``bits`` bits, and return them.

    The field holds 0 .. 2**bits - 1, a QuantTensor 2**bits too. Raises CheckpointError for one that does not fit; it is
    never rounded.
    """
    assert q.zeros is not None
    largest = int(q.zeros.max()) if q.zeros.numel() else 0
    if largest >= q.scheme.levels:
        raise CheckpointError(
            f"a zero point of {largest} does not fit into the {q.scheme.bits}-bit field of {form}. Use --format native."
        )
    return q.zeros


def scale_dtype_name(dtype: torch.dtype) -> str:
    """Return ``float16`` or ``bfloat16``. Raises CheckpointError for any other dtype of stored scales."""
    name = SCALE_NAMES.get(dtype)
    if name is None:
        words = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"scales stored as {words}; float16 and bfloat16 are read. Quantize the model again in its 16-bit dtype."
        )
    return name


def signed_scales(config: Mapping[str, Any] | None) -> bool:
    """Return whether a quantization config is AutoRound's, which stores negative scales (``formats/gptq.py``)."""
    return config is not None and (config.get("provider") == "auto-round" or "autoround_version" in config)


def indexed(
    kind: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, index: torch.Tensor, bits: int
) -> BlockTensor:
    """Make a weight whose inputs name their groups, or whose scales have 32 bits: what no QuantTensor expresses.

    kind: what error messages call it. codes: uint8 ``[out, in]``. scales: ``[out, groups]``, any floating-point dtype.
    zeros: int16 ``[out, groups]``, None where every one is ``2**(bits-1)``. index: the group of each input, ``[in]``.

    Raises CheckpointError for an index that does not fit.
    """
    groups = scales.shape[1]
    if index.numel() != codes.shape[1] or int(index.min()) < 0 or int(index.max()) >= groups:
        raise CheckpointError(
            f"g_idx names groups {int(index.min())} to {int(index.max())} for {index.numel()} inputs; {groups} groups"
            f" and {codes.shape[1]} inputs are stored"
        )
    stored = codes.numel() * bits + 8 * scales.nbytes + 32 * index.numel()
    stored += 0 if zeros is None else zeros.numel() * bits
    if zeros is None:
        zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.int16)
    raw = {"codes": codes, "scales": scales, "zeros": zeros, "g_idx": index.to(torch.int64)}
    return BlockTensor(kind, raw, (codes.shape[0], codes.shape[1]), stored, _decode_indexed)


def _decode_indexed(raw: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute ``(code - zero[g_idx]) * scale[g_idx]`` in float32 ``[out, in]``."""
    index = raw["g_idx"]
    return (raw["codes"].float() - raw["zeros"].float()[:, index]) * raw["scales"].float()[:, index]


def whole_number(config: Mapping[str, Any], name: str) -> int:
    """Return an entry of a quantization config that has to be a whole number.

    Raises CheckpointError, naming the entry, for one that is missing or anything else.
    """
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{name} is {repr(value)[:60]} in the quantization config; expected a whole number.")
    return value


def match_pattern(pattern: str, module: str) -> bool:
    """Return whether a pattern of somebody's config matches the beginning of a module's name.

    pattern: a regular expression. module: the name.

    Raises CheckpointError for a pattern that could take for ever, re.error for one that is none.
    """
    open_ends = len(_OPEN_END.findall(pattern))
    if _REPEATED_GROUP.search(pattern) or open_ends > MOST_OPEN_ENDS or len(pattern) > MOST_PATTERN:
        raise CheckpointError(
            f"the pattern {pattern[:80]!r} repeats a group, or has more than {MOST_OPEN_ENDS} '*' and '+': matching it"
            " could take for ever. Write it simpler."
        )
    rewritten = _without_backtracking(pattern)
    if rewritten == pattern and math.comb(len(module) + open_ends, open_ends) > MOST_WAYS:
        raise CheckpointError(
            f"the pattern {pattern[:80]!r} has {open_ends} '*' and '+', and {module[:80]!r} is long: matching it could"
            " take for ever. Write it simpler."
        )
    return re.match(rewritten, module) is not None


@functools.lru_cache(maxsize=1024)
def _without_backtracking(pattern: str) -> str:
    """Rewrite ``.*A.*B.*C`` so that the first place of A and of B is taken and never given back.

    For pieces of one length each that changes no answer: an earlier place leaves more to those after it. A pattern with
    other pieces is returned as it is.
    """
    first, *rest = pattern.split(".*")
    if len(rest) < 2 or any(_VARYING.search(piece) or piece.endswith("\\") for piece in (first, *rest)):
        return pattern
    taken = [f"(?=(?P<_{n}>.*?{piece}))(?P=_{n})" for n, piece in enumerate(rest[:-1])]
    return f"{first}{''.join(taken)}.*{rest[-1]}"
