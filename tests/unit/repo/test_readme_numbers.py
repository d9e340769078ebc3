"""Every figure that the pages show stands in eval/results/, which commands made.

The pages are the README, docs/features.md and the tables of docs/quality.md.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[3]
SCALES = (1, 100, Decimal("1e-6"), Decimal("1e-9"))  # as it is, in per cent, bytes in MB, bytes in GB


def results_table() -> Any:
    return script(ROOT / "eval" / "results_table.py")


def figures(value: Any) -> list[Decimal]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        return [n for item in value.values() for n in figures(item)]
    if isinstance(value, list):
        return [n for item in value for n in figures(item)]
    return [Decimal(repr(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


def measured() -> list[Decimal]:
    return [
        n for path in sorted((ROOT / "eval" / "results").glob("*.json")) for n in figures(json.loads(path.read_text()))
    ]


def is_rounding_of(shown: str, numbers: list[Decimal]) -> bool:
    """Whether a printed number is one of these (or its scaled value), rounded to the printed places."""
    places = len(shown.partition(".")[2])
    half, value = Decimal(1).scaleb(-places) / 2, Decimal(shown)
    return any(abs(number * scale - value) <= half for number in numbers for scale in SCALES)


def page(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def durations() -> list[Decimal]:
    """What the tables call minutes, from the seconds of every row."""
    results = [json.loads(path.read_text()) for path in sorted((ROOT / "eval" / "results").glob("*.json"))]
    made = [result.get("quantization") for result in results if isinstance(result, dict)]
    return [Decimal(repr(one["seconds"])) / 60 for one in made if isinstance(one, dict) and "seconds" in one]


@pytest.mark.parametrize("path", ["README.md", "docs/kv.md", "docs/quality.md", "calibration/studies/README.md"])
def test_the_tables_of_a_page_are_what_the_results_say(path):
    module, text = results_table(), page(path)
    for name, table in module.PAGES[path]().items():
        assert module.block_of(text, name) == table, f"{name}: run `python eval/results_table.py`"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("README.md", "presets"),
        ("README.md", "short"),
        ("docs/quality.md", "results"),
        ("docs/quality.md", "peers"),
        ("docs/quality.md", "times"),
    ],
)
def test_every_number_of_a_table_rounds_a_figure_in_the_results(path, name):
    rows = [line for line in results_table().block_of(page(path), name).splitlines() if line.startswith("|")][2:]
    assert rows, f"the table of {name} is empty"
    numbers = [*measured(), *(durations() if name == "presets" else [])]
    for line in rows:
        cells = line.strip("|").split("|")
        for shown in re.findall(r"\d+(?:\.\d+)?", " ".join(cells[2:])):  # after the names of model and method
            assert is_rounding_of(shown, [*numbers, Decimal(16)]), f"{shown} in {line!r} is not in eval/results/"


@pytest.mark.parametrize("path", ["README.md", "docs/features.md"])
def test_figures_outside_the_tables_are_in_the_results_too(path):
    """Numbers with three or more places are measurements wherever they stand (perplexity 28.012, KL 0.250)."""
    numbers = measured()
    lost = [
        shown
        for shown in re.findall(r"(?<![\d.])\d+\.\d{3,}(?![\d.])", page(path))
        if not is_rounding_of(shown, numbers)
    ]
    assert not lost, f"not in eval/results/: {lost}"


CLAIMS = [  # words of docs/features.md around a figure, the row it is of, and which figure of it
    (r"`--preset best` ([\d.]+) \(", "smollm2-135m-best-w4-g64-asym", "kl_mean"),
    (r"`balanced` ([\d.]+), `fast`", "smollm2-135m-balanced-w4-g64-asym", "kl_mean"),
    (r"reads no text, ([\d.]+) \(", "smollm2-135m-fast-w4-g64-asym", "kl_mean"),
    (r"at 3.16 bits `best`\s+([\d.]+)\.", "smollm2-135m-best-w3-g128-asym", "kl_mean"),
    (r"AutoRound's light recipe ([\d.]+),", "smollm2-135m-quick-autoround-light-w4-g64-asym", "kl_mean"),
    (r"AWQ by llm-compressor ([\d.]+),", "smollm2-135m-quick-llmcompressor-awq-w4-g64-asym-float32", "kl_mean"),
    (r"GPTQ by llm-compressor and gptqmodel ([\d.]+) and", "smollm2-135m-quick-llmcompressor-gptq-w4-g64-sym",
     "kl_mean"),
    (r"gptqmodel [\d.]+ and ([\d.]+) \(", "smollm2-135m-quick-gptqmodel-gptq-w4-g64-sym-float32", "kl_mean"),
    (r"HQQ ([\d.]+) at", "smollm2-135m-hqq-w4-g64", "kl_mean"),
    (r"\((\d+) s on 2 idle cores", "smollm2-135m-times-fast", "seconds"),
    (r"`balanced` (\d+) s with symmetric groups", "smollm2-135m-times-balanced", "seconds"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "row", "figure"), CLAIMS, ids=[f"{row} {figure}" for _, row, figure in CLAIMS])
def test_what_the_features_page_claims_is_of_the_row_it_names(words, row, figure):
    result = json.loads((ROOT / "eval" / "results" / f"{row}.json").read_text(encoding="utf-8"))
    value = result["evaluation" if figure == "kl_mean" else "quantization"][figure]
    shown = re.findall(words, page("docs/features.md"))
    assert len(shown) == 1, f"{words!r} is on the page {len(shown)} times"
    assert is_rounding_of(shown[0], [Decimal(repr(value))]), f"{shown[0]} for {value} of {row}"


def test_a_number_that_was_not_measured_is_found():
    assert is_rounding_of("27.75", [Decimal("27.7513")])
    assert is_rounding_of("96.2", [Decimal("0.96213")])
    assert not is_rounding_of("27.76", [Decimal("27.7513")])


def test_the_readme_stays_short():
    assert len(page("README.md").split()) <= 900
