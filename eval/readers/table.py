"""Make docs/formats/readers.md's tables from results/readers.json.

python eval/readers/table.py            rewrite the tables between their markers
python eval/readers/table.py --check    exit code 1 if a table is not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import judge  # noqa: E402

ROOT = HERE.parent.parent
RESULTS, PAGE = ROOT / "eval" / "results" / "readers.json", ROOT / "docs" / "formats" / "readers.md"
MARK = "made by eval/readers/table.py"
FORMATS = {
    "": "original", "compressed-tensors": "compressed-tensors", "gptq": "gptq", "awq": "awq", "gguf": "gguf",
    "bitsandbytes": "bitsandbytes",
}  # fmt: skip
WORDS = {judge.WRONG: "**wrong numbers**", judge.REFUSED: "refused", judge.UNTESTABLE: "no kernel here"}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The page's tables by the name in their markers."""
    return {"readers": readers(results), "folders": folders(results, gguf=False), "gguf": folders(results, gguf=True)}


def readers(results: dict[str, Any]) -> str:
    """One line a reader: versions, the processor, how many folders it read right, refused, could not be tested with."""
    lines = [
        "| reader | versions | right | refused | no kernel here | false yes | false no | processor |",
        "|" + "---|" * 8,
    ]
    for name, facts in results["readers"].items():
        rows = [row for row in results["rows"] if row["reader"] == name]
        if not rows:
            continue
        counts = [sum(row["status"] == what for row in rows) for what in (judge.RIGHT, judge.REFUSED, judge.UNTESTABLE)]
        counts += [sum(row["verdict"] == what for row in rows) for what in (judge.FALSE_YES, judge.FALSE_NO)]
        versions = ", ".join(f"{one} {number}" for one, number in facts["versions"].items())
        lines.append("| " + " | ".join([name, versions, *map(str, counts), facts["processor"]]) + " |")
    return "\n".join(lines) + "\n"


def folders(results: dict[str, Any], *, gguf: bool) -> str:
    """One line a folder, one column a reader. gguf: those in that format, or all the others."""
    cases = {name: case for name, case in results["cases"].items() if (case["format"] == "gguf") == gguf}
    found = {(row["case"], row["reader"]): row for row in results["rows"]}
    columns = [name for name in results["readers"] if any((case, name) in found for case in cases)]
    lines = ["| " + " | ".join(["format", "model", "weights", "effect", *columns]) + " |"]
    lines.append("|" + "---|" * 3 + "--:|" + "---|" * len(columns))
    for name, case in cases.items():
        cells = [cell(found.get((name, column))) for column in columns]
        form = FORMATS[case["format"]] + (f", from {results['cases'][case['from']]['format']}" if case["from"] else "")
        lines.append("| " + " | ".join([form, case["model"], case["label"], f"{case['effect']:.3f}", *cells]) + " |")
    return "\n".join(lines) + "\n"


def cell(row: dict[str, Any] | None) -> str:
    """What one reader made of one folder."""
    if row is None:
        return ""
    what = f"{row['difference']:.4f}" if row["status"] == judge.RIGHT else WORDS[row["status"]]
    if row["status"] == judge.RIGHT and row["dtype"] != "float32":
        what += f" ({row['dtype']})"
    return what + (f" **{row['verdict']}**" if row["verdict"] else "")


def block_of(page: str, name: str) -> str:
    """What stands between a table's markers. Raises ValueError if they are not there."""
    return split(page, name)[1].strip("\n") + "\n"


def split(page: str, name: str) -> tuple[str, str, str]:
    """Text before a table, the table, and text after it, the markers with the text around."""
    start, end = f"<!-- {name}: {MARK} -->\n", f"<!-- end of {name} -->"
    if start not in page or end not in page:
        raise ValueError(f"{PAGE.name} lacks the markers {start!r} and {end!r}")
    before, rest = page.split(start, 1)
    table, after = rest.split(end, 1)
    return before + start, table, end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables(json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        if args.check and block_of(text, name) != table:
            raise SystemExit(f"{PAGE.name}, {name}: run `python eval/readers/table.py`")
        before, _, after = split(text, name)
        text = before + table + after
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
