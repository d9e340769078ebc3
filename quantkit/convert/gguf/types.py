"""What ``--gguf-type`` names: the mixes of block formats that llama.cpp has, tensor by tensor as llama.cpp chooses.

The choices are those of ``src/llama-quant.cpp`` (llama_tensor_get_type_impl, tensor_type_fallback), read in November
2026, so that a file is as large as the one people know under that name. They were compared with what llama.cpp itself
made of the same models (tests/unit/convert/gguf_types.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quantkit.core.blocks import KINDS
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError

MIXED = "mixed"  # what --target-bpw chooses; the formats here are provisional, the file says no type
# name -> (number of general.file_type, format of most tensors)
MIXES: dict[str, tuple[int | None, str]] = {
    "f32": (0, "F32"), "f16": (1, "F16"), "bf16": (32, "BF16"), "q8_0": (7, "Q8_0"), "q6_k": (18, "Q6_K"),
    "q5_k_m": (17, "Q5_K"), "q5_k_s": (16, "Q5_K"), "q5_1": (9, "Q5_1"), "q5_0": (8, "Q5_0"),
    "q4_k_m": (15, "Q4_K"), "q4_k_s": (14, "Q4_K"), "q4_1": (3, "Q4_1"), "q4_0": (2, "Q4_0"),
    "iq4_nl": (25, "IQ4_NL"), "mxfp4": (38, "MXFP4"), "q3_k_l": (13, "Q3_K"), "q3_k_m": (12, "Q3_K"),
    "q3_k_s": (11, "Q3_K"), "q2_k": (10, "Q2_K"), MIXED: (None, "Q4_K"),
}  # fmt: skip
NAMED = tuple(name for name in MIXES if name != MIXED)
FLOATS = ("F32", "F16", "BF16")
SYNONYMS = {"q4_k": "q4_k_m", "q5_k": "q5_k_m", "q3_k": "q3_k_m", "fp16": "f16", "fp32": "f32", "mxfp4_moe": "mxfp4"}
# what takes a format's place in rows that its blocks of 256 do not divide
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
LARGE_LAYERS = 80  # of Llama 70B and Qwen 72B, whose few value heads get more bits


def mix_name(text: str) -> str:
    """Return a mix by the name that was given, in capitals or not.

    Raises RequestError for one that does not exist.
    """
    name = str(text).lower().replace("-", "_")
    name = SYNONYMS.get(name, name)
    if name not in MIXES:
        raise RequestError(f"--gguf-type {text}: no such type. Types: {', '.join(NAMED)}.")
    return name


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the choice depends on.

    layers, experts: how many; 0 experts for a dense model. values: how many tensors hold values of attention.
    share: query heads per key-value head. tied: the embedding is the head, too. informed: there are statistics.
    family: llama.cpp's architecture.
    """

    layers: int
    values: int
    experts: int
    share: int
    tied: bool
    informed: bool
    family: str


@dataclass(frozen=True, slots=True)
class Chosen:
    """The format of one tensor, and the reason why it is not the mix's own (None if it is)."""

    kind: str
    fallback: str | None = None


def tensor_kind(mix: str, name: str, shape: tuple[int, ...], facts: ModelFacts) -> Chosen:
    """Choose the format of one tensor.

    mix: a key of ``MIXES``. name: of the tensor in the file. shape: in torch's order.
    """
    base = MIXES[mix][1]
    if not quantizable(name, shape):
        return Chosen("F32")
    if base in FLOATS:
        return Chosen(base)
    kind = _wanted(mix, base, name, shape, facts)
    width = KINDS[kind].width
    if shape[-1] % width == 0:
        return Chosen(kind)
    other = FALLBACKS.get(kind, "F16")
    if other == "F16" or shape[-1] % KINDS[other].width:
        return Chosen("F16", f"F16: rows of {shape[-1]} are no multiple of 32")
    return Chosen(other, f"{other} instead of {kind}: rows of {shape[-1]} are no multiple of {width}")


def quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor is a matrix that llama.cpp rounds: no norm, bias, or gate of experts."""
    return len(shape) > 1 and name.endswith(".weight") and "_norm." not in name and "ffn_gate_inp" not in name


def _wanted(mix: str, base: str, name: str, shape: tuple[int, ...], facts: ModelFacts) -> str:
    """Return the format before rows are looked at."""
    if name == "output.weight" or (facts.tied and name == "token_embd.weight"):
        if mix == "mxfp4" or shape[-1] % KINDS[base].width:
            return "Q8_0"
        return base if base == "Q8_0" else "Q6_K"
    if mix == "mxfp4":
        return "MXFP4" if len(shape) > 2 else "Q8_0"
    if name == "token_embd.weight":
        return base
    _, layer, part = name.split(".")[:3]
    if part in ("attn_v", "attn_qkv"):
        return _values(mix, base, int(layer), facts)
    if part == "attn_k" and facts.experts == 8:
        return "Q8_0"
    if part.startswith("ffn_down"):
        return _down(mix, base, int(layer), facts)
    if part == "attn_output":
        return _output(mix, base, facts)
    return base


def _more_bits(layer: int, layers: int) -> bool:
    """Tell whether a layer is one of those that get more bits: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _values(mix: str, base: str, layer: int, facts: ModelFacts) -> str:
    many = facts.share >= 4
    found: dict[str, str] = {
        "q2_k": "Q4_K" if many else "Q3_K",
        "q3_k_m": "Q5_K" if layer < 2 else "Q4_K",
        "q3_k_l": "Q5_K",
        "iq4_nl": "Q5_K" if many else base,
        "q4_k_s": "Q5_K" if layer < 4 else base,
    }
    kind = found.get(mix, base)
    if mix in ("q4_k_m", "q5_k_m") and _more_bits(layer, facts.values):
        kind = "Q6_K"
    if facts.layers == LARGE_LAYERS and facts.family in ("llama", "qwen2") and kind in ("Q3_K", "Q4_K"):
        kind = "Q5_K"
    return "Q8_0" if facts.experts == 8 else kind


def _down(mix: str, base: str, layer: int, facts: ModelFacts) -> str:
    layers = facts.layers
    first = layer < layers // 8
    found: dict[str, str] = {
        "q2_k": "Q3_K",
        "q3_k_m": "Q5_K" if layer < layers // 16 else "Q4_K",
        "q3_k_l": "Q5_K",
        "q4_k_m": "Q6_K" if _more_bits(layer, layers) else base,
        "q5_k_m": "Q6_K" if _more_bits(layer, layers) else base,
        "q4_k_s": "Q5_K" if first else base,
        "iq4_nl": "Q5_K" if first and not facts.informed else base,
        "q4_0": "Q4_1" if first and facts.informed else base,
        "q5_0": "Q5_1" if first and facts.informed else base,
    }
    return found.get(mix, base)


def _output(mix: str, base: str, facts: ModelFacts) -> str:
    if facts.experts == 8:
        return "Q5_K" if mix in ("q2_k", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m") else base
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mix, base)


def alike(kind: str) -> Scheme:
    """Return the integer scheme that is most like a block format: what channels are scaled for, and memory is counted.

    >>> alike("Q4_K").describe()
    'W4 g32 asym'
    """
    block = KINDS[kind]
    return Scheme(block.bits, block.sub, symmetric=not block.minima)


def kinds_in_words(counts: Mapping[str, int]) -> str:
    """Return how many tensors have which format, for people."""
    return ", ".join(f"{kind} x {count}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
