"""How much memory a repack takes, before it begins."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.checkpoint.source import TensorInfo
from quantkit.convert.memory import GENERATE_BYTES, kernel_bytes
from quantkit.convert.sizes import packed_model
from quantkit.core.host import current_rss, peak_rss
from quantkit.core.scheme import Scheme

PART_BYTES = 1 << 26  # tensors are written in parts of about this size: what a repack holds in memory
LIBRARIES = 200 << 20  # transformers, which knows the structure that the engines' rules ask for


@dataclass(frozen=True)
class RepackNeed:
    """host: bytes at the peak. generates: whether the written model is run: within memory.GENERATE_BYTES, or what the repack takes anyway."""

    host: int
    generates: bool


def predict_repack(
    kept: Sequence[TensorInfo],
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
    calibrating: int,
) -> RepackNeed:
    """kept: tensors that are copied. schemes, shapes: of each quantized module. calibrating: bytes that the cache's calibration takes, or 0."""
    largest = max((info.nbytes for info in kept), default=0)
    widest = max((rows * columns for rows, columns in shapes.values()), default=0)
    # codes as bytes, twice, and the widened integers that packing and unpacking work on; or a plain tensor three times
    libraries = 0 if "transformers" in sys.modules else LIBRARIES
    working = 2 * PART_BYTES + max(3 * largest, 14 * widest)
    packed = sum(packed_bytes(scheme, shapes[name]) for name, scheme in schemes.items())
    whole = packed_model(kept, packed, [n * k for n, k in shapes.values()]) + kernel_bytes()
    generates = whole <= max(GENERATE_BYTES, working)
    host = max(peak_rss(), current_rss() + libraries + max(working, whole if generates else 0, calibrating))
    return RepackNeed(host, generates)


def packed_bytes(scheme: Scheme, shape: tuple[int, int]) -> int:
    groups = shape[0] * scheme.groups(shape[1])
    zero_bits = 0 if scheme.symmetric else scheme.bits
    return (shape[0] * shape[1] * scheme.bits + groups * (16 + zero_bits)) // 8
