"""gguf: one file for llama.cpp and its kin. Weights are blocks of ggml's formats (``core.blocks``), no integer schemes.

A block of bytes is placed by ``gguf_blocks``; which tensor gets which format is chosen in
``convert.gguf.types``; names, metadata and tokenizer are ``checkpoint.gguf_files``' matter. Here is what a plan
asks of a format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError
from quantkit.formats.interface import CheckpointLayout, Refusal

BLOCKS = "blocks"  # the local name of a weight's bytes in the work folder: uint8 [out, row bytes]


class GGUF:
    name = "gguf"
    summary = "one file for llama.cpp, Ollama and LM Studio: Q4_K_M and its kin"
    stem = "model"
    head_embeddings: tuple[str, ...] = ("head", "embedding", "tied")
    uniform_groups = False
    holds_cache_scales = False

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        return Refusal("GGUF holds blocks of ggml's formats, not integer schemes", "Choose a --gguf-type.")

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return scheme.group_size

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        raise CheckpointError("a GGUF file holds no integer schemes")  # targets with blocks are counted by those

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        raise CheckpointError("a GGUF file holds no integer schemes")

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        raise CheckpointError("a GGUF file holds no integer schemes")

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        return {}

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {}
