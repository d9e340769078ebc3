"""Reads the column ``text`` of a parquet file, in a child process that imports pyarrow only (``limited/worker.py``)."""

from __future__ import annotations

from typing import Any

import pyarrow
from pyarrow import parquet, types

SEPARATOR = "\n\n"  # as in records.py
ROWS = 1024


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``text``; or ``columns``, ``doubled`` or ``error`` where there is none.

    request: ``path`` of the file, ``most`` bytes of text; of a longer one some more than that are returned.
    """
    try:
        with parquet.ParquetFile(request["path"]) as file:
            fields = list(file.schema_arrow)
        columns = [field for field in fields if field.name == "text"]
        if len(columns) > 1:
            return {"doubled": len(columns)}
        if not columns or not _holds_text(columns[0].type):
            return {"columns": [f"{field.name} ({field.type})" for field in fields]}
        # As a dictionary a value that stands in a million rows is in memory once.
        with parquet.ParquetFile(request["path"], read_dictionary=["text"]) as file:
            return _join(file, request["most"])
    except pyarrow.ArrowMemoryError:
        return {"stopped": "memory"}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        return {"error": str(error)}


def _join(file: Any, most: int) -> dict[str, Any]:
    texts, size, row = [], 0, 0
    for batch in file.iter_batches(ROWS, columns=["text"], use_threads=False):
        for scalar in batch.column(0):
            row += 1
            try:
                value = scalar.as_py()
            except UnicodeDecodeError as error:
                return {"error": f"row {row} of column 'text' is not UTF-8 text: {error.reason}"}
            if value is None:
                continue
            texts.append(value[: most + 1])
            size += len(value) + len(SEPARATOR)
            if size > most:
                return {"text": _first(SEPARATOR.join(texts), most)}
    return {"text": _first(SEPARATOR.join(texts), most)}


def _first(text: str, most: int) -> str:
    """Return the text; of one with more than ``most`` bytes, a character more than these hold."""
    data = text.encode()
    return text if len(data) <= most else data[: most + 4].decode(errors="ignore")


def _holds_text(kind: Any) -> bool:
    value = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(value) or types.is_large_string(value) or types.is_string_view(value))
