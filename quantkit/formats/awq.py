"""awq: the GEMM layout of AutoAWQ, 4 bits; the asymmetric carrier that vLLM, SGLang and lmdeploy all load.

Per linear ``X`` (out_features N, in_features K, groups G = K / g)::

    X.qweight  int32 [K, N / 8]   codes along N; nibble i of word c holds column 8 * c + ORDER[i]
    X.qzeros   int32 [G, N / 8]   zeros, in the same order, as they are (no - 1)
    X.scales   fp16  [G, N]

    w[n, k] = (code[k, n] - zero[k // g, n]) * scale[k // g, n]

One model has one scheme: the config has no place for a second. Readers: autoawq awq/utils/packing_utils.py, vLLM
vllm/model_executor/layers/quantization/auto_awq.py (_convert_awq_to_standard_format; AutoAWQConfig.from_config),
lmdeploy turbomind/converter.py. What each loads: docs/formats/awq.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core.packing import pack_rows, packed_width, unpack_rows
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.common import (
    dividing_group_size,
    ragged,
    scale_dtype_name,
    weights_only,
    whole_number,
    zeros_that_fit,
)
from quantkit.formats.interface import CheckpointLayout, Refusal, TensorHeader
from quantkit.formats.stored_parts import require_shape

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble, lowest first
REVERSE = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of each column
LOCAL = ("qweight", "qzeros", "scales")


class AWQ:
    name = "awq"
    summary = "4 bits, one group size for the whole model; loads in vLLM, SGLang, lmdeploy, transformers"
    stem = "model"
    head_embeddings: tuple[str, ...] = ("head",)
    uniform_groups = True
    holds_cache_scales = False

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        if scheme.activations is not None:
            return weights_only(scheme)
        if scheme.number != "integer":
            return Refusal(f"{scheme.number}: awq files hold integers", "Use --format compressed-tensors.")
        if scheme.bits != 4:
            return Refusal(
                f"{scheme.bits} bits: awq files hold 4", "Use --bits 4, --format gptq (2, 3, 4, 8) or --format native."
            )
        if scheme.scale_dtype != "float16":
            return Refusal(
                f"scales in {scheme.scale_dtype}: awq files hold float16",
                "Use --scale-dtype float16, or --format native.",
            )
        if out_features % 8:
            return Refusal(
                f"{out_features} outputs are no multiple of 8, the codes of one word", "Use --format native."
            )
        return ragged(scheme, in_features)

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return dividing_group_size(scheme, in_features)

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        schemes = sorted({scheme.describe() for scheme in layout.modules.values()})
        if len(schemes) > 1:
            return (
                f"one model in awq has one scheme, not {' and '.join(schemes)}. Use --format gptq, compressed-tensors"
                " or native."
            )
        for dense in layout.dense:  # readers match modules_to_not_convert by substring
            caught = next((module for module in layout.modules if dense in module), None)
            if caught is not None:
                return (
                    f"{dense} at 16 bit would leave {caught} out as well, whose name holds its name. Use --format gptq."
                )
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        groups = scheme.groups(in_features)
        return 4 * packed_width(out_features, scheme.bits) * (in_features + groups) + 2 * groups * out_features

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        """Encode into qweight, qzeros and scales. Raises CheckpointError for a zero point of 16, which has no field."""
        if q.zeros is None:
            zeros = torch.full((q.scales.shape[1], q.shape[0]), q.scheme.midpoint, dtype=torch.uint8)
        else:
            zeros = zeros_that_fit(q, "awq").t()
        return {"qweight": _pack(q.codes.t()), "qzeros": _pack(zeros), "scales": q.scales.t().contiguous()}

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        """Undo ``encode``. Raises CheckpointError when the tensors do not fit together."""
        qweight, scales = parts["qweight"], parts["scales"]
        in_features, out_features = qweight.shape[0], qweight.shape[1] * 8
        groups = scheme.groups(in_features)
        if tuple(scales.shape) != (groups, out_features):
            raise CheckpointError(
                f"scales {list(scales.shape)} do not fit a qweight {list(qweight.shape)} of {scheme.describe()} in the "
                f"GEMM layout, which needs {[groups, out_features]}. The config belongs to other weights."
            )
        if scheme.group_size is not None and in_features % scheme.group_size:
            raise CheckpointError(f"group_size {scheme.group_size} does not divide qweight's {in_features} inputs.")
        reason = f"{scheme.describe()} over {[out_features, in_features]}"
        require_shape("qzeros", parts["qzeros"], (groups, packed_width(out_features, scheme.bits)), reason)
        codes = _unpack(qweight, out_features).t().contiguous()
        zeros = _unpack(parts["qzeros"], out_features).t().contiguous().to(torch.int16)
        if not scheme.symmetric:
            return QuantTensor(codes, scales.t().contiguous(), zeros, scheme)
        if not bool((zeros == scheme.midpoint).all()):
            raise CheckpointError("the config says zero_point false, but zero points other than 8 are stored.")
        return QuantTensor(codes, scales.t().contiguous(), None, scheme)

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        scheme = next(iter(layout.modules.values()))
        return {
            "quant_method": "awq",
            "bits": scheme.bits,
            "group_size": -1 if scheme.group_size is None else scheme.group_size,
            "zero_point": not scheme.symmetric,
            "version": "gemm",
            "lm_head": bool(layout.head_embeddings),
            "modules_to_not_convert": list(layout.dense) or None,
        }

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm":
            raise CheckpointError(
                f"awq version {version!r} has another layout and is not read; quantkit reads 'gemm', in which most"
                " models also exist."
            )
        return {name.removesuffix(".qweight"): LOCAL for name in names if name.endswith(".qweight")}

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme:
        """Read the scheme, also by the names of AutoAWQ's first releases (w_bit, q_group_size)."""
        bits = whole_number(config, "bits" if "bits" in config else "w_bit")
        if bits != 4:
            raise CheckpointError(f"{bits} bits: awq is read with 4 bits.")
        size = whole_number(config, "group_size" if "group_size" in config else "q_group_size")
        dtype = scale_dtype_name(infos["scales"].dtype)
        return Scheme(bits, None if size == -1 else size, not config.get("zero_point", True), dtype)

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        in_features, words = infos["qweight"].shape
        return words * 32 // bits, in_features

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor:
        return AWQ.decode(parts, AWQ.scheme(module, parts, config))


def _pack(values: Tensor) -> Tensor:
    """``[rows, N]`` -> int32 ``[rows, N / 8]``."""
    rows, columns = values.shape
    return pack_rows(values.reshape(rows, columns // 8, 8)[:, :, ORDER].reshape(rows, columns), 4)


def _unpack(words: Tensor, columns: int) -> Tensor:
    fields = unpack_rows(words, 4, columns)
    return fields.reshape(len(fields), columns // 8, 8)[:, :, REVERSE].reshape(len(fields), columns)
