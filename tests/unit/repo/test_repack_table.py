"""The table of what can be repacked into what says what the code does."""

from __future__ import annotations

from pathlib import Path

from quantkit.convert.repack.table import BEGIN, END, cell, rows, table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "formats" / "README.md"


def test_the_page_shows_what_is_generated() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = text[text.index(BEGIN) : text.index(END) + len(END)]
    assert shown == table(), "run: python -m quantkit.convert.repack.table, and put it into docs/formats/README.md"


def test_every_readable_weight_has_at_least_one_exact_place() -> None:
    """But for what has no codes with scales, and for what only another arithmetic says."""
    for row in rows():
        if row.weight is not None and "ModelOpt, its factor" not in row.words:
            assert cell(row, "native") == "exact", row.words
