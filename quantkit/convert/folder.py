"""What lies beside the weights of a checkpoint: config, generation config, tokenizer, KV scales, manifest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.checkpoint.writer import disk, write_json
from quantkit.core.kvscheme import KVScales
from quantkit.formats import side_files
from quantkit.formats.kv_scales import write_kv_scales

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_beside(
    source: Source,
    folder: Path,
    *,
    quantization: Mapping[str, Any],
    manifest: Mapping[str, Any],
    kv: KVScales | None = None,
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
        write_tokenizer(source, folder)
        if kv is not None:
            write_kv_scales(folder, kv)
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
