"""Predict the memory of a repack before it begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.checkpoint.source import TensorInfo
from quantkit.convert.plan.memory import kernel_bytes
from quantkit.convert.plan.memory_inputs import packed_model
from quantkit.core.host import current_rss, peak_rss

# tensors are written in parts of about this size: what a repack holds in memory
PART_BYTES = 1 << 26
# transformers, which knows the structure that the engines' rules ask for
LIBRARIES = 200 << 20
# A repack takes little memory, whatever the model's size: the check that runs the written model may take so much.
SAMPLE_BYTES = 1 << 29
TOO_LARGE = (
    f"no sample was generated: the whole model would need more than the {SAMPLE_BYTES >> 20} MB that this check may"
    " take; `quantkit generate` does it"
)


@dataclass(frozen=True)
class RepackNeed:
    """The memory of a repack.

    host: bytes at the peak.
    generates: whether the written model is run: only if it takes no more than SAMPLE_BYTES, or than the repack takes
        anyway.
    """

    host: int
    generates: bool


def predict_repack(
    copied: Sequence[TensorInfo], packed: int, shapes: Sequence[tuple[int, int]], calibrating: int, vocabulary: int,
    *, unpacks: bool = False,
) -> RepackNeed:  # fmt: skip
    """Predict the host memory at the peak.

    copied: tensors that are copied.
    packed: bytes of all quantized modules, as they are written.
    shapes: of each quantized module.
    calibrating: bytes that the calibration of the KV cache takes, or 0.
    vocabulary: rows of head and embedding.
    unpacks: the written model is run from floating-point weights: a GGUF file.
    """
    largest = max((info.nbytes for info in copied), default=0)
    widest = max((rows * columns for rows, columns in shapes), default=0)
    # codes as bytes, twice, and the widened integers that packing and unpacking work on; or a plain tensor three times
    libraries = 0 if "transformers" in sys.modules else LIBRARIES
    working = 2 * PART_BYTES + max(3 * largest, 14 * widest)
    sizes = [rows * columns for rows, columns in shapes]
    whole = packed_model(copied, packed, sizes, vocabulary) + kernel_bytes() + (4 * sum(sizes) if unpacks else 0)
    generates = whole <= max(SAMPLE_BYTES, working)
    host = max(peak_rss(), current_rss() + libraries + max(working, whole if generates else 0, calibrating))
    return RepackNeed(host, generates)
