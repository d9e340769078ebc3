"""Choice of the source's own files (license, readme, other JSON) that are copied into the output folder."""

from __future__ import annotations

import fnmatch
import hashlib
from pathlib import Path

from quantkit.checkpoint.names import TOKENIZER_FILES
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.storage.links import TEMPLATES

CARRIED = ("LICEN[CS]E*", "NOTICE*", "COPYING*", "USE_POLICY*", "*.md", "*.txt", "*.json")


# files that describe the source alone: written anew, or left behind
OF_THE_SOURCE = (
    "config.json", "generation_config.json", "*.index.json", "adapter_config.json", "trainer_state.json",
    "training_args.json",
    "*_results.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantkit.json",
)  # fmt: skip


LARGEST = 1 << 24  # bytes; a larger file is data of another kind


def carried(source: Source) -> tuple[list[Path], list[str]]:
    """Return the source's own files to copy, and the names of those that are left behind.

    Weights, the tokenizer's files, and files that are written anew are in neither list.
    """
    if not source.path.is_dir():
        return [], []
    copied, left = [], []
    for path in sorted(source.path.iterdir()):
        name = path.name
        if name.startswith(".") or path.suffix in (".safetensors", ".gguf") or _is_tokenizer(name):
            continue
        if path.is_file() and _matches(name, CARRIED) and not _matches(name, OF_THE_SOURCE) and _small(path):
            copied.append(path)
        elif not _matches(name, ("config.json", "generation_config.json", "*.index.json")):
            left.append(name)
    return copied, left


def _is_tokenizer(name: str) -> bool:
    return name in TOKENIZER_FILES or name.endswith(".tiktoken") or name == TEMPLATES


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _small(path: Path) -> bool:
    return path.stat().st_size <= LARGEST


def beside_sha256(source: Source) -> str:
    """Return a SHA-256 of the names and bytes of the files that ``write_beside`` takes from the source.

    It covers every file of the source's folder up to LARGEST bytes but its weights.
    """
    digest = hashlib.sha256()
    for path in sorted(source.path.iterdir()) if source.path.is_dir() else []:
        if path.is_file() and _small(path) and path.suffix not in (".safetensors", ".gguf"):
            digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
