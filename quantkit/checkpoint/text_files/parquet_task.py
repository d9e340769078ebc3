"""Reads the column ``text`` of a parquet file, in a child process that imports pyarrow only (``limited_worker.py``)."""

from __future__ import annotations

from typing import Any

import pyarrow
from pyarrow import parquet, types

SEPARATOR = "\n\n"  # as in records.py
ROWS = 1024


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``text``; or ``columns``, ``doubled`` or ``error`` where there is none; or nothing if it is too long.

    request: ``path`` of the file, ``most`` bytes of text.
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
            texts.append(value)
            size += len(value) + len(SEPARATOR)
            if size > most:
                return {}
    text = SEPARATOR.join(texts)
    return {"text": text} if len(text.encode()) <= most else {}


def _holds_text(kind: Any) -> bool:
    value = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(value) or types.is_large_string(value) or types.is_string_view(value))
