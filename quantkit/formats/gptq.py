"""gptq: the layout of AutoGPTQ and GPTQModel, ``gptq`` (v1) for symmetric models and ``gptq_v2`` for asymmetric ones.

Per linear ``X`` (out_features N, in_features K, bits b, groups G = ceil(K / g))::

    X.qweight  int32 [K * b / 32, N]   codes along K, LSB-first; 3 bits: one stream, 32 codes in 3 words
    X.qzeros   int32 [G, N * b / 32]   zeros along N, LSB-first; v1 stores zero - 1, v2 the zero itself
    X.scales   fp16  [G, N]
    X.g_idx    int32 [K]               group of each input; k // g, unless act-order moved inputs between groups

    w[n, k] = (code[k, n] - zero[g_idx[k], n]) * scale[g_idx[k], n]

Readers: gptqmodel/nn_modules/qlinear/__init__.py (pack_original), gptqmodel/utils/model.py (v1 <-> v2), vLLM
vllm/model_executor/layers/quantization/auto_gptq.py (TYPE_MAP: 4 and 8 bits symmetric; create_weights: the shapes
above), SGLang srt/layers/quantization/gptq/gptq.py. What each loads: docs/formats/gptq.md.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.packing import PackedCodes, pack_rows, packed_width, unpack_rows
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitWarning
from quantkit.formats.common import (
    dividing_group_size,
    indexed,
    ragged,
    scale_dtype_name,
    signed_scales,
    weights_only,
    whole_number,
    zeros_that_fit,
)
from quantkit.formats.gptq_rules import dynamic_rules, override_for
from quantkit.formats.interface import CheckpointLayout, Refusal, TensorHeader
from quantkit.formats.stored_parts import require_shape

BITS = (2, 3, 4, 8)
LOCAL = ("qweight", "qzeros", "scales")
INDEX = "g_idx"
V1, V2 = "gptq", "gptq_v2"


class GPTQ:
    name = "gptq"
    summary = "2, 3, 4, 8 bits; 4 and 8 bits symmetric load in vLLM, SGLang, transformers, lmdeploy (4)"
    stem = "model"
    head_embeddings: tuple[str, ...] = ("head",)
    uniform_groups = False
    holds_cache_scales = False

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        if scheme.activations is not None:
            return weights_only(scheme)
        if scheme.number != "integer":
            return Refusal(f"{scheme.number}: gptq files hold integers", "Use --format compressed-tensors.")
        if scheme.bits not in BITS:
            return Refusal(
                f"{scheme.bits} bits: gptq files hold 2, 3, 4 or 8", "Use --bits 4 or 8, or --format native."
            )
        if scheme.scale_dtype != "float16":
            return Refusal(
                f"scales in {scheme.scale_dtype}: gptq files hold float16",
                "Use --scale-dtype float16, or --format native.",
            )
        unit = 32 // math.gcd(32, scheme.bits)
        for what, count in (("inputs", in_features), ("outputs", out_features)):
            if count % unit:
                return Refusal(
                    f"{count} {what} are no multiple of {unit}, the codes that fill whole words", "Use --format native."
                )
        return ragged(scheme, in_features)

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return dividing_group_size(scheme, in_features)

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        if len({scheme.symmetric for scheme in layout.modules.values()}) > 1:
            return (
                "symmetric and asymmetric layers: one gptq model is v1 or v2. Use --format compressed-tensors or"
                " native."
            )
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        groups = scheme.groups(in_features)
        codes = 4 * packed_width(in_features, scheme.bits) * out_features
        return codes + groups * (4 * packed_width(out_features, scheme.bits) + 2 * out_features) + 4 * in_features

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        """Encode into qweight, qzeros, scales and g_idx.

        Raises CheckpointError for a zero point of 2**bits, which has no field.
        """
        out_features, in_features = q.shape
        bits, groups = q.scheme.bits, q.scheme.groups(in_features)
        if q.zeros is None:
            fields = torch.full((groups, out_features), q.scheme.midpoint - 1, dtype=torch.uint8)
        else:
            fields = zeros_that_fit(q, "gptq").t()
        return {
            "qweight": q.words.t().contiguous(),
            "qzeros": pack_rows(fields, bits),
            "scales": q.scales.t().contiguous(),
            INDEX: _trivial_index(in_features, q.scheme.width(in_features)),
        }

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        """Undo ``encode``: v1 where the scheme is symmetric, v2 where it is not."""
        q = _decode(parts, scheme, v1=scheme.symmetric)
        assert isinstance(q, QuantTensor)  # encode writes the trivial index
        return q

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        schemes = Counter(layout.modules.values())
        base = schemes.most_common(1)[0][0]
        form = V1 if all(scheme.symmetric for scheme in schemes) else V2
        return {
            "quant_method": "gptq",
            "bits": base.bits,
            "group_size": _written_size(base),
            "desc_act": False,
            "sym": base.symmetric,
            "lm_head": bool(layout.head_embeddings),
            "format": form,
            "checkpoint_format": form,
            "pack_dtype": "int32",
            "dynamic": dynamic_rules(layout, base) or None,
            "meta": {"quantizer": [f"quantkit:{version}"]},
        }

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {"quantize_config.json": dict(config)}  # what AutoGPTQ and older engines open

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        form = _stored_form(config)
        if form not in (V1, V2):
            raise CheckpointError(
                f"gptq checkpoint_format {form!r} is not read; quantkit reads 'gptq' and 'gptq_v2'. Most models also"
                " exist as one of those."
            )
        stored = set(names)
        parts = {}
        for name in names:
            if name.endswith(".qweight"):
                module = name.removesuffix(".qweight")
                parts[module] = LOCAL + ((INDEX,) if f"{module}.{INDEX}" in stored else ())
        return parts

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme:
        """Read a module's scheme: asymmetric where scales may be negative (``_turned``), whatever the config says.

        Raises CheckpointError for a module that the config calls dense, and for bits that are not read.
        """
        rule = override_for(module, config.get("dynamic"))
        if rule is False:
            raise CheckpointError("stored quantized, but a rule of the config's 'dynamic' says it is not.")
        wanted = {**config, **(rule or {})}
        bits = whole_number(wanted, "bits")
        if bits not in BITS:
            raise CheckpointError(f"{bits} bits: gptq is read with 2, 3, 4 or 8 bits.")
        size = whole_number(wanted, "group_size")
        symmetric = _symmetric(wanted) and not signed_scales(config)
        return Scheme(bits, None if size == -1 else size, symmetric, scale_dtype_name(infos["scales"].dtype))

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        words, out_features = infos["qweight"].shape
        return out_features, words * 32 // bits

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor | BlockTensor:
        """Decode one module; with act-order groups a BlockTensor. Raises CheckpointError for what is no gptq layer."""
        return _decode(parts, GPTQ.scheme(module, parts, config), v1=_stored_form(config) == V1)


def _stored_form(config: Mapping[str, Any]) -> str:
    if config.get("is_marlin_format"):
        return "marlin"
    # Models quantized before there were two call themselves nothing; 'format' and 'checkpoint_format' say the same.
    return str(config.get("checkpoint_format") or config.get("format") or V1).lower()


def _symmetric(config: Mapping[str, Any]) -> bool:
    if "sym" not in config:  # AutoGPTQ's quantize_config.json had no such key at first; its default was True
        warnings.warn(
            "the gptq config does not say 'sym': read as symmetric; other zero points would be refused",
            QuantkitWarning,
            stacklevel=3,
        )
    return bool(config.get("sym", True))


def _written_size(scheme: Scheme) -> int:
    return -1 if scheme.group_size is None else scheme.group_size


def _trivial_index(in_features: int, width: int) -> Tensor:
    return torch.arange(in_features, dtype=torch.int32) // width


def _decode(parts: Mapping[str, Tensor], scheme: Scheme, *, v1: bool) -> QuantTensor | BlockTensor:
    qweight, scales = parts["qweight"], parts["scales"]
    in_features, out_features = qweight.shape[0] * 32 // scheme.bits, qweight.shape[1]
    groups = scheme.groups(in_features)
    if tuple(scales.shape) != (groups, out_features):
        raise CheckpointError(
            f"scales {list(scales.shape)} do not fit a qweight {list(qweight.shape)} of {scheme.describe()}, "
            f"which needs {[groups, out_features]}. The config belongs to other weights."
        )
    reason = f"{scheme.describe()} over {[out_features, in_features]}"
    require_shape("qzeros", parts["qzeros"], (groups, packed_width(out_features, scheme.bits)), reason)
    codes = PackedCodes(qweight.t().contiguous(), scheme.bits, in_features)
    zeros = _zeros(unpack_rows(parts["qzeros"], scheme.bits, out_features), scheme, v1).t().contiguous().to(torch.int16)
    index = parts.get(INDEX)
    if index is not None and not torch.equal(index, _trivial_index(in_features, scheme.width(in_features))):
        return indexed(ACT_ORDER, codes.unpack(), scales.t().contiguous(), zeros, index, scheme.bits)
    if not scheme.symmetric:
        return _turned(codes, scales.t().contiguous(), zeros, scheme)
    if not bool((zeros == scheme.midpoint).all()):
        raise CheckpointError("the config says symmetric, but other zero points are stored.")
    return QuantTensor(codes, scales.t().contiguous(), None, scheme)


def _turned(codes: PackedCodes, scales: Tensor, zeros: Tensor, scheme: Scheme) -> QuantTensor:
    """Turn groups of negative scale round, with ``s (c - z) = |s| ((L - c) - (L - z))``.

    AutoRound stores such scales with ``sym``: code 0 is one step more than the largest code, on the side of the group's
    largest magnitude (auto-round 0.16, data_type/int.py, quant_tensor_sym). scales, zeros: ``[out, groups]``. L: the
    largest code.
    """
    negative, largest = scales < 0, scheme.levels - 1
    if not bool(negative.any()):
        return QuantTensor(codes, scales, zeros, scheme)
    plain = codes.unpack()
    turned = torch.where(negative[:, affine.group_index(codes.cols, scheme)], largest - plain, plain)
    zeros = torch.where(negative, largest - zeros, zeros)
    return QuantTensor(turned, scales.abs(), zeros, scheme)


def _zeros(fields: Tensor, scheme: Scheme, v1: bool) -> Tensor:
    """Zero points from stored fields ``[groups, out]``, uint8."""
    if not v1:
        return fields
    if scheme.symmetric and bool((fields == scheme.midpoint).all()):
        # GPTQModel 5 wrote such files (Qwen/Qwen3.5-27B-GPTQ-Int4 is one; vLLM pull request 38966)
        warnings.warn(
            "this gptq model calls itself v1 but stores its zero points as v2 does: read as v2.",
            QuantkitWarning,
            stacklevel=4,
        )
        return fields
    largest = scheme.levels - 1
    if bool((fields == largest).any()):
        warnings.warn(
            f"this gptq v1 model stores zero fields of {largest}, which readers take for 0 or for {largest + 1}: read"
            " as 0, as AutoGPTQ's and ExLlama's kernels do.",
            QuantkitWarning,
            stacklevel=4,
        )
    return (fields + 1) & largest


ACT_ORDER = "gptq act-order"
