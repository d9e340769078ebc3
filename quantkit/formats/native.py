"""native: quantkit's own format. 2 to 8 bits, any group size, a short last group, any shape.

Per linear ``X`` (out_features N, in_features K, groups G = ceil(K / group_size))::

    X.qweight   int32   [N, ceil(K * bits / 32)]   codes packed along K, one dense LSB-first stream per row
    X.scales    fp16 or bf16 [N, G]
    X.qzeros    int32   [N, ceil(G * bits' / 32)]  zeros packed along the groups; only when asymmetric;
                                                   bits' = bits + 1 for bits < 8 where a zero may be 2**bits, else 8
    X.shape     int64   [2]                        [N, K]

``config.json`` gets::

    quantization_config = {"quant_method": "quantkit", "format_version": 1, "modules": {name: scheme}}

FP8, NVFP4 and MXFP4 have the tensors that they have in compressed-tensors (``formats.floats.compressed``), without its
demand for whole blocks of FP8. The layout is drawn in docs/formats/native.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core.packing import PackedCodes, pack_rows, packed_width, unpack_rows
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.floats import compressed as floats
from quantkit.formats.interface import CheckpointLayout, Refusal, TensorHeader
from quantkit.formats.stored_parts import require_shape

VERSION = 1


class Native:
    name = "native"
    summary = "quantkit's own: 2 to 8 bits, any group size, short last groups"
    stem = "quantkit"
    head_embeddings: tuple[str, ...] = ("head", "embedding", "tied")
    uniform_groups = False
    holds_cache_scales = False

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        if scheme.number in ("nvfp4", "mxfp4") and in_features % (scheme.group_size or 1):
            return Refusal(f"blocks of {scheme.group_size} do not divide {in_features} inputs", "Leave it at 16 bit.")
        return None

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return scheme.group_size

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        if scheme.number != "integer":
            return floats.stored_bytes(scheme, out_features, in_features)
        groups = scheme.groups(in_features)
        zeros = 0 if scheme.symmetric else 4 * packed_width(groups, _zero_bits(scheme))
        return out_features * (4 * packed_width(in_features, scheme.bits) + 2 * groups + zeros) + 16

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        if q.scheme.number != "integer":
            return floats.encode(q)
        parts = {
            "qweight": q.words.contiguous(),
            "scales": q.scales.contiguous(),
            "shape": torch.tensor(q.shape, dtype=torch.int64),
        }
        if q.zeros is not None:
            parts["qzeros"] = pack_rows(q.zeros, _zero_bits(q.scheme))
        return parts

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        if scheme.number != "integer":
            return floats.decode(parts, scheme)
        out_features, in_features = (int(n) for n in parts["shape"])
        if tuple(parts["qweight"].shape) != (out_features, packed_width(in_features, scheme.bits)):
            raise CheckpointError(
                f"qweight {list(parts['qweight'].shape)} does not hold {scheme.bits}-bit codes of"
                f" {[out_features, in_features]}"
            )
        zeros = None
        if not scheme.symmetric:
            wanted = out_features, packed_width(scheme.groups(in_features), _zero_bits(scheme))
            reason = f"{scheme.describe()} over {[out_features, in_features]}"
            require_shape("qzeros", parts["qzeros"], wanted, reason)
            zeros = unpack_rows(parts["qzeros"], _zero_bits(scheme), scheme.groups(in_features)).to(torch.int16)
        return QuantTensor(PackedCodes(parts["qweight"], scheme.bits, in_features), parts["scales"], zeros, scheme)

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        return {
            "quant_method": "quantkit",
            "format_version": VERSION,
            "quantkit_version": version,
            "modules": {name: scheme.to_json() for name, scheme in layout.modules.items()},
        }

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        if config.get("format_version") != VERSION:
            raise CheckpointError(
                f"native format version {config.get('format_version')}; this quantkit reads version {VERSION}. Upgrade"
                " quantkit."
            )
        parts: dict[str, tuple[str, ...]] = {}
        for module, scheme in config["modules"].items():
            if scheme.get("number", "integer") != "integer":
                parts[module] = floats.local_names(scheme)
                continue
            local = ("qweight", "scales", "shape") + (() if scheme["symmetric"] else ("qzeros",))
            parts[module] = local
        return parts

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme:
        return Scheme.from_json(config["modules"][module])

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        return None if "shape" in infos else floats.shape(infos)

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor:
        return Native.decode(parts, Native.scheme(module, parts, config))


def _zero_bits(scheme: Scheme) -> int:
    # zeros run 0 .. 2**bits (one more than codes, see QuantTensor); at 8 bits the writer never uses 256
    return min(scheme.bits + 1, 8)
