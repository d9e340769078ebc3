"""bitsandbytes checkpoints: NF4 and FP4 (with or without double quantization) and LLM.int8.

4 bits, per linear ``X`` (out_features N, in_features K, weight flattened row by row, blocks of B = 64 elements)::

    X.weight                  uint8 [N*K/2, 1]   first element in the high nibble: an index into quant_map
    X.weight.absmax           fp32 [N*K/B], or uint8 when nested (double quantization)
    X.weight.quant_map        fp32 [16]
    X.weight.nested_absmax    fp32 [N*K/B/256]   absmax = nested_quant_map[code] * nested_absmax + offset
    X.weight.nested_quant_map                    fp32 [256]
    X.weight.quant_state.bitsandbytes__nf4       uint8: JSON {quant_type, blocksize, dtype, shape,
                                                 [nested_blocksize, nested_offset]}

8 bits::

    X.weight int8 [N, K]      X.SCB fp32 [N]      w = code * SCB / 127      X.weight_format uint8, 0 = row major

Layouts: bitsandbytes/functional.py (QuantState), bitsandbytes/nn/modules.py (Linear8bitLt). The library itself is not
needed to read them; to write them it rounds (``bitsandbytes_library.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core.qtensor import BlockTensor, QuantTensor, TableTensor
from quantkit.core.scheme import OF_BITSANDBYTES, Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.interface import CheckpointLayout, Refusal, TensorHeader

STATE = "weight.quant_state.bitsandbytes__"
FOUR_BIT = ("weight", "weight.absmax", "weight.quant_map")
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


DOUBLE = "-double"  # ends the name of a scheme whose scales are quantized, too
FOUR_BIT_BLOCK, NESTED_BLOCK = 64, 256  # weights of a scale; scales of a scale of scales
STATE_BYTES = 120  # of a quant_state's JSON, about: its length depends on the digits of shape and offset
# The weights that it packs are float16 at most, or of such a range.
LARGEST = 65504.0


class BitsAndBytes:
    name = "bitsandbytes"
    summary = "NF4, FP4 and LLM.int8 of the bitsandbytes library, for transformers"
    stem = "model"
    head_embeddings: tuple[str, ...] = ()
    uniform_groups = False
    holds_cache_scales = False

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        if scheme.number in OF_BITSANDBYTES:
            return None
        return Refusal(
            "bitsandbytes holds NF4, FP4 and LLM.int8, not these numbers",
            "Quantize the 16-bit original with --format bitsandbytes --scheme nf4.",
        )

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return scheme.group_size

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        count = out_features * in_features
        if scheme.bits == 8:
            return count + 4 * out_features + 1
        blocks = math.ceil(count / FOUR_BIT_BLOCK)
        scales = 4 * blocks
        if scheme.number.endswith(DOUBLE):
            scales = blocks + 4 * math.ceil(blocks / NESTED_BLOCK) + 4 * 256
        return (count + 1) // 2 + scales + 4 * 16 + STATE_BYTES

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        raise CheckpointError("bitsandbytes holds no integer codes with scales")

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        raise CheckpointError("bitsandbytes holds no integer codes with scales")

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        """What transformers' BitsAndBytesConfig writes; one scheme for the whole model."""
        number = next(iter(layout.modules.values())).number
        int8 = number == "llm-int8"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": not int8,
            "load_in_8bit": int8,
            "bnb_4bit_quant_type": "fp4" if int8 else number.removesuffix(DOUBLE),
            "bnb_4bit_use_double_quant": number.endswith(DOUBLE),
            "bnb_4bit_compute_dtype": layout.dtype or "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_threshold": 6.0,
            "llm_int8_skip_modules": list(layout.dense),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """List quantized modules and their local tensor names. A missing part is found by the caller."""
        stored = set(names)
        parts: dict[str, tuple[str, ...]] = {}
        for name in names:
            module, mark, kind = name.partition(f".{STATE}")
            if mark:
                nested = NESTED if f"{module}.{NESTED[0]}" in stored else ()
                parts[module] = (*FOUR_BIT, *nested, f"{STATE}{kind}")
            elif name.endswith(".SCB"):
                module = name.removesuffix(".SCB")
                layout = ("weight_format",) if f"{module}.weight_format" in stored else ()
                parts[module] = ("weight", "SCB", *layout)
        return parts

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> str:
        state = next((name for name in infos if name.startswith(STATE)), None)
        return "llm-int8" if state is None else state.removeprefix(STATE)

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        return None

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> BlockTensor:
        """Decode one module. Raises CheckpointError when its tensors do not fit together."""
        return _int8(parts) if "SCB" in parts else _four_bit(parts)


def scheme_of(kind: str, parts: Sequence[str]) -> Scheme | None:
    """Return what a stored module's kind is as a scheme, None for one that quantkit does not write.

    kind: as ``BitsAndBytes.scheme`` returns it.
    parts: the module's local names.
    """
    number = f"{kind}{DOUBLE}" if NESTED[0] in parts else kind
    return Scheme.of(number) if number in OF_BITSANDBYTES else None


def _int8(parts: Mapping[str, Tensor]) -> BlockTensor:
    weight, scales = parts["weight"], parts["SCB"]
    if weight.dtype != torch.int8 or weight.dim() != 2 or tuple(scales.shape) != (weight.shape[0],):
        raise CheckpointError(
            f"int8 weight is {weight.dtype} {list(weight.shape)} with SCB {list(scales.shape)}; expected int8 [N, K]"
            " and [N]"
        )
    if int(parts.get("weight_format", torch.tensor(0))) != 0:
        raise CheckpointError("weight_format is not row-major (0). Save the model again with a current bitsandbytes.")
    _check_numbers("SCB", scales, 0.0, LARGEST)
    raw = {"weight": weight, "SCB": scales}
    shape = (weight.shape[0], weight.shape[1])
    return BlockTensor("llm-int8", raw, shape, _stored_bits(raw), decode_int8)


def decode_int8(raw: Mapping[str, Tensor]) -> Tensor:
    """Compute ``code * SCB / 127`` in float32 ``[out, in]``."""
    return raw["weight"].float() * (raw["SCB"].float() / 127).unsqueeze(1)


def _four_bit(parts: Mapping[str, Tensor]) -> BlockTensor:
    state_name = next(name for name in parts if name.startswith(STATE))
    if parts[state_name].dtype != torch.uint8:
        raise CheckpointError(f"{state_name} is {parts[state_name].dtype}, expected the bytes of a JSON object")
    try:
        state = json.loads(bytes(parts[state_name].to(torch.uint8).tolist()).decode())
        rows, cols = (int(n) for n in state["shape"])
        block, kind = int(state["blocksize"]), str(state["quant_type"])
        if NESTED[0] in parts:
            nested_block, offset = int(state["nested_blocksize"]), float(state["nested_offset"])
        else:
            nested_block, offset = 0, 0.0
        if min(rows, cols, block) < 1 or nested_block < int(NESTED[0] in parts) or not math.isfinite(offset):
            raise ValueError(f"shape {[rows, cols]}, blocks of {block} and {nested_block}, offset {offset}")
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{state_name} does not describe a 4-bit matrix ({reason})") from error
    raw = {name: tensor for name, tensor in parts.items() if name != state_name}
    _check_state(state_name, raw, (rows, cols, block), nested_block, offset)
    packed, blocks = raw["weight"], math.ceil(rows * cols / block)
    if (
        packed.dtype != torch.uint8
        or packed.numel() != (rows * cols + 1) // 2
        or raw["weight.absmax"].numel() != blocks
    ):
        raise CheckpointError(
            f"{packed.numel()} {packed.dtype} values and {raw['weight.absmax'].numel()} scales do not hold {kind}"
            f" {[rows, cols]} in blocks of {block} (only quant_storage uint8 is read)"
        )

    def decode(raw: Mapping[str, Tensor]) -> Tensor:
        return decode_four_bit(raw, (rows, cols), block, nested_block, offset)

    def look_up(raw: Mapping[str, Tensor]) -> TableTensor:
        return tabled(raw, (rows, cols), block, nested_block, offset)

    along_rows = cols % block == 0 or block % cols == 0  # else a block ends within a row
    return BlockTensor(kind, raw, (rows, cols), _stored_bits(raw), decode, look_up if along_rows else None)


def _check_state(
    name: str, raw: Mapping[str, Tensor], sizes: tuple[int, int, int], nested_block: int, offset: float
) -> None:
    """Raise CheckpointError for sizes that are none, and tables that do not have an entry for every code."""
    if min(sizes) < 1 or (NESTED[0] in raw and nested_block < 1) or not math.isfinite(offset):
        raise CheckpointError(f"{name} says rows, columns and blocks of {[*sizes, nested_block]}, offset {offset}")
    _check_numbers("weight.quant_map", raw["weight.quant_map"], -1.0, 1.0)
    if NESTED[0] in raw:
        _check_numbers(NESTED[0], raw[NESTED[0]], 0.0, LARGEST)
        _check_numbers(NESTED[1], raw[NESTED[1]], -1.0, 1.0)
    else:
        _check_numbers("weight.absmax", raw["weight.absmax"], 0.0, LARGEST)
    if raw["weight.quant_map"].numel() != 16:
        raise CheckpointError(f"weight.quant_map has {raw['weight.quant_map'].numel()} entries, 4 bits name 16")
    if NESTED[0] in raw:
        absmax = raw["weight.absmax"]
        counted = math.ceil(absmax.numel() / nested_block)
        if absmax.dtype != torch.uint8 or raw[NESTED[1]].numel() != 256 or counted != raw[NESTED[0]].numel():
            raise CheckpointError(
                f"{NESTED[0]} and {NESTED[1]} do not hold the {absmax.numel()} scales of weight.absmax ({absmax.dtype})"
            )


def _check_numbers(name: str, values: Tensor, low: float, high: float) -> None:
    """Raise CheckpointError, naming the tensor, for scales or a table that the library does not write."""
    if not values.is_floating_point():
        raise CheckpointError(f"{name} is {values.dtype}, expected floating-point numbers")
    if not bool(((values >= low) & (values <= high)).all()):
        raise CheckpointError(f"{name} holds a value that is not finite, or outside {low:g} to {high:g}")


def decode_four_bit(
    raw: Mapping[str, Tensor], shape: tuple[int, int], block: int, nested_block: int, offset: float
) -> Tensor:
    """Compute ``quant_map[index] * absmax`` in float32 ``shape``.

    nested_block: block of the quantized absmax, 0 if it is fp32.
    """
    numel = shape[0] * shape[1]
    values = raw["weight.quant_map"].float()[_indices(raw, numel).long()]
    return (values * _absmax(raw, nested_block, offset).repeat_interleave(block)[:numel]).reshape(shape)


def tabled(
    raw: Mapping[str, Tensor], shape: tuple[int, int], block: int, nested_block: int, offset: float
) -> TableTensor:
    """Return the same numbers as codes ``[out, in]`` and scales ``[out, groups]``.

    Blocks end at the ends of rows, or hold whole rows.
    """
    rows, cols = shape
    scales = _absmax(raw, nested_block, offset)
    if block >= cols:
        scales = scales.repeat_interleave(block // cols)[:rows]
    codes = _indices(raw, rows * cols).reshape(shape)
    table = raw["weight.quant_map"].float()
    return TableTensor(codes, scales.reshape(rows, -1), table, block if block < cols else None)


def _indices(raw: Mapping[str, Tensor], numel: int) -> Tensor:
    packed = raw["weight"].flatten()
    return torch.stack([packed >> 4, packed & 15], dim=1).flatten()[:numel]


def _absmax(raw: Mapping[str, Tensor], nested_block: int, offset: float) -> Tensor:
    absmax = raw["weight.absmax"].flatten()
    if nested_block:
        absmax = raw["weight.nested_quant_map"].float()[absmax.long()]
        absmax = absmax * raw["weight.nested_absmax"].float().repeat_interleave(nested_block)[: absmax.numel()] + offset
    return absmax.float()


def _stored_bits(raw: Mapping[str, Tensor]) -> int:
    """Bits of codes and scales; the two constant maps (16 and 256 values, the same in every module) are not counted."""
    return sum(8 * t.numel() * t.itemsize for name, t in raw.items() if not name.endswith("quant_map"))
