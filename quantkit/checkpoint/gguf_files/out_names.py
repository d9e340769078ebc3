"""Where the tensors of a Hugging Face model go in a GGUF file: names, and what llama.cpp's graphs expect of the values.

The names come from the ``gguf`` library. What else changes is little: rows of queries and keys where llama.cpp rotates
neighbouring pairs instead of halves, 1 added to Gemma's norms, experts of a layer stacked in one tensor. A model type
that is not in ``FAMILIES``, and a tensor without a name, are refused: half a model would load, and talk nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.checkpoint.gguf_files.header import gguf_library
from quantkit.errors import UnsupportedModel

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Family:
    """What one model type is in GGUF.

    architecture: llama.cpp's name. interleaved: rows of q and k are stored as (pair, half) instead of (half, pair).
    shifted: norms are stored as 1 + w.
    """

    architecture: str
    interleaved: bool = False
    shifted: bool = False


FAMILIES = {
    "llama": Family("llama", interleaved=True),
    "mistral": Family("llama", interleaved=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe"),
    "gemma3_text": Family("gemma3", shifted=True),
    "phi3": Family("phi3"),
    "granite": Family("granite", interleaved=True),
    "olmo2": Family("olmo2"),
    "gpt_oss": Family("gpt-oss"),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """Return what a config's model type is in GGUF.

    Raises UnsupportedModel for a type that is not written.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"model type {kind!r} is not written as GGUF; these are: {', '.join(FAMILIES)}. Write another --format, or"
            " use llama.cpp's own converter."
        )
    return FAMILIES[kind]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one stored tensor goes.

    name: of the tensor in the GGUF file. expert: its entry there; None where it is the whole tensor.
    heads: how many heads its rows have to be reordered for; 0 for none. shift: is added.
    """

    name: str
    expert: int | None = None
    heads: int = 0
    shift: float = 0.0

    def apply(self, value: Tensor) -> Tensor:
        """Return the value as the file holds it; packed rows keep their bytes."""
        if self.heads:
            value = interleave(value, self.heads)
        return value + self.shift if self.shift else value


class Names:
    """The places of one model's tensors.

    config: as transformers has it, with ``model_type``, numbers of layers and heads.

    Raises UnsupportedModel for a type that is not written.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        gguf = gguf_library()
        self.config, self.family = config, family_of(config)
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(kinds[self.family.architecture], int(config["num_hidden_layers"]))

    def place(self, stored: str) -> Place:
        """Return where a stored tensor goes.

        stored: its Hugging Face name.

        Raises UnsupportedModel for a tensor that has no place.
        """
        match = EXPERT.fullmatch(stored)
        key = f"{match[1]}.{match[3]}.{match[4]}" if match else stored
        if key.endswith(".sinks"):
            key += ".weight"
        name = self._map.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UnsupportedModel(
                f"{stored}: has no place in a GGUF file of architecture {self.family.architecture}. Write another"
                " --format, or use llama.cpp's own converter."
            )
        expert = int(match[2]) if match else None
        return Place(str(name), expert, self._heads(stored), self._shift(stored))

    def _heads(self, stored: str) -> int:
        part = stored.rsplit(".", 2)[-2]
        if not self.family.interleaved or part not in ("q_proj", "k_proj"):
            return 0
        heads = int(self.config["num_attention_heads"])
        return heads if part == "q_proj" else int(self.config.get("num_key_value_heads") or heads)

    def _shift(self, stored: str) -> float:
        return 1.0 if self.family.shifted and stored.endswith("norm.weight") else 0.0


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from (head, half, pair) to (head, pair, half), as llama.cpp rotates them.

    rows: ``[out, ...]``: weights, packed bytes, a bias.

    >>> import torch
    >>> interleave(torch.arange(4), 1).tolist()
    [0, 2, 1, 3]
    """
    count = rows.shape[0]
    parts = rows.reshape(heads, 2, count // heads // 2, *rows.shape[1:])
    return parts.transpose(1, 2).reshape(rows.shape).contiguous()
