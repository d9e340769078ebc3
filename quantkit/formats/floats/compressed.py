"""FP8, NVFP4 and MXFP4 inside compressed-tensors, as vLLM reads them.

Per linear ``X`` (out_features N, in_features K). ``float-quantized``, one E4M3 byte a weight::

    X.weight                float8_e4m3fn [N, K]
    X.weight_scale          float32 (or 16 bit): [N, 1] channel; [1] tensor; [N / 128, K / 128] block, rounded up

``nvfp4-pack-quantized``, two E2M1 codes a byte, the even input in the low half::

    X.weight_packed         uint8 [N, K / 2]
    X.weight_scale          float8_e4m3fn [N, K / 16]
    X.weight_global_scale   float32 [1]     what scales are DIVIDED by: w = e2m1 * weight_scale / weight_global_scale
    X.input_global_scale    float32 [1]     the same of activations, only where they are nvfp4 (W4A4)

``mxfp4-pack-quantized``::

    X.weight_packed         uint8 [N, K / 2]
    X.weight_scale          uint8 [N, K / 32]    E8M0: 2**(byte - 127); 255 is NaN and refused

compressed_tensors 0.19: compressors/{naive_quantized,nvfp4,mxfp4}/base.py, quantization/quant_scheme.py. vLLM:
compressed_tensors/schemes/compressed_tensors_{w8a8_fp8,w8a16_fp8,w4a4_nvfp4,w4a16_nvfp4,w4a16_mxfp4}.py. Engines run q,
k and v (gate and up) as one matrix and take the LARGEST of their global scales for all: ours are one number for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.core.packing import pack_rows, unpack_rows
from quantkit.core.qtensor import QuantTensor
from quantkit.core.rounding.numbers import NAN_E8M0, decode_e4m3, decode_e8m0, encode_e8m0
from quantkit.core.scheme import BLOCK, Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.interface import Refusal, TensorHeader
from quantkit.formats.stored_parts import require_shape

FORMS = {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
GLOBAL, INPUT_GLOBAL, INPUT = "weight_global_scale", "input_global_scale", "input_scale"
SCALE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_ARGS: dict[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": None, "block_structure": None,
    "dynamic": False, "actorder": None, "observer": None, "observer_kwargs": {},
}  # fmt: skip

LARGEST_E8M0 = 127 + 24  # the byte of 2^24, the largest scale of other dtypes, too


def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
    """Explain why compressed-tensors cannot hold such a weight so that engines read it; None if it can."""
    size = BLOCK if scheme.rows == BLOCK else (scheme.group_size or 1)
    if in_features % size or (scheme.rows == BLOCK and out_features % BLOCK):
        what = f"{BLOCK} x {BLOCK} blocks" if scheme.rows == BLOCK else f"blocks of {size} inputs"
        return Refusal(
            f"{what} do not divide {out_features} x {in_features}, and engines need whole ones",
            "Use --scheme fp8, or leave these layers at 16 bit with --rule '...=keep'.",
        )
    return None


def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
    """Count the bytes of all tensors that ``encode`` makes of such a weight."""
    scales = scheme.scales_stored(out_features, in_features) * scheme.stored_scale_dtype.itemsize
    numbers = (1 if scheme.number == "nvfp4" else 0) + (1 if scheme.activations == "nvfp4" else 0)
    return out_features * in_features * scheme.bits // 8 + scales + 4 * numbers


def encode(q: QuantTensor) -> dict[str, Tensor]:
    """Turn codes and scales into tensors by local name. Raises CheckpointError for a scale that cannot be stored."""
    if q.scheme.number == "fp8":
        weight = q.codes.view(torch.float8_e4m3fn)
        return {"weight": weight.contiguous(), "weight_scale": _shared_once(q).to(q.scheme.stored_scale_dtype)}
    packed = pack_rows(q.codes, 4).contiguous().view(torch.uint8)[:, : q.shape[1] // 2].contiguous()
    if q.scheme.number == "mxfp4":
        return {"weight_packed": packed, "weight_scale": encode_e8m0(q.scales)}
    assert q.scheme.global_scale is not None
    stored = (q.scales * q.scheme.global_scale).to(torch.float8_e4m3fn)
    if not torch.equal(stored.float() / q.scheme.global_scale, q.scales):
        raise CheckpointError("a block scale is no E4M3 number beside its global scale")
    parts = {"weight_packed": packed, "weight_scale": stored, GLOBAL: torch.tensor([q.scheme.global_scale])}
    if q.scheme.input_global_scale is not None:
        parts[INPUT_GLOBAL] = torch.tensor([q.scheme.input_global_scale])
    return parts


def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
    """Undo ``encode``, of other tools' files too. Raises CheckpointError, naming the tensor, for damage."""
    return decode_fp8(parts, scheme) if scheme.number == "fp8" else decode_fp4(parts, scheme)


def decode_fp8(parts: Mapping[str, Tensor], scheme: Scheme, scale_name: str = "weight_scale") -> QuantTensor:
    """Decode E4M3 bytes, and scales for rows, for blocks or for the matrix."""
    weight, scales = parts["weight"], parts[scale_name]
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise CheckpointError(f"weight is {weight.dtype} {list(weight.shape)}; expected float8_e4m3fn [out, in]")
    out, width = weight.shape
    groups = scheme.groups(width)
    rows = out if scheme.rows is None else scheme.rows
    wanted = -(-out // rows), groups
    if scales.numel() == 1 and wanted == (1, 1):
        scales = scales.reshape(1, 1)
    require_shape(scale_name, scales, wanted, f"{scheme.describe()} over {[out, width]}")
    spread = scales.float().repeat_interleave(rows, 0)[:out].contiguous()
    return QuantTensor(weight.contiguous().view(torch.uint8), spread, None, scheme)


def decode_fp4(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
    """Decode E2M1 codes, two a byte, and their block scales."""
    packed, stored = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise CheckpointError(f"weight_packed is {packed.dtype} {list(packed.shape)}; expected uint8 [out, in / 2]")
    width = 2 * packed.shape[1]
    if width % (scheme.group_size or 1):
        raise CheckpointError(f"weight_packed holds {width} inputs, no whole blocks of {scheme.group_size}")
    wanted = torch.uint8 if scheme.number == "mxfp4" else torch.float8_e4m3fn
    if stored.dtype != wanted:
        raise CheckpointError(f"weight_scale is {stored.dtype}; {scheme.describe()} has {wanted}")
    shape = packed.shape[0], scheme.groups(width)
    require_shape("weight_scale", stored, shape, f"{scheme.describe()} over {[packed.shape[0], width]}")
    codes = unpack_rows(_words(packed), 4, width)
    if scheme.number == "mxfp4":
        if bool((stored == NAN_E8M0).any()):
            raise CheckpointError("weight_scale holds 255, which is no power of two but NaN. Download it again.")
        if int(stored.max()) > LARGEST_E8M0:  # far beyond any weight
            raise CheckpointError(f"weight_scale holds 2^{int(stored.max()) - 127}, no scale. Download it again.")
        return QuantTensor(codes, decode_e8m0(stored), None, scheme)
    scheme = _with_global_scales(parts, scheme)
    assert scheme.global_scale is not None
    numbers = decode_e4m3(stored.contiguous().view(torch.uint8))
    if bool((numbers < 0).any()):
        raise CheckpointError("weight_scale holds a negative number. Download it again.")
    empty = numbers == 0  # a block of zeros, as other tools write it
    if bool(empty.any()):
        codes = torch.where(empty.repeat_interleave(16, 1), 0, codes)
        numbers = torch.where(empty, 2.0**-9, numbers)
    return QuantTensor(codes, numbers / scheme.global_scale, None, scheme)


def _with_global_scales(parts: Mapping[str, Tensor], scheme: Scheme) -> Scheme:
    values: list[float | None] = []
    for name in (GLOBAL, INPUT_GLOBAL):
        if name not in parts or (name == INPUT_GLOBAL and scheme.activations is None):
            values.append(None)
            continue
        value = float(parts[name].float()) if parts[name].numel() == 1 else float("nan")
        if not 0 < value < float("inf"):
            raise CheckpointError(f"{name} is {parts[name].flatten()[:4].tolist()}; expected one positive number.")
        values.append(value)
    if scheme.activations == "nvfp4" and values[1] is None:
        raise CheckpointError(f"{INPUT_GLOBAL} is missing, which nvfp4 activations need.")
    return replace(scheme, global_scale=values[0], input_global_scale=values[1])


def _words(packed: Tensor) -> Tensor:
    """View bytes as the int32 words of ``core.packing``; rows are filled up to whole words."""
    missing = -packed.shape[1] % 4
    whole = torch.nn.functional.pad(packed, (0, missing)) if missing else packed
    return whole.contiguous().view(torch.int32)


def _shared_once(q: QuantTensor) -> Tensor:
    """Return each scale once, ``[rows that have one, groups]``; one for the whole matrix as ``[1]``."""
    if q.scheme.rows is None:
        return q.scales[0, :1].contiguous()
    return q.scales[:: q.scheme.rows].contiguous()


def weights_json(scheme: Scheme) -> dict[str, Any]:
    """Return a config group's ``weights``."""
    if scheme.number == "fp8":
        block = scheme.rows not in (1, None)
        strategy = "block" if block else "tensor" if scheme.rows is None else "channel"
        return {**_ARGS, "strategy": strategy, "block_structure": [BLOCK, BLOCK] if block else None}
    kind = "torch.float8_e4m3fn" if scheme.number == "nvfp4" else "torch.uint8"
    strategy = "tensor_group" if scheme.number == "nvfp4" else "group"
    sizes = {"num_bits": 4, "group_size": scheme.group_size, "scale_dtype": kind, "zp_dtype": kind}
    return {**_ARGS, "strategy": strategy, **sizes}


def activations_json(scheme: Scheme) -> dict[str, Any] | None:
    """Return a config group's ``input_activations``."""
    if scheme.activations is None:
        return None
    if scheme.activations == "nvfp4":
        return {**weights_json(scheme), "dynamic": "local", "observer": "static_minmax"}
    if scheme.activations == "mxfp4":
        return {**weights_json(scheme), "dynamic": True}
    block = scheme.rows not in (1, None)
    return {
        **_ARGS, "strategy": "group" if block else "token", "group_size": BLOCK if block else None, "dynamic": True,
    }  # fmt: skip


def local_names(scheme: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the local names of a weight by its scheme, as ``Scheme.to_json`` gives it."""
    number = scheme["number"]
    if number == "fp8":
        return "weight", "weight_scale"
    beside = (GLOBAL,) if number == "nvfp4" else ()
    return ("weight_packed", "weight_scale", *beside, *((INPUT_GLOBAL,) if scheme.get("activations") == number else ()))


def shape(infos: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """Return ``(out_features, in_features)`` of a weight by the headers of its tensors."""
    if "weight" in infos:
        rows, columns = infos["weight"].shape
        return rows, columns
    rows, half = infos["weight_packed"].shape
    return rows, 2 * half


def part_names(module: str, stored: set[str]) -> tuple[str, ...]:
    """Return the local names of a packed float weight."""
    extra = tuple(name for name in (GLOBAL, INPUT_GLOBAL) if f"{module}.{name}" in stored)
    return ("weight_packed", "weight_scale", *extra)


def scheme_of(module: str, group: Mapping[str, Any], parts: Mapping[str, TensorHeader]) -> Scheme:
    """Read the scheme of a module from its config group. Raises CheckpointError for what is not read."""
    weights, activations = group["weights"], group.get("input_activations")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if weights.get("symmetric") is not True or weights.get("dynamic"):
        raise CheckpointError(f"{module}: float weights that are asymmetric or dynamic are not read.")
    if bits == 4 and (strategy, size) in (("tensor_group", 16), ("group", 32)):
        kind = "nvfp4" if size == 16 else "mxfp4"
        if kind == "nvfp4" and GLOBAL not in parts:
            raise CheckpointError(f"{GLOBAL} is missing. The checkpoint is incomplete.")
        return _with_activations(module, Scheme.of(kind), activations)
    if bits != 8 or strategy not in ("channel", "tensor", "block"):
        raise CheckpointError(f"{module}: float weights of {bits} bits with strategy {strategy!r} are not read.")
    base = Scheme.of({"channel": "fp8", "tensor": "fp8-tensor", "block": "fp8-block"}[strategy])
    if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
        raise CheckpointError(f"{module}: blocks of {weights.get('block_structure')} are not read; 128 x 128 are.")
    dtype = SCALE_DTYPES.get(parts["weight_scale"].dtype)
    if dtype is None:
        raise CheckpointError(f"weight_scale is {parts['weight_scale'].dtype}; float32, bfloat16 and float16 are read.")
    return _with_activations(module, base, activations, dtype)


def _with_activations(
    module: str, scheme: Scheme, activations: Mapping[str, Any] | None, dtype: str | None = None
) -> Scheme:
    scheme = scheme if dtype is None else replace(scheme, scale_dtype=dtype)
    if not activations or (scheme.number == "fp8" and not activations.get("dynamic")):  # static: ``load`` tells of it
        return scheme
    kind = scheme.number  # beside each of the three only its own
    wanted = activations_json(replace(scheme, activations=kind)) or {}
    keys = ("num_bits", "type", "symmetric", "strategy", "dynamic")
    if any(activations.get(key) != wanted[key] for key in keys):
        words = ", ".join(f"{key} {activations.get(key)!r}" for key in keys)
        raise CheckpointError(
            f"{module}: activations with {words} beside {scheme.describe()} are not run here; fp8 rounded per token"
            " (beside blocks per 128 inputs), nvfp4 with local scales and dynamic mxfp4 are."
        )
    return replace(scheme, activations=kind)
