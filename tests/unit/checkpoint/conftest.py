"""Tiny GGUF files, written by the gguf library the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quantkit.checkpoint.gguf_files.vocabulary import NORMAL

Tensors = dict[str, tuple[np.ndarray, str]]  # GGUF name -> (values or packed bytes, ggml type)
WRITERS = {
    bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array",
}  # fmt: skip


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(arch, metadata, tensors) -> path of the file."""

    def write(arch: str, metadata: dict[str, Any], tensors: Tensors, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            getattr(writer, WRITERS[type(value)])(key, value)
        for tensor, (values, kind) in tensors.items():
            code = gguf.GGMLQuantizationType[kind]
            plain = {"F32": np.float32, "F16": np.float16}.get(kind)
            if plain:
                writer.add_tensor(tensor, values.astype(plain))
            else:
                packed = values if values.dtype == np.uint8 else gguf.quants.quantize(values.astype(np.float32), code)
                writer.add_tensor(tensor, packed, raw_dtype=code)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def llama_metadata() -> dict[str, Any]:
    """Metadata of a Llama with hidden 64, 2 layers, 4 heads of 16, 2 KV heads, MLP 96."""
    return {
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        "tokenizer.ggml.token_type": [NORMAL] * 3,
    }
