"""Write the files beside the weights of a checkpoint.

They are config, generation config, tokenizer, the source's own files, KV scales and manifest. Of the source's own
files, licences, notices, model cards and plain data (``*.md``, ``*.txt``, ``*.json``) are copied. Code and pickles are
not: nothing that could run is passed on. Nor are files that describe the source's weights or its training, which other
tools would take for a description of the new ones. The plan names the files that are left behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit.checkpoint.foreign_files.code_references import may_name_code, passed_on
from quantkit.checkpoint.foreign_files.fields import read_json
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import write_tokenizer
from quantkit.checkpoint.writer import disk, write_json
from quantkit.convert.plan.carried import LARGEST, carried
from quantkit.core.kvscheme import KVPlan
from quantkit.errors import SourceError
from quantkit.formats import side_files
from quantkit.formats.kv_scales import write_kv_plan

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_beside(
    source: Source,
    folder: Path,
    *,
    quantization: Mapping[str, Any] | None,
    manifest: Mapping[str, Any],
    kv: KVPlan | None = None,
    tokenizer: bool = False,
) -> None:
    """Write everything but the weights into ``folder``.

    source: the checkpoint that was converted.
    folder: the output, not yet under its name.
    quantization: the ``quantization_config`` that engines read; None beside a GGUF file, which has the tokenizer, too.
    manifest: options, hashes and decisions that made these bytes (quantkit.json).
    kv: the KV-cache plan, None without one.
    tokenizer: is written, although there is no ``quantization``: of a dense checkpoint.

    Raises QuantkitError when the disk is full.
    """
    # without a version older transformers take the tokenizer of a folder made from a GGUF file for a faulty one
    config = {"transformers_version": version("transformers"), **passed_on(source.config)}
    config.pop("quantization_config", None)  # the source's own
    if quantization is not None:
        config = {**config, "quantization_config": quantization}
    with disk(folder):
        write_json(folder / "config.json", config)
        _write_generation_config(source, folder)
        for path in carried(source)[0]:
            _copy(path, folder / path.name)
        if quantization is not None or tokenizer:
            write_tokenizer(source, folder)
        if quantization is not None:
            for name, content in side_files(quantization).items():
                write_json(folder / name, content)
        if kv is not None:
            write_kv_plan(folder, kv)
        write_json(folder / "quantkit.json", manifest)


def _write_generation_config(source: Source, folder: Path) -> None:
    original = source.path / "generation_config.json"
    if original.is_file():
        _copy(original, folder / original.name)
        return
    special = {key: source.config[key] for key in SPECIAL if source.config.get(key) is not None}
    write_json(folder / original.name, special)


def _copy(path: Path, to: Path) -> None:
    """Copy a file of the source byte by byte, but a JSON object that names code without those names.

    JSON that is no object, or that no strict parser reads, is somebody's data and stays as it is. Raises SourceError if
    such a file may name code.
    """
    if path.suffix == ".json":
        try:
            content = read_json(path, LARGEST)
        except SourceError:
            if may_name_code(path.read_bytes()):
                raise
            content = {}
        if passed_on(content) != content:
            write_json(to, passed_on(content))
            return
    shutil.copyfile(path, to)
