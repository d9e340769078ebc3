"""What the tensors of a packed weight may hold, whatever the format: checked by name as they come from a file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.interface import TensorHeader

# Local names of all formats: dimensions and dtypes. A name that is not here is checked for its values alone.
INT32, INDEX = (torch.int32,), (torch.int32, torch.int64)
LAYOUTS: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
    "qweight": (2, INT32),
    "qzeros": (2, INT32),
    "g_idx": (1, INDEX),
    "shape": (1, INDEX),
    "weight_packed": (2, (torch.int32, torch.uint8)),
    "weight_zero_point": (2, INT32),
    "weight_g_idx": (1, INDEX),
    "weight_shape": (1, INDEX),
}
FLOAT_CODES = (torch.float8_e4m3fn, torch.uint8)  # one scale may serve the whole matrix there: a number, or [1]
STATIC = ("input_scale", "activation_scale")  # fixed scales of activations, as different tools call them
GLOBAL_SCALES = ("weight_global_scale", "input_global_scale", "weight_scale_2", *STATIC)
POSITIVE = ("scales", "weight_scale")
NOT_NEGATIVE = ("SCB",)
# The largest scale, by dtype: in float16 only what overflowed comes near 65504, and weights that need more than 2**24
# in another dtype are no weights. What is below the smallest normal float32 is 0 in some kernels; the smallest scale
# that a writer stores in float16, 6e-8, is above it.
LARGEST_HALF, LARGEST_SCALE, SMALLEST_SCALE = 2.0**15, 2.0**24, 2.0**-126


def check_layouts(infos: Mapping[str, TensorHeader]) -> None:
    """Check the headers of one module's tensors.

    infos: dtype and shape by local name.

    Raises CheckpointError, naming the tensor, for one that is empty, or of other dimensions or dtype than it has.
    """
    pointed = any(info.dtype in FLOAT_CODES for name, info in infos.items() if name in ("weight", "weight_packed"))
    for name, info in infos.items():
        shape = list(info.shape)
        if 0 in shape:
            raise CheckpointError(f"{name} has shape {shape}, which holds nothing. Download it again.")
        if name in LAYOUTS:
            dimensions, dtypes = LAYOUTS[name]
            if len(shape) != dimensions or info.dtype not in dtypes:
                wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise CheckpointError(
                    f"{name} is {str(info.dtype).removeprefix('torch.')} {shape}; expected {wanted} of"
                    f" {dimensions} dimensions. Download it again."
                )
        elif name in POSITIVE and len(shape) != 2 and not (pointed and len(shape) < 2):
            raise CheckpointError(f"{name} has shape {shape}; expected 2 dimensions. Download it again.")


def check_values(parts: Mapping[str, Tensor], *, signed: bool = False) -> None:
    """Check the scales of one module, and every other number that is no code.

    parts: tensors by local name.
    signed: scales may be negative, see ``formats.common.signed_scales``.

    Raises CheckpointError, naming the tensor, for numbers that are not finite, and for scales that no writer stores.
    """
    for name, tensor in parts.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        lowest, highest = (float(bound) for bound in torch.aminmax(tensor.float()))
        if not (abs(lowest) < float("inf") and abs(highest) < float("inf")):
            raise CheckpointError(f"{name} holds numbers that are not finite. Download it again.")
        if name in GLOBAL_SCALES:
            if lowest <= 0:
                raise CheckpointError(f"{name} holds {lowest:.4g}; scales are positive numbers. Download it again.")
            continue
        most = LARGEST_HALF if tensor.dtype == torch.float16 else LARGEST_SCALE
        if max(abs(lowest), abs(highest)) > most:
            raise CheckpointError(
                f"{name} holds {max(lowest, highest, key=abs):.4g}, more than any scale ({most:g}): its"
                " weights would be absurd. Download it again."
            )
        least = float(tensor.float().abs().min()) if signed else lowest
        if name in POSITIVE and tensor.dtype != torch.float8_e4m3fn and least < SMALLEST_SCALE:
            raise CheckpointError(f"{name} holds {lowest:.4g}; scales are positive numbers. Download it again.")
        if (name in NOT_NEGATIVE or name.endswith("absmax")) and lowest < 0:
            raise CheckpointError(f"{name} holds {lowest:.4g}, which is no largest magnitude. Download it again.")


def require_shape(name: str, tensor: Tensor, expected: tuple[int, int], reason: str) -> None:
    """Raise CheckpointError, naming the tensor, for one of another shape.

    name: local name. tensor: as it is stored. expected: its shape. reason: what implies that shape, for the message.
    """
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{name} {list(tensor.shape)} does not fit {reason}, which needs {list(expected)}. The config belongs to"
            " other weights."
        )
