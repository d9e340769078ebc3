"""What a format makes of a stored weight: mostly the same numbers; some only after a rounding, which is asked for.

Rounded are, with ``--allow-rounding`` alone: scales in bfloat16 that float16 does not hold (gptq, awq, gguf), minima of
asymmetric 4 and 5 bits where Q4_1 and Q5_1 take less room than the blocks that hold them exactly, and the products of
block scales and global scale where ModelOpt multiplies and compressed-tensors divides (NVFP4). The error is measured
for each weight, against the weight as it was stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.core.blocks import KINDS
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.numbers import round_e4m3
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats import gguf
from quantkit.formats.ggml import blocks as gguf_blocks
from quantkit.formats.ggml import codes as gguf_codes
from quantkit.formats.interface import Format

HALF_SCALES = ("gptq", "awq", "gguf")  # formats whose files hold scales in float16 alone
SMALLEST_HALF, LARGEST_HALF = 2.0**-24, 65504.0  # positive numbers of float16
PIECE = 1 << 20  # weights whose change is measured at a time
ROUND = "--allow-rounding rounds them, and measures by how much"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A weight as a format holds it.

    parts: its tensors by local name. weight: what they say; of a GGUF file, what they were made of.
    error: of the rounding, relative to the weight's size; 0.0 if nothing was rounded.
    """

    parts: dict[str, Tensor]
    weight: QuantTensor
    error: float


def written_scheme(form: Format, scheme: Scheme) -> Scheme:
    """Return the scheme that a stored weight has in another format: the same, but for the dtype of scales."""
    if scheme.number == "integer" and form.name in HALF_SCALES:
        return replace(scheme, scale_dtype="float16")
    return scheme


def fit(q: QuantTensor, form: Format, *, rounding: bool, alone: bool = True) -> Fitted:
    """Return a weight in a format.

    rounding: what cannot be kept is rounded. alone: see ``gguf_codes.block_kind_for``.

    Raises CheckpointError for what the format does not hold, or would round.
    """
    scaled, changed = _with_scales_of(q, form, rounding)
    if form.name == gguf.GGUF.name:
        kind = gguf_codes.block_kind_for(scaled, rounding=rounding, alone=alone)
        parts = gguf.encode_as(scaled, kind)
        (packed,) = parts.values()
        if changed or (rounding and kind in gguf_codes.WITH_MINIMA.values()):
            return Fitted(
                parts, scaled, _error(q, lambda rows: gguf_blocks.decode(packed[rows], KINDS[kind]).dequantize())
            )
        return Fitted(parts, scaled, 0.0)
    parts = form.encode(scaled)
    return Fitted(parts, scaled, _error(q, lambda rows: scaled.rows(rows).dequantize()) if changed else 0.0)


def _error(before: QuantTensor, after: Callable[[slice], Tensor]) -> float:
    """Return the size of a change relative to the weight's, some rows at a time. after: the weight's rows now."""
    lost = size = 0.0
    out, width = before.shape
    step = max(1, PIECE // width)
    for start in range(0, out, step):
        rows = slice(start, start + step)
        was = before.rows(rows).dequantize().double()
        lost += float((after(rows).double() - was).square().sum())
        size += float(was.square().sum())
    return (lost / size) ** 0.5 if size else 0.0


def _with_scales_of(q: QuantTensor, form: Format, rounding: bool) -> tuple[QuantTensor, bool]:
    """Return the weight with scales as the format stores them, and whether one of them is another number."""
    if q.scheme.number == "nvfp4":
        return _beside_global_scale(q, rounding)
    scheme = written_scheme(form, q.scheme)
    if scheme == q.scheme:
        return q, False
    scales = q.scales.float().clamp(SMALLEST_HALF, LARGEST_HALF).to(scheme.torch_scale_dtype)
    changed = not torch.equal(scales.float(), q.scales.float())
    if changed and not rounding:
        raise CheckpointError(
            f"scales in {q.scheme.scale_dtype} are too large or too small for the {scheme.scale_dtype} of"
            f" {form.name}. {ROUND}; --format compressed-tensors or native keeps them."
        )
    return replace(q, scales=scales, scheme=scheme), changed


def _beside_global_scale(q: QuantTensor, rounding: bool) -> tuple[QuantTensor, bool]:
    divisor = q.scheme.global_scale
    assert divisor is not None
    divisor = float(torch.tensor(divisor, dtype=torch.float32))
    scales = round_e4m3(q.scales * divisor) / divisor
    if divisor == q.scheme.global_scale and torch.equal(scales, q.scales):
        return q, False
    if not rounding:
        raise CheckpointError(
            "block scales times their factor (weight_scale_2) are no E4M3 numbers divided by a float32, which is what"
            f" compressed-tensors stores. {ROUND} (some 1e-8)."
        )
    return replace(q, scales=scales, scheme=replace(q.scheme, global_scale=divisor)), True
