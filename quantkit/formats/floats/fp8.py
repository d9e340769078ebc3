"""Read FP8 checkpoints in the layout of DeepSeek, which transformers calls ``fp8``; ``fbgemm_fp8`` too.

Per linear ``X`` (out_features N, in_features K)::

    X.weight             float8_e4m3fn [N, K]
    X.weight_scale_inv   float32 (or 16 bit) [N / b0, K / b1], rounded up; ``weight_block_size: [b0, b1]``   or
    X.weight_scale       float32: one number, or [N, 1]; without ``weight_block_size`` (``weight_scale_inv``, too)
    X.input_scale        float32: one number, with ``activation_scheme: static`` (transformers: ``activation_scale``)

The weight is ``e4m3 * scale``: ``weight_scale_inv`` is no inverse, whatever its name says (transformers:
integrations/finegrained_fp8.py). ``activation_scheme: dynamic`` rounds activations per token, beside blocks per b1
inputs. Static activations are not rounded here: ``load`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.floats.compressed import SCALE_DTYPES, decode_fp8
from quantkit.formats.interface import TensorHeader
from quantkit.formats.stored_parts import STATIC

BLOCKS, WHOLE = "weight_scale_inv", "weight_scale"


class FP8:
    name = "fp8"
    summary = "FP8 of DeepSeek, Qwen and others: blocks, per channel, per tensor (read only)"

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """List quantized modules and their local tensor names."""
        stored, parts = set(names), {}
        for name in names:
            module, _, local = name.rpartition(".")
            if local in (BLOCKS, WHOLE):
                static = (name for name in STATIC if f"{module}.{name}" in stored)
                parts[module] = ("weight", local, *static)
        return parts

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme:
        scale = BLOCKS if BLOCKS in infos else WHOLE
        dtype = SCALE_DTYPES.get(infos[scale].dtype)
        if dtype is None:
            raise CheckpointError(f"{scale} is {infos[scale].dtype}; float32, bfloat16 and float16 are read.")
        size = config.get("weight_block_size")
        rows: int | None
        width: int | None
        if scale == BLOCKS and size is not None:
            rows, width = _block(size)
        elif size is not None:
            raise CheckpointError(f"the config says blocks of {size}, but {WHOLE} is stored in place of {BLOCKS}.")
        else:
            rows, width = (1 if infos[scale].shape[:1] == infos["weight"].shape[:1] else None), None
        scheme = Scheme(8, width, scale_dtype=dtype, number="fp8", rows=rows)
        dynamic = config.get("activation_scheme", "dynamic") == "dynamic" and not set(STATIC) & set(infos)
        return replace(scheme, activations="fp8" if dynamic else None)

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        out_features, in_features = infos["weight"].shape
        return out_features, in_features

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor:
        """Decode one module. Raises CheckpointError, naming the tensor, when its tensors do not fit together."""
        scheme = FP8.scheme(module, parts, config)
        scale = BLOCKS if BLOCKS in parts else WHOLE
        if not bool((parts[scale].float() > 0).all()):
            raise CheckpointError(f"{scale} holds a number that is not positive. Download it again.")
        if scheme.rows is None and parts[scale].numel() > 1:
            shape = list(parts[scale].shape)
            raise CheckpointError(f"{scale} is {shape}, but the config does not say weight_block_size: [rows, inputs].")
        return decode_fp8(parts, scheme, scale)


def _block(size: object) -> tuple[int, int]:
    """Return rows and inputs of a block. Raises CheckpointError for anything that is not two positive numbers."""
    if isinstance(size, list) and len(size) == 2:
        rows, width = size
        if all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 1 << 16 for n in size):
            return rows, width
    raise CheckpointError(f"{BLOCKS} is stored, but weight_block_size is {repr(size)[:60]}; expected [rows, inputs].")
