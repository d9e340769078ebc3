"""gguf: one file for llama.cpp and its kin. Weights are blocks of ggml's formats (``core.blocks``), no integer schemes.

A block of bytes is placed by ``gguf_blocks``; which integer codes are blocks exactly, and back, is in ``gguf_codes``;
which tensor gets which format when weights are rounded is chosen in ``convert.gguf.types``; names, metadata and
tokenizer are ``checkpoint.gguf_files``' matter. Here is what a plan asks of a format, and the reading half of a repack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.core.blocks import block_kind
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.formats.ggml import blocks as gguf_blocks
from quantkit.formats.ggml import codes as gguf_codes
from quantkit.formats.interface import CheckpointLayout, Refusal, TensorHeader

BLOCKS = "blocks"  # the local name of a weight's bytes in the work folder: uint8 [out, row bytes]

PIECE = 1 << 18  # weights that become blocks at a time: what is in between stays in a cache


class GGUF:
    name = "gguf"
    summary = "one file for llama.cpp, Ollama and LM Studio: Q4_K_M and its kin"
    stem = "model"
    head_embeddings: tuple[str, ...] = ("head", "embedding", "tied")
    uniform_groups = False
    holds_cache_scales = False

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        """Explain why no block format holds the codes of a quantized weight as they are; None if one does."""
        why = gguf_codes.refusal(scheme, in_features)
        return None if why is None else Refusal(why, "Give the 16-bit original with --format gguf --gguf-type q4_k_m.")

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        return scheme.group_size

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        return None

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        """Count the bytes of a repacked weight, at most: which blocks asymmetric codes need is seen in them."""
        return out_features * block_kind(gguf_codes.widest_kind(scheme)).row_bytes(in_features)

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        """Turn codes into the bytes of the smallest blocks that hold them exactly; the local name tells which.

        Raises CheckpointError where none does.
        """
        return encode_as(q, gguf_codes.block_kind_for(q))

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        """Undo ``encode``; groups come back as blocks of 32."""
        return _decoded(parts, scheme.symmetric)

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        return {}

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    # -- reading, for a repack: the config is made from the file's table, {"modules": {name: {"kind", "symmetric"}}}

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return {module: (local_name(entry["kind"]),) for module, entry in config["modules"].items()}

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme:
        entry = config["modules"][module]
        return gguf_codes.scheme_of(entry["kind"], entry["symmetric"])

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        ((name, info),) = infos.items()
        rows, row_bytes = info.shape
        kind = block_kind(name.removeprefix(f"{BLOCKS}."))
        return rows, row_bytes // kind.nbytes * kind.width

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor:
        return _decoded(parts, config["modules"][module]["symmetric"])


def local_name(kind: str) -> str:
    """Return the local name of a weight in blocks of a kind.

    >>> local_name("Q4_0")
    'blocks.Q4_0'
    """
    return f"{BLOCKS}.{kind}"


def encode_as(q: QuantTensor, kind: str) -> dict[str, Tensor]:
    """Turn codes into blocks of a kind that holds them: uint8 ``[out, row bytes]`` by local name."""
    block, (rows, columns) = block_kind(kind), q.shape
    packed = torch.empty((rows, block.row_bytes(columns)), dtype=torch.uint8)
    step = max(1, PIECE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        packed[part] = gguf_blocks.encode(gguf_codes.to_blocks(q.rows(part), kind))
    return {local_name(kind): packed}


def _decoded(parts: Mapping[str, Tensor], symmetric: bool) -> QuantTensor:
    ((name, packed),) = parts.items()
    kind = block_kind(name.removeprefix(f"{BLOCKS}."))
    return gguf_codes.from_blocks(gguf_blocks.decode(packed, kind), symmetric=symmetric)
