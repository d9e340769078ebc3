"""What lies beside the weights of a checkpoint: config, generation config, tokenizer, the source's own files, KV scales, manifest.

Of the source's own files, licences, notices, model cards and plain data (``*.md``, ``*.txt``, ``*.json``) come along. Code and
pickles do not: nothing that could run is passed on. Nor does what describes the source's weights or its training, which other
tools would take for a description of the new ones. What stays behind is named in the plan.
"""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import FILES as TOKENIZER_FILES
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.checkpoint.writer import disk, write_json
from quantkit.core.kvscheme import KVPlan
from quantkit.formats import side_files
from quantkit.formats.kv_scales import write_kv_plan

CARRIED = ("LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*", "*.md", "*.txt", "*.json")
OF_THE_SOURCE = (
    "config.json", "generation_config.json", "*.index.json", "adapter_config.json", "trainer_state.json", "training_args.json",
    "*_results.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantkit.json",
)  # fmt: skip
LARGEST = 1 << 24  # bytes; a larger file is data of another kind
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_beside(
    source: Source,
    folder: Path,
    *,
    quantization: Mapping[str, Any],
    manifest: Mapping[str, Any],
    kv: KVPlan | None = None,
) -> None:
    """Write everything but the weights into ``folder``.

    quantization: the ``quantization_config`` that engines read; manifest: what made these bytes (quantkit.json).
    Raises QuantkitError when the disk is full.
    """
    config = {key: value for key, value in source.config.items() if key != "_name_or_path"}
    config["quantization_config"] = quantization
    with disk(folder):
        write_json(folder / "config.json", config)
        _write_generation_config(source, folder)
        for path in carried(source)[0]:
            shutil.copyfile(path, folder / path.name)
        write_tokenizer(source, folder)
        if kv is not None:
            write_kv_plan(folder, kv)
        for name, content in side_files(quantization).items():
            write_json(folder / name, content)
        write_json(folder / "quantkit.json", manifest)


def _write_generation_config(source: Source, folder: Path) -> None:
    original = source.path / "generation_config.json"
    if original.is_file():
        shutil.copyfile(original, folder / original.name)
        return
    special = {key: source.config[key] for key in SPECIAL if source.config.get(key) is not None}
    write_json(folder / original.name, special)


def carried(source: Source) -> tuple[list[Path], list[str]]:
    """The source's own files that come along, and the names of those that do not (weights and what we write apart)."""
    if not source.path.is_dir():
        return [], []
    along, behind = [], []
    for path in sorted(source.path.iterdir()):
        name = path.name
        if name.startswith(".") or path.suffix in (".safetensors", ".gguf") or _is_tokenizer(name):
            continue
        if path.is_file() and _matches(name, CARRIED) and not _matches(name, OF_THE_SOURCE) and _small(path):
            along.append(path)
        elif not _matches(name, ("config.json", "generation_config.json", "*.index.json")):
            behind.append(name)
    return along, behind


def beside_sha256(source: Source) -> str:
    """Identifies the files that ``write_beside`` takes from the source."""
    digest = hashlib.sha256()
    for path in sorted(source.path.iterdir()) if source.path.is_dir() else []:
        if path.is_file() and _small(path) and path.suffix not in (".safetensors", ".gguf"):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _is_tokenizer(name: str) -> bool:
    return name in TOKENIZER_FILES or name.endswith(".tiktoken") or name == "additional_chat_templates"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _small(path: Path) -> bool:
    return path.stat().st_size <= LARGEST
