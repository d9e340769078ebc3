"""What a damaged file that is still read may change: the numbers whose stored bytes were touched, and no others.

``hashes`` runs in the child, on what was read. ``wrong`` runs in the parent, which parses the undamaged and the damaged
file by itself and says of which tensors the numbers must be the same.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

SAFETENSORS = ".safetensors"
# Parts of a config that say what stored codes mean: another legal value there is another number.
MEANINGS = ("quantization_config", "kv_cache_scheme")
# A GGUF file's numbers of heads say in which order the rows of queries and keys lie.
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "model_type")


def hashes(source: Any) -> dict[str, str]:
    """Return of each quantized module and each other tensor the sha256 of shape and values; and the heads."""
    from quantkit.formats.reader import QuantizedReader

    reader = QuantizedReader(source)
    found = {name: _sha(reader.module(name).dequantize()) for name in reader.modules}
    found |= {name: _sha(source.read(name)) for name in reader.plain_names()}
    return found | {"heads": str([source.config.get(key) for key in HEADS])}


def _sha(tensor: Any) -> str:
    values = tensor.detach().float().contiguous().numpy()
    return hashlib.sha256(f"{tensor.dtype}{list(values.shape)}".encode() + values.tobytes()).hexdigest()


def wrong(original: Path, damaged: bytes, before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the tensors whose numbers changed, or are gone, though nothing that they are made of was touched.

    original: the undamaged file. damaged: its damaged content. before, after: ``hashes`` of both.
    """
    if original.suffix == ".json":
        if original.name == "quantize_config.json" or _meanings(damaged) != _meanings(original.read_bytes()):
            return []  # what codes mean was changed, and is legal
        untouched = set(before)
    elif original.name.endswith(SAFETENSORS):
        untouched = _untouched_safetensors(original, damaged, before)
    else:
        untouched = _untouched_gguf(original, damaged, before)
        if before["heads"] != after.get("heads"):  # seen by whoever looks at the config
            return []
    return sorted(name for name in untouched - {"heads"} if before[name] != after.get(name))


def _meanings(content: bytes) -> list[Any]:
    config = json.loads(content)
    return [config.get(key) for key in MEANINGS]


def _untouched_safetensors(original: Path, damaged: bytes, before: dict[str, str]) -> set[str]:
    """Modules and tensors of which every stored part has its dtype, shape and bytes in both files."""
    first, second = _parts(original.read_bytes()), _parts(damaged)
    names = set()
    for name in before:
        parts = [part for part in first if part == name or part.rpartition(".")[0] == name]
        if parts and all(first[part] == second.get(part) for part in parts):
            names.add(name)
    return names


def _parts(content: bytes) -> dict[str, tuple[Any, ...]]:
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    return {
        name: (part["dtype"], part["shape"], content[end + part["data_offsets"][0] : end + part["data_offsets"][1]])
        for name, part in header.items()
        if name != "__metadata__"
    }


@cache
def _places(path: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Where the data of a whole GGUF file begins, and where each tensor's lie, by the name of transformers."""
    from gguf import GGUFReader

    from quantkit.checkpoint.gguf_files.source import GGUFSource

    source, reader = GGUFSource(path), GGUFReader(path)
    stored = {tensor.name: (int(tensor.data_offset), int(tensor.n_bytes)) for tensor in reader.tensors}
    named = {source._hf_name(name): place for name, place in stored.items()}
    return min(start for start, _ in stored.values()), named


def _untouched_gguf(original: Path, damaged: bytes, before: dict[str, str]) -> set[str]:
    """Tensors of whose bytes none differ; all of them where only the header does; none after an insertion or cut.

    A header that names a tensor, its shape or its packing otherwise must be refused: the model lacks what it named.
    """
    whole = original.read_bytes()
    begin, places = _places(original)
    if len(whole) != len(damaged):
        first = next((i for i, (a, b) in enumerate(zip(whole, damaged, strict=False)) if a != b), len(damaged))
        return {name for name, (start, size) in places.items() if begin <= first and start + size <= first}
    return {
        name
        for name, (start, size) in places.items()
        if name in before and whole[start : start + size] == damaged[start : start + size]
    }
