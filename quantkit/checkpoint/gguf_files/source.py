"""A GGUF file seen as a Hugging Face model: config rebuilt, tensors renamed, dequantized one at a time.

Names, row orders and offsets that llama.cpp's converter changed are changed back, by one explicit table per
architecture (below); an architecture or tensor that is not in the tables is refused by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.foreign_files.config import check_claims, check_config
from quantkit.checkpoint.gguf_files.architectures import ARCHITECTURES, BARE, EXPERT_STACKS, OUTER, ROPE_FACTORS
from quantkit.checkpoint.gguf_files.config import rebuild_config
from quantkit.checkpoint.gguf_files.header import Header, StoredTensor, gguf_library, read_header
from quantkit.checkpoint.gguf_files.mixtures import expert_entries
from quantkit.checkpoint.source import TensorInfo
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.mapped import View, owned
from quantkit.errors import SourceError, UnsupportedModel

# Values dequantized at once: bounds the float32 scratch memory to tens of megabytes for any tensor.
CHUNK_VALUES = 1 << 22
# What bfloat16 holds exactly, and float16 may not: of MXFP4, powers of two times 4 bits.
BFLOAT16 = ("BF16", "MXFP4")
LAYER = re.compile("[0-9]{1,6}")


class GGUFSource:
    """One GGUF file as a Source.

    Tensors come out as float16 (bfloat16 where stored so), whatever they were packed in.
    """

    def __init__(self, path: Path) -> None:
        """Read the header only. Raises SourceError for a damaged file, UnsupportedModel for what the tables lack."""
        self.path = path
        self.header: Header = read_header(path)
        name = self.header.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{path}: GGUF architecture {name!r} is not read; these are: {', '.join(sorted(ARCHITECTURES))}. "
                "Use the model's Hugging Face folder instead."
            )
        self.architecture = ARCHITECTURES[name]
        names = {key: self._hf_name(key) for key in self.header.tensors if key != ROPE_FACTORS}
        self._check_kinds()
        self.config: dict[str, Any] = rebuild_config(name, self.architecture, self)
        check_config(self.config, str(path))
        self._stored = self._seen(names)
        check_claims(self.config, [self.info(tensor).nbytes for tensor in self.names()], str(path))

    def _seen(self, names: dict[str, str]) -> dict[str, StoredTensor]:
        """Return where each tensor lies by its Hugging Face name: stacks of experts become a tensor for each.

        names: stored name -> Hugging Face name, ``*`` for the number of an expert.

        Raises SourceError for experts of a layer that the model does not have.
        """
        seen: dict[str, StoredTensor] = {}
        layers = self.config["num_hidden_layers"]
        for key, name in names.items():
            stored = self.header.tensors[key]
            if "*" not in name:
                seen[name] = stored
                continue
            if int(key.split(".")[1]) >= layers:
                raise SourceError(
                    f"{self.path}: tensor {key!r} belongs to no layer: the metadata gives {layers} (block_count). The"
                    " file is damaged: download it again."
                )
            seen |= {name.replace("*", str(index)): entry for index, entry in enumerate(expert_entries(stored))}
        return seen

    def names(self) -> list[str]:
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        """Return shape and dtype: a 16-bit one that holds what the tensor is stored in, of F32 the config's."""
        stored = self._entry(name)
        bfloat16 = stored.kind in BFLOAT16 or (stored.kind == "F32" and self.config["torch_dtype"] == "bfloat16")
        return TensorInfo(torch.bfloat16 if bfloat16 else torch.float16, stored.shape)

    def view(self, name: str) -> View:
        return owned(self.read(name))  # most are unpacked, or turned

    def read_entry(self, name: str, index: int) -> Tensor:
        return self.read(name)[index]

    def read(self, name: str) -> Tensor:
        """Read one tensor, dequantized in float32 and cast.

        Raises SourceError if a value does not fit float16.
        """
        return self.read_as(name, self.info(name).dtype)[0]

    def read_as(self, name: str, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Read one tensor, dequantized in float32 and cast; with the error of the cast, relative to the tensor's size.

        Raises SourceError if a value does not fit the dtype.
        """
        stored = self._entry(name)
        out = torch.empty(stored.shape, dtype=dtype)
        rows = out.view(-1, stored.shape[-1])
        shift = 1.0 if self.architecture.norms_plus_one and name.endswith("norm.weight") else 0.0
        error = size = 0.0
        for start, values in self._chunks(stored, len(rows)):
            part = values - shift if shift else values
            cast = part.to(dtype)
            if not torch.isfinite(cast).all() and torch.isfinite(part).all():
                largest = part.abs().max().item()
                raise SourceError(
                    f"{self.path}: tensor {name!r} holds {largest:.4g}, more than"
                    f" {str(dtype).removeprefix('torch.')} can. Use --dequantize --dtype bfloat16 first,"
                    " or the model's BF16 or FP32 original."
                )
            if dtype != torch.float32:
                error += float((cast.float() - part).square().sum())
                size += float(part.square().sum())
            rows[start : start + len(cast)] = cast
        return self._rows_in_order(name, out), (error / size) ** 0.5 if size else 0.0

    def kind(self, name: str) -> str:
        """Return the ggml type that a tensor is stored in."""
        return self._entry(name).kind

    def row_bytes(self, name: str) -> int:
        """Return the stored bytes of one row."""
        stored = self._entry(name)
        return stored.nbytes * stored.shape[-1] // torch.Size(stored.shape).numel()

    def packed_pieces(self, name: str) -> Iterator[Tensor]:
        """Yield some stored rows after the other, as they are in the file: uint8 ``[rows, row bytes]``."""
        stored = self._entry(name)
        for _, data in self._stored_rows(stored, torch.Size(stored.shape).numel() // stored.shape[-1]):
            yield torch.from_numpy(data)

    def packed(self, name: str) -> Tensor:
        """Read the bytes of a tensor's blocks, uint8 ``[rows, row bytes]``, rows in the order that transformers has."""
        return self._rows_in_order(name, torch.cat(list(self.packed_pieces(name))))

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as stream:
            while block := stream.read(1 << 20):
                raise_if_interrupted()
                digest.update(block)
        return digest.hexdigest()

    def kinds(self) -> list[str]:
        return [f"GGUF {kind}" for kind in sorted({stored.kind for stored in self.header.tensors.values()})]

    def file_bytes(self) -> int:
        return self.path.stat().st_size

    def digest(self) -> str:
        """Return the sha256 of the file."""
        return self._digest

    def quantization(self) -> dict[str, Any] | None:
        """Return None: what comes out of ``read`` is floating point."""
        return None

    def stored(self, name: str) -> StoredTensor | None:
        """Return the table entry of a tensor by its GGUF name, None if the file has none."""
        return self.header.tensors.get(name)

    def raw(self, name: str) -> Tensor:
        """Read a stored tensor's float32 values by its GGUF name, as they are in the file."""
        stored = self.header.tensors[name]
        rows = torch.Size(stored.shape).numel() // stored.shape[-1]
        return torch.cat([values for _, values in self._chunks(stored, rows)]).reshape(stored.shape)

    def _entry(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise SourceError(f"{self.path}: no tensor named {name!r}")
        return self._stored[name]

    def _hf_name(self, stored: str) -> str:
        """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``.

        Of a stack of experts the name of one, ``*`` for its number: ``model.layers.3.mlp.experts.*.up_proj.weight``.
        """
        stem, _, suffix = stored.rpartition(".")
        if suffix in ("weight", "bias"):
            if stem in OUTER:
                return f"{OUTER[stem]}.{suffix}"
            head, _, rest = stem.partition(".")
            layer, _, part = rest.partition(".")
            if head == "blk" and LAYER.fullmatch(layer):
                if part in self.architecture.layer_names:
                    place = f"model.layers.{layer}.{self.architecture.layer_names[part]}"
                    return place if place.endswith(BARE) else f"{place}.{suffix}"
                if part in EXPERT_STACKS and suffix in self.architecture.expert_parts:
                    return f"model.layers.{layer}.mlp.experts.*.{EXPERT_STACKS[part]}.{suffix}"
        raise UnsupportedModel(
            f"{self.path}: tensor {stored!r} has no place in a {self.architecture.model_type} model. "
            "This is another variant of the architecture; use the model's Hugging Face folder instead."
        )

    def _check_kinds(self) -> None:
        """Refuse, before any work, a packing that the gguf library cannot undo, and one file of several."""
        gguf = gguf_library()
        if self.header.metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(
                f"{self.path}: one of {self.header.metadata['split.count']} files of a split model. "
                "Join them first with llama.cpp's llama-gguf-split --merge."
            )
        for kind in sorted({stored.kind for stored in self.header.tensors.values()} - {"F32", "F16", "BF16"}):
            code = gguf.GGMLQuantizationType[kind]
            try:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[code][1]), np.uint8), code)
            except NotImplementedError:  # what gguf.quants.dequantize raises for a packing that it does not know
                name = next(n for n, stored in self.header.tensors.items() if stored.kind == kind)
                raise UnsupportedModel(
                    f"{self.path}: tensor {name!r} is packed as {kind}, which the gguf library does not dequantize."
                ) from None

    def _chunks(self, stored: StoredTensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, float32 values [rows, width]) pieces."""
        for start, data in self._stored_rows(stored, rows):
            yield start, torch.from_numpy(_dequantize(data, stored.kind))

    def _stored_rows(self, stored: StoredTensor, rows: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        """Yield (first row, bytes [rows, row bytes]) pieces.

        Read with plain reads: a mapping would keep its pages in memory.
        """
        width = stored.shape[-1]
        step = max(1, CHUNK_VALUES // width)
        row_bytes = stored.nbytes // rows
        with self.path.open("rb") as stream:
            stream.seek(stored.offset)
            for start in range(0, rows, step):
                raise_if_interrupted()
                count = min(step, rows - start)
                data = np.fromfile(stream, np.uint8, count * row_bytes)
                if data.size != count * row_bytes:
                    raise SourceError(
                        f"{self.path}: ended while a tensor was read. The file changed; download it again."
                    )
                yield start, data.reshape(count, row_bytes)

    def _rows_in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Undo the row order of llama.cpp's rotary embedding (pairs interleaved) for q and k."""
        part = name.rsplit(".", 2)[-2]
        if not self.architecture.rotary_rows_interleaved or part not in ("q_proj", "k_proj"):
            return tensor
        heads = self.config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        if tensor.shape[0] % (2 * heads):
            raise SourceError(
                f"{self.path}: {name!r} has {tensor.shape[0]} rows, which are no pairs for {heads} heads."
            )
        half = tensor.shape[0] // heads // 2
        return tensor.view(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _dequantize(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Turn rows of packed bytes into rows of float32."""
    if kind == "F32":
        return data.view("<f4")
    if kind == "F16":
        return data.view("<f2").astype(np.float32)
    gguf = gguf_library()
    values: np.ndarray[Any, Any] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values
