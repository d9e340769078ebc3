"""Read the MXFP4 experts of gpt-oss (``quant_method: mxfp4``): all experts of a layer in one tensor.

For a parameter ``X`` [E, in, out] of experts (``gate_up_proj``, ``down_proj``), two codes a byte, the even input low::

    X_blocks   uint8 [E, out, in / 32, 16]
    X_scales   uint8 [E, out, in / 32]       2**(byte - 127); 255 is NaN and refused

transformers: integrations/mxfp4.py, convert_moe_packed_tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.floats.compressed import decode_fp4

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"


def parameters(names: Sequence[str]) -> list[str]:
    """List the parameters that are stored as blocks and scales. Raises CheckpointError if one half is missing."""
    stored, found = set(names), []
    for name in names:
        for mine, other in ((BLOCKS, SCALES), (SCALES, BLOCKS)):
            base = name.removesuffix(mine)
            if base != name and base + other not in stored:
                raise CheckpointError(f"{name} is stored, but {base + other} is missing. The checkpoint is incomplete.")
        if name.endswith(BLOCKS):
            found.append(name.removesuffix(BLOCKS))
    if not found:
        raise CheckpointError("config.json says mxfp4, but no tensor ends in _blocks.")
    return found


def dense_shape(blocks: Sequence[int], scales: Sequence[int]) -> tuple[int, int, int]:
    """Return the parameter's shape [E, in, out] from those of its parts. Raises CheckpointError if they do not fit."""
    if len(blocks) != 4 or blocks[3] != 16 or tuple(blocks[:3]) != tuple(scales):
        raise CheckpointError(
            f"blocks {list(blocks)} and scales {list(scales)}; expected [experts, out, in / 32, 16] and the same"
            " without its last dimension"
        )
    return blocks[0], blocks[2] * 32, blocks[1]


def decode_expert(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return one expert of the parameter, float32 [in, out]. Raises CheckpointError for a scale that is NaN.

    blocks: uint8 [out, in / 32, 16]. scales: uint8 [out, in / 32].
    """
    if blocks.dtype != torch.uint8:
        raise CheckpointError(f"blocks are {blocks.dtype}; expected uint8")
    q = decode_fp4({"weight_packed": blocks.flatten(1), "weight_scale": scales}, Scheme.of("mxfp4"))
    return q.dequantize().T
