"""GGUF files that somebody made to do harm are refused by file and field, in 10 s and under 1 GB."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hostile.limits import Limited

from quantkit.checkpoint.gguf_files.header import read_header
from quantkit.errors import SourceError

OPEN, TOKENIZER = "hostile.entries:opened_and_built", "quantkit.checkpoint.tokenizer:load_tokenizer"
WIDTH, LAYERS, HEADS, MLP = 64, 2, 4, 96
TOKENS = [*(chr(97 + n) for n in range(24)), "ab", "<s>"]
INF, NAN = float("inf"), float("nan")
METADATA: dict[str, Any] = {
    "llama.context_length": 128, "llama.embedding_length": WIDTH, "llama.block_count": LAYERS,
    "llama.feed_forward_length": MLP, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": HEADS,
    "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": 16, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1] * len(TOKENS), "tokenizer.ggml.eos_token_id": 25,
}  # fmt: skip
WRITERS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}


def tensors() -> dict[str, tuple[int, ...]]:
    block = {
        "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH),
        "ffn_down": (WIDTH, MLP), **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH)),
    }  # fmt: skip
    named = {f"blk.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in block.items()}
    return {"token_embd.weight": (len(TOKENS), WIDTH), "output_norm.weight": (WIDTH,), **named}


def write(path: Path, **changes: Any) -> Path:
    """Write a whole small Llama; keys of the metadata with ``__`` for dots."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        if value is not None:
            getattr(writer, WRITERS[type(value)])(key, value)
    generator = np.random.default_rng(0)
    for name, shape in tensors().items():
        writer.add_tensor(name, generator.normal(0, 0.1, shape).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FIELDS: list[tuple[str, Any]] = [
    ("llama.block_count", 10**9), ("llama.block_count", 500), ("llama.block_count", 0), ("llama.block_count", "two"),
    ("llama.block_count", [1, 2]), ("llama.block_count", 2.0), ("llama.embedding_length", 2**31),
    ("llama.embedding_length", "x"), ("llama.attention.layer_norm_rms_epsilon", INF),
    ("llama.attention.layer_norm_rms_epsilon", NAN), ("llama.attention.layer_norm_rms_epsilon", "small"),
    ("llama.attention.layer_norm_rms_epsilon", -1.0), ("llama.rope.freq_base", "x"), ("llama.rope.freq_base", INF),
    ("llama.rope.freq_base", [1.0]), ("llama.rope.freq_base", 0.0), ("llama.attention.head_count", 0),
    ("llama.attention.head_count", "x"), ("llama.context_length", 0), ("llama.context_length", True),
    ("split.count", "x"), ("split.count", [2]), ("split.count", 2.5), ("general.alignment", 0),
    ("general.alignment", "x"),
    ("general.alignment", 33), ("general.alignment", 0.5), ("general.alignment", [32]), ("llama.rope.scaling.type", 7),
    ("llama.feed_forward_length", "x"), ("tokenizer.ggml.eos_token_id", "x"), ("tokenizer.ggml.tokens", "abc"),
    ("tokenizer.ggml.tokens", [1, 2]), ("tokenizer.ggml.merges", 3), ("llama.rope.dimension_count", 0),
]  # fmt: skip


def test_the_file_itself_is_read(tmp_path: Path, limited: Limited) -> None:
    path = str(write(tmp_path / "model.gguf"))
    assert limited(OPEN, path).kind == "passed"


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_a_field_of_another_type_or_range(field: str, value: Any, tmp_path: Path, limited: Limited) -> None:
    changes = {field.replace(".", "__"): value}
    if field == "general.alignment":  # the library would align by it
        path = write(tmp_path / "model.gguf", general__aliXnment=value)
        path.write_bytes(path.read_bytes().replace(b"general.aliXnment", b"general.alignment"))
    else:
        path = write(tmp_path / "model.gguf", **changes)
    limited(OPEN, str(path)).refused(str(path), field if value != 500 else "num_hidden_layers")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tokenizer__ggml__merges": ["a zz"]}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["ab"]}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["a c"]}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer__ggml__model": 4}, "tokenizer.ggml.model"),
        ({"tokenizer__ggml__add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token"),
    ],
)
def test_a_vocabulary_that_contradicts_itself(
    changes: dict[str, Any], word: str, tmp_path: Path, limited: Limited
) -> None:
    path = str(write(tmp_path / "model.gguf", **changes))
    limited(TOKENIZER, path).refused(path, word)


def offset_at(path: Path, name: str) -> int:
    """Where the offset of a tensor is stored: after its name, dimensions, extents and type."""
    raw = path.read_bytes()
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dims = int.from_bytes(raw[at : at + 4], "little")
    return at + 4 + 8 * dims + 4


@pytest.mark.parametrize("change", [64, -64, 1, 32, 2**40, -1])
def test_tensors_that_overlap_or_lie_apart(change: int, tmp_path: Path, limited: Limited) -> None:
    name = "blk.0.ffn_up.weight"
    path = write(tmp_path / "model.gguf")
    at = offset_at(path, name)
    raw = bytearray(path.read_bytes())
    offset = int.from_bytes(raw[at : at + 8], "little")
    raw[at : at + 8] = struct.pack("<Q", (offset + change) % 2**64)
    path.write_bytes(raw)
    limited(OPEN, str(path)).refused(str(path), "offset" if abs(change) <= 64 and change != -1 else "tensor")


def test_a_tensor_without_rows(tmp_path: Path, limited: Limited) -> None:
    name = "output_norm.weight"
    path = write(tmp_path / "model.gguf")
    at = offset_at(path, name) - 12
    raw = bytearray(path.read_bytes())
    raw[at : at + 8] = bytes(8)
    path.write_bytes(raw)
    limited(OPEN, str(path)).refused(str(path), name)


def header(pairs: int, tensors: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + body


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"GGUF", header(2**63, 0, b""), header(0, 2**63, b""), header(0, 10**6, b""),
        header(1, 0, struct.pack("<Q", 2**63)),
        header(1, 0, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**62)),
        header(1, 0, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**23) + bytes(2**23)),
        header(1, 0, struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000),
        header(1, 0, struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99)),
        header(1, 0, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 0) + b"\0"),
        header(2, 0, (struct.pack("<Q", 1) + b"k" + struct.pack("<I", 0) + b"\0") * 2),
    ],
    ids=range(12),
)  # fmt: skip
def test_a_header_without_end(raw: bytes, tmp_path: Path, limited: Limited) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    limited(OPEN, str(path)).refused(str(path))


def test_offsets_count_from_the_files_start(tmp_path: Path) -> None:
    """The table as this reader has it, against the library's own."""
    path = write(tmp_path / "model.gguf")
    ours = {name: (tensor.offset, tensor.nbytes) for name, tensor in read_header(path).tensors.items()}
    assert ours == {t.name: (int(t.data_offset), int(t.n_bytes)) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("padding", range(0, 32, 3))
@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16, 64, 128])
def test_an_alignment_that_is_not_the_writers(alignment: int, padding: int, tmp_path: Path) -> None:
    """The data would begin elsewhere, and every number be another; whatever length the header has."""
    path = write(tmp_path / "model.gguf", general__alignment=32, general__description="x" * padding)
    header = read_header(path)
    raw = path.read_bytes()
    said = b"general.alignment" + struct.pack("<II", 4, 32)
    assert raw.count(said) == 1
    path.write_bytes(raw.replace(said, b"general.alignment" + struct.pack("<II", 4, alignment)))
    found = None
    with contextlib.suppress(SourceError):
        found = read_header(path).tensors
    assert found in (None, header.tensors)  # the header may happen to end where both alignments begin


@pytest.mark.parametrize("extra", [1, 31, 1000])
def test_bytes_behind_the_last_tensor(extra: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    with path.open("ab") as stream:
        stream.write(b"\1" * extra)
    with pytest.raises(SourceError, match="follow the last tensor"):
        read_header(path)
