"""Records with a field ``text``: lines of a JSONL file, rows of a data set. Joined to one text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quantkit.checkpoint.text_files.plain import BOM, MOST_BYTES, Beginning, beginning, decoded, unpacked
from quantkit.errors import SourceError

SEPARATOR = "\n\n"
MOST_FILE = 64_000_000  # bytes of a JSONL file: beside the text there are other fields
MOST_LINE = 16_000_000  # bytes of a line: what it says may take 25 times as much in memory
MOST_LINES = 500_000  # more than this many lines of a dozen letters are a text of full size
SHOWN = 12  # fields that an error lists


def read_jsonl(path: Path) -> Beginning:
    """Join the ``text`` fields of a JSONL file, unpacked if its name ends in .gz, up to MOST_BYTES.

    path: the file, one JSON object a line; empty lines are passed over. Of a very long one no more than MOST_LINES or
    MOST_FILE is read.

    Raises SourceError for what is no regular file, or has a line without such a field, or one that is too long.
    """
    texts: list[str] = []
    size, read, number = 0, 0, 0
    with unpacked(path) as stream:
        while size <= MOST_BYTES and (line := stream.readline(MOST_LINE + 1)):
            number += 1
            read += len(line)
            where = f"{path}: line {number}"
            if len(line) > MOST_LINE:
                raise SourceError(
                    f"{where} goes beyond {MOST_LINE:,} bytes, more than calibration or evaluation can use."
                    " Give a part of the file."
                )
            if read > MOST_FILE or number > MOST_LINES:
                return Beginning(joined(texts, path).text, whole=False)
            written = decoded(line.removeprefix(BOM) if number == 1 else line, f"{where}:")
            if not written.strip():
                continue
            texts.append(text_field(_record(written, where), where))
            size += text_bytes(texts[-1], where) + len(SEPARATOR)
    return joined(texts, path)


def joined(texts: list[str], where: object) -> Beginning:
    """Join the texts of records, up to MOST_BYTES.

    texts: without halves of surrogate pairs. where: file or data set, as an error begins.
    """
    return beginning(SEPARATOR.join(texts).encode(), f"{where}:")


def _record(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise SourceError(f"{where} is nested too deeply. A JSONL file has one flat object a line.") from None
    except ValueError as error:  # also an integer of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number that is too long"
        raise SourceError(f"{where} is not JSON ({reason}). A JSONL file has one object a line.") from error


def text_field(record: Any, where: str) -> str:
    """Return the field ``text`` of a record.

    record: what was read. where: file and line, as an error begins.

    Raises SourceError if there is no such field, or it is no string.
    """
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        keys = f"its fields are {names(list(record))}" if isinstance(record, dict) else "it is no object"
        raise SourceError(
            f"{where} has no field 'text' holding a string ({keys}). Rename the field that holds the text."
        )
    value: str = record["text"]
    return value


def text_bytes(text: str, where: str) -> int:
    """Count the bytes of a text in UTF-8.

    text: one record's. where: file and line, as an error begins.

    Raises SourceError for half of a surrogate pair, which no UTF-8 text can hold.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise SourceError(
            f"{where}: character {error.start} of field 'text' is half of a surrogate pair"
            f" (\\u{ord(text[error.start]):04x}), no text. Take the record out, or write the character whole."
        ) from error


def names(fields: Iterable[Any]) -> str:
    """List names of fields in an error, the first few, shortened.

    fields: the names.
    """
    shown = [str(field)[:40] for field in fields]
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
