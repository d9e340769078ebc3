"""Read the NVFP4 and FP8 checkpoints of NVIDIA's ModelOpt.

Per linear ``X`` (out_features N, in_features K). ``quant_algo: NVFP4``, two E2M1 codes a byte, the even input low::

    X.weight           uint8 [N, K / 2]
    X.weight_scale     float8_e4m3fn [N, K / 16]
    X.weight_scale_2   float32, one number       w = e2m1 * (weight_scale * weight_scale_2): a FACTOR,
    X.input_scale      float32, one number       where compressed-tensors has a divisor

``quant_algo: FP8``: ``X.weight`` float8_e4m3fn [N, K], ``X.weight_scale`` and ``X.input_scale`` one number each.

The config lies in ``config.json`` (``quantization_config``) or in ``hf_quant_config.json``, under ``quantization``.
ModelOpt: torch/quantization/qtensor/nvfp4_tensor.py, torch/export/unified_export_hf.py. Weights alone are read:
``input_scale`` rounds activations in its own engines; ``load`` says that they stay as they are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.floats.compressed import GLOBAL, decode_fp4, decode_fp8
from quantkit.formats.interface import TensorHeader

SECOND, INPUT = "weight_scale_2", "input_scale"


class ModelOpt:
    name = "modelopt"
    summary = "NVFP4 and FP8 of NVIDIA's ModelOpt (read only)"

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """List quantized modules and their local tensor names. Raises CheckpointError for other algorithms."""
        inner = config.get("quantization")
        algorithm = (inner if isinstance(inner, Mapping) else config).get("quant_algo")
        if algorithm not in ("NVFP4", "FP8"):
            raise CheckpointError(f"ModelOpt's quant_algo {repr(algorithm)[:60]} is not read; NVFP4 and FP8 are.")
        stored, parts = set(names), {}
        for name in names:
            module, _, local = name.rpartition(".")
            if local == "weight_scale":
                second = (SECOND,) if algorithm == "NVFP4" else ()
                extra = (INPUT,) if f"{module}.{INPUT}" in stored else ()
                parts[module] = ("weight", "weight_scale", *second, *extra)
        return parts

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme:
        return Scheme.of("nvfp4") if SECOND in infos else Scheme.of("fp8-tensor")

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        out_features, stored = infos["weight"].shape
        return out_features, stored * (2 if bits == 4 else 1)

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor:
        """Decode one module. Raises CheckpointError, naming the tensor, when its tensors do not fit together."""
        if SECOND not in parts:
            return decode_fp8(parts, Scheme.of("fp8-tensor"))
        second = parts[SECOND]
        if second.numel() != 1 or not 0 < float(second) < float("inf"):
            raise CheckpointError(f"{SECOND} is {second.flatten()[:4].tolist()}; expected one positive number.")
        if parts["weight"].dtype != torch.uint8:
            raise CheckpointError(f"weight is {parts['weight'].dtype}; expected uint8, two codes a byte.")
        named = {"weight_packed": parts["weight"], "weight_scale": parts["weight_scale"], GLOBAL: torch.ones(1)}
        blocks = decode_fp4(named, Scheme.of("nvfp4"))
        factor = second.float().reshape(())
        scheme = replace(blocks.scheme, global_scale=float(1 / factor))
        return QuantTensor(blocks.codes, blocks.scales * factor, None, scheme)
