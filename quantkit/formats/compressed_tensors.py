"""compressed-tensors: vLLM's home format; also read by SGLang, transformers, lmdeploy, llama.cpp.

Per linear ``X`` (out_features N, in_features K, group g). ``pack-quantized``, weights only, as
compressed_tensors/compressors/pack_quantized reads it::

    X.weight_packed      int32 [N, ceil(K * bits / 32)]        along K, LSB-first; field = signed code + 2**(bits-1)
    X.weight_scale       16 bit [N, K / g] or [N, 1]
    X.weight_zero_point  int32 [ceil(N * bits / 32), K / g]    along N; field = signed zero + 2**(bits-1); asymmetric
    X.weight_shape       int64 [2]

A field equals our unsigned code, and our zero, unchanged: the signed convention lives only in the reader's arithmetic.

``int-quantized``, int8 weights for int8 activations (W8A8), as
compressed_tensors/compressors/naive_quantized/base.py:27 reads it and vLLM: compressed_tensors/compressed_tensors.py
(_is_dynamic_token_w8a8), schemes/compressed_tensors_w8a8_int8.py (create_weights)::

    X.weight              int8 [N, K]                          signed code = our code - 2**(bits-1)
    X.weight_scale        16 bit [N, 1]                        llm-compressor writes the model's dtype, too

with ``input_activations`` of 8 bits, symmetric, strategy token, dynamic: nothing is stored for them. Files with static
or asymmetric activations are refused.

FP8, NVFP4 and MXFP4 weights: ``formats/floats/compressed.py``.

An fp8 KV cache: ``kv_cache_scheme`` in the config, and beside the projections of each attention module ``A``, as vLLM
reads it (compressed_tensors.py, CompressedTensorsKVCacheMethod; weight_utils.py, maybe_remap_kv_scale_name, finds
``A.attn.k_scale``)::

    A.k_scale, A.v_scale  float32 [1]                          x ~ E4M3 float * scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core import affine
from quantkit.core.packing import PackedCodes, pack_rows, packed_width, unpack_rows
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.common import (
    dividing_group_size,
    indexed,
    match_pattern,
    ragged,
    scale_dtype_name,
    zeros_that_fit,
)
from quantkit.formats.floats import compressed as floats
from quantkit.formats.interface import CheckpointLayout, Refusal, TensorHeader
from quantkit.formats.stored_parts import require_shape

LOCAL = ("weight_packed", "weight_scale", "weight_shape")
PLAIN = ("weight", "weight_scale")
ZERO, INDEX = "weight_zero_point", "weight_g_idx"
FP8_CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
PACKED, INT, MIXED, NAIVE = "pack-quantized", "int-quantized", "mixed-precision", "naive-quantized"


class CompressedTensors:
    name = "compressed-tensors"
    summary = "int4/int8, int8 with int8 activations, fp8, nvfp4, mxfp4, for vLLM, SGLang, transformers, lmdeploy"
    stem = "model"
    head_embeddings: tuple[str, ...] = ("head", "embedding")
    uniform_groups = False
    holds_cache_scales = True

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        if scheme.number != "integer":
            return floats.supports(scheme, out_features, in_features)
        if scheme.bits not in (4, 8):
            return Refusal(
                f"{scheme.bits} bits: readers of compressed-tensors load 4 and 8 bits (older ones unpack "
                "3, 5, 6 and 7 bits differently)",
                "Use --format native, or --bits 4 or 8.",
            )
        return ragged(scheme, in_features)

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return scheme.group_size if scheme.number != "integer" else dividing_group_size(scheme, in_features)

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        if scheme.number != "integer":
            return floats.stored_bytes(scheme, out_features, in_features)
        groups = scheme.groups(in_features)
        if scheme.activations is not None:
            return out_features * (in_features + 2 * groups)
        zeros = 0 if scheme.symmetric else 4 * packed_width(out_features, scheme.bits) * groups
        return out_features * (4 * packed_width(in_features, scheme.bits) + 2 * groups) + zeros + 16

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        if q.scheme.number != "integer":
            return floats.encode(q)
        if q.scheme.activations is not None:
            signed = (q.codes.to(torch.int16) - q.scheme.midpoint).to(torch.int8)
            return {"weight": signed, "weight_scale": q.scales.contiguous()}
        parts = {
            "weight_packed": q.words.contiguous(),
            "weight_scale": q.scales.contiguous(),
            "weight_shape": torch.tensor(q.shape, dtype=torch.int64),
        }
        if q.zeros is not None:
            parts[ZERO] = pack_rows(zeros_that_fit(q, "compressed-tensors").t(), q.scheme.bits).t().contiguous()
        return parts

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        if scheme.number != "integer":
            return floats.decode(parts, scheme)
        if "weight" in parts:
            return _decode_plain(parts, scheme)
        out_features, in_features = (int(n) for n in parts["weight_shape"])
        packed = parts["weight_packed"]
        if tuple(packed.shape) != (out_features, packed_width(in_features, scheme.bits)):
            raise CheckpointError(
                f"weight_packed {list(packed.shape)} does not hold {scheme.bits}-bit codes of"
                f" {[out_features, in_features]} as one dense stream (older releases pad 3, 5, 6 and 7 bits; those"
                " files are not read)"
            )
        zeros = None
        if not scheme.symmetric:
            wanted = packed_width(out_features, scheme.bits), scheme.groups(in_features)
            require_shape(ZERO, parts[ZERO], wanted, f"{scheme.describe()} over {[out_features, in_features]}")
            zeros = (
                unpack_rows(parts[ZERO].t().contiguous(), scheme.bits, out_features).t().contiguous().to(torch.int16)
            )
        return QuantTensor(PackedCodes(packed, scheme.bits, in_features), parts["weight_scale"], zeros, scheme)

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        by_scheme: dict[Scheme, list[str]] = {}
        for module, scheme in layout.modules.items():
            by_scheme.setdefault(scheme, []).append(module)
        # One scheme for every linear is written as the class name, which every reader knows; fused readers (vLLM)
        # match lists of exact names for mixed schemes.
        # Groups before channels: transformers decodes every asymmetric linear by the first entry, which must know
        # groups.
        ordered = sorted(by_scheme.items(), key=lambda entry: (entry[0].group_size is None, -len(entry[1])))
        single = len(by_scheme) == 1 and not layout.head_embeddings  # head and embeddings are no class 'Linear' to vLLM
        groups = {
            f"group_{i}": {
                "targets": ["Linear"] if single else modules,
                "weights": _weights(scheme),
                "input_activations": _activations_json(scheme),
                "output_activations": None,
                "format": _form(scheme),
            }
            for i, (scheme, modules) in enumerate(ordered)
        }
        forms = {_form(scheme) for scheme in by_scheme}
        dense = {"dequantize": True} if _dense_in_transformers(layout) else {}
        return {
            **dense,
            "quant_method": "compressed-tensors",
            "format": MIXED if len(forms) > 1 else next(iter(forms), PACKED),
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(layout.dense),
            "kv_cache_scheme": {**FP8_CACHE} if layout.fp8_cache else None,
            "global_compression_ratio": None,
            "version": "0.20.0",
        }

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        groups = config.get("config_groups") or {}
        forms = {config.get("format"), *(group.get("format") for group in groups.values())}
        known = {PACKED, INT, MIXED, *floats.FORMS.values(), NAIVE, None}
        unknown = sorted(forms - known)
        if unknown:
            raise CheckpointError(
                f"compressed-tensors format {unknown[0]!r} is not read; quantkit reads '{PACKED}', '{INT}' and"
                f" {', '.join(map(repr, floats.FORMS.values()))}."
            )
        stored = set(names)
        parts = {}
        for name in names:
            if name.endswith(".weight_packed"):
                module = name.removesuffix(".weight_packed")
                whole = f"{module}.weight_shape" in stored or not forms & set(floats.FORMS.values())
                packed = LOCAL if whole else floats.part_names(module, stored)
                parts[module] = packed + tuple(part for part in (ZERO, INDEX) if f"{module}.{part}" in stored)
            elif name.endswith(".weight_scale") and f"{name.removesuffix('_scale')}" in stored:
                module = name.removesuffix(".weight_scale")
                pointed = floats.FORMS["fp8"] in forms or NAIVE in forms
                static = f"{module}.{floats.INPUT}" in stored
                unread = [ZERO, INDEX, "input_zero_point", *([] if pointed else [floats.INPUT])]
                beside = (f"{module}.{part}" for part in unread)
                other = next((part for part in beside if part in stored), None)
                if other is not None:
                    raise CheckpointError(f"{other}: zero points, indices and static inputs of '{INT}' are not read.")
                parts[module] = (*PLAIN, *((floats.INPUT,) if static else ()))
        return parts

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme | str:
        scheme, kind = _scheme_of(module, infos, config)
        return kind or scheme

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        return None if "weight_shape" in infos else floats.shape(infos)

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor | BlockTensor:
        scheme, kind = _scheme_of(module, parts, config)
        if kind is None:
            return CompressedTensors.decode(parts, scheme)
        return _decode_indexed(kind, parts, scheme)


def _dense_in_transformers(layout: CheckpointLayout) -> bool:
    """Whether the config asks transformers for dense weights at load (a key that vLLM and SGLang do not look at).

    compressed-tensors 0.20 sizes packed zero points wrongly on the meta device, so transformers' compressed loading
    refuses asymmetric models, and it cannot run a compressed embedding. Dense loading does both, but decodes every
    module with the first group's bits and symmetry (transformers 5.23 integrations/compressed_tensors.py,
    get_dense_scheme; group sizes come from the shapes): a model that mixes those would load silently wrong. Without the
    key it is refused.
    """
    schemes = set(layout.modules.values())
    alike = len({(scheme.bits, scheme.symmetric, scheme.activations) for scheme in schemes}) == 1
    return alike and (bool(layout.head_embeddings) or not all(scheme.symmetric for scheme in schemes))


# What vLLM's _is_dynamic_token_w8a8 asks for; llm-compressor's W8A8 recipe writes the same.
INT8_TOKENS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "group_size": None,
    "dynamic": True,
    "actorder": None,
    "block_structure": None,
    "observer": None,
    "observer_kwargs": {},
}


def _form(scheme: Scheme) -> str:
    if scheme.number != "integer":
        return floats.FORMS[scheme.number]
    return PACKED if scheme.activations is None else INT


def _decode_plain(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
    """Decode ``int-quantized``: signed bytes, one scale per row (or per group)."""
    weight, scales = parts["weight"], parts["weight_scale"]
    if weight.dtype != torch.int8:
        raise CheckpointError(f"weight is {weight.dtype}; '{INT}' holds int8.")
    codes = weight.to(torch.int16) + scheme.midpoint
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= scheme.levels):
        raise CheckpointError(f"weight holds numbers outside {scheme.bits} bits. The config belongs to other weights.")
    return QuantTensor(codes.to(torch.uint8), scales, None, scheme)


def _decode_indexed(kind: str, parts: Mapping[str, Tensor], scheme: Scheme) -> BlockTensor:
    """Decode act-order groups (``actorder: group``), or scales of 32 bits (llm-compressor 0.14 on a float32 model).

    compressed-tensors 0.12 (quantization/lifecycle/forward.py, _process_quantization) sorts the inputs by their groups
    and takes ``group_size`` of them for each, which is what the index says only where every group has that many; with a
    -1 in it, groups are contiguous. 0.20 no longer knows such files.
    """
    out_features, in_features = (int(n) for n in parts["weight_shape"])
    wanted = out_features, scheme.groups(in_features)
    require_shape("weight_scale", parts["weight_scale"], wanted, f"{scheme.describe()} over {[*wanted]}")
    plain = {**parts, "weight_scale": torch.ones(wanted, dtype=torch.float16)}
    q = CompressedTensors.decode(plain, scheme)
    index = parts.get(INDEX)
    if index is None or bool((index == -1).any()):
        index = affine.group_index(in_features, scheme)
    elif sorted(index.tolist()) != affine.group_index(in_features, scheme).tolist():
        width = scheme.width(in_features)
        raise CheckpointError(f"{INDEX} does not give {width} inputs to every group. Download it again.")
    return indexed(kind, q.codes, parts["weight_scale"], q.zeros, index, scheme.bits)


def _activations_json(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.number != "integer":
        return floats.activations_json(scheme)
    return None if scheme.activations is None else dict(INT8_TOKENS)


def _activations(module: str, group: Mapping[str, Any]) -> str | None:
    """Read what a config group says of inputs: ``int8`` or None. Raises CheckpointError for anything else."""
    stored = group.get("input_activations")
    if not stored:
        return None
    known = ("num_bits", "type", "symmetric", "strategy", "dynamic")
    differing = [key for key in known if stored.get(key) != INT8_TOKENS[key]]
    if differing:
        words = ", ".join(f"{key} {stored.get(key)!r}" for key in differing)
        raise CheckpointError(
            f"{module}: activations with {words} are not read; quantkit reads int8, symmetric, dynamic per token."
        )
    return "int8"


def _weights(scheme: Scheme) -> dict[str, Any]:
    if scheme.number != "integer":
        return floats.weights_json(scheme)
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _scheme_of(module: str, parts: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> tuple[Scheme, str | None]:
    """The scheme of a module: the config group whose target matches, exact names before patterns before classes.

    And what its weights are called where no QuantTensor holds them (act-order groups, float32 scales), else None: the
    scheme is then theirs but for that.
    """
    ranked = sorted(
        (rank, weights)
        for rank, weights in (
            (min((_rank(target, module) for target in group["targets"]), default=9), i)
            for i, group in enumerate(config["config_groups"].values())
        )
        if rank < 9
    )
    if not ranked:
        raise CheckpointError(f"{module}: stored quantized, but no group of the quantization_config targets it.")
    group = list(config["config_groups"].values())[ranked[0][1]]
    if group.get("output_activations") or config.get("transform_config"):
        raise CheckpointError(f"{module}: quantized outputs and transforms are not read.")
    weights = group["weights"]
    if weights.get("type") == "float":
        return floats.scheme_of(module, group, parts), None
    if not isinstance(weights["symmetric"], bool):
        raise CheckpointError(f"{module}: symmetric is {weights['symmetric']!r}, expected true or false.")
    if weights["symmetric"] and ZERO in parts:
        raise CheckpointError(f"{module}: the config says symmetric, but zero points are stored.")
    if weights.get("type", "int") != "int" or weights["strategy"] not in ("group", "channel"):
        raise CheckpointError(
            f"{module}: {weights.get('type')} weights with strategy {weights['strategy']!r} are not read."
        )
    size = weights["group_size"] if weights["strategy"] == "group" else None
    activations, wide = _activations(module, group), parts["weight_scale"].dtype == torch.float32
    if "weight_packed" not in parts or activations is not None or not (wide or INDEX in parts):
        dtype = scale_dtype_name(parts["weight_scale"].dtype)
        return Scheme(weights["num_bits"], size, weights["symmetric"], dtype, activations), None
    scheme = Scheme(weights["num_bits"], size, weights["symmetric"])
    return scheme, f"{scheme.describe()} with {'act-order groups' if INDEX in parts else 'float32 scales'}"


def _rank(target: str, module: str) -> int:
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if match_pattern(target[3:], module) else 9
    return 2 if target == "Linear" else 9
