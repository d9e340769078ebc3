"""Which tokens end an answer, as a model's files say it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.foreign_files.fields import read_json
from quantkit.checkpoint.source import Source
from quantkit.errors import SourceError

MOST_ID = 2**31 - 1  # of a token: ids are int32 in engines and in hashes


def end_tokens(source: Source) -> tuple[int, ...]:
    """Read ``eos_token_id`` (one or a list) of generation_config.json, else of config.json.

    source: the model. A GGUF file has no generation_config.json: what lies beside it belongs to another model.

    Raises SourceError naming the file if that is anything but token ids.
    """
    file = source.path / "generation_config.json"
    rows = _rows(source.config)
    stored = _ids(read_json(file).get("eos_token_id"), file, rows) if file.exists() else None
    if stored is None:
        named = source.path / "config.json" if source.path.is_dir() else source.path
        stored = _ids(source.config.get("eos_token_id"), named, rows)
    return stored or ()


def _rows(config: Mapping[str, Any]) -> int:
    """Return how many tokens an embedding may have: the largest vocabulary that a config names, of whichever part."""
    named = [value for key, value in config.items() if key.endswith("vocab_size") and type(value) is int]
    parts = [_rows(value) for value in config.values() if isinstance(value, dict)]
    return max((size for size in [*named, *parts] if size > 0), default=0)


def _ids(value: Any, file: Path, rows: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    for number in ids:
        # Some writers store a whole number as 2.0.
        whole = type(number) is int or (isinstance(number, float) and number.is_integer())
        if not whole or not 0 <= number < (rows or MOST_ID):
            raise SourceError(
                f"{file}: eos_token_id is {repr(value)[:100]}, expected a token id (a whole number, 0 or more,"
                f" below {rows or MOST_ID}), or a list of them. Download it again, or correct it."
            )
    return tuple(map(int, ids))
