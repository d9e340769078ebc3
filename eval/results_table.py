"""Make the README's results table from eval/results/*.json.

python eval/results_table.py            rewrite the table between the two markers in README.md
python eval/results_table.py --check    exit code 1 if the README's table is not what the results say
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- results: made by eval/results_table.py -->", "<!-- end of results -->"
HEAD = ["model", "weights", "bits / weight", "size", "perplexity", "KL (nats)", "same top token"]


def load_results(root: Path = ROOT) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(row of the suite, its result) in the suite's order, for rows that have a result."""
    suite = tomllib.loads((root / "eval" / "suites" / "main.toml").read_text(encoding="utf-8"))
    found = []
    for row in suite["row"]:
        path = root / "eval" / "results" / f"{row['id']}.json"
        if path.exists():
            found.append((row, json.loads(path.read_text(encoding="utf-8"))))
    return found


def cells(row: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """One line of the table. Every number is a rounded figure of the result."""
    bits = figures["bits_per_weight"]
    kl = f"{figures['kl_mean']:.4f} ± {figures['kl_stderr']:.4f}" if figures["kl_mean"] is not None else ""
    return [
        row["model"],
        row["label"],
        "16" if bits is None else f"{bits:.3f}",
        f"{figures['checkpoint_bytes'] / 1e6:.1f} MB",
        f"{figures['perplexity']:.2f}",
        kl,
        f"{100 * figures['top1_agreement']:.1f} %" if figures["top1_agreement"] is not None else "",
    ]


def render(results: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """The table in Markdown, and one line on where it was measured. Models together, the original first, then by KL."""
    lines = [" | ".join(HEAD), " | ".join(["---", "---", *["--:"] * 5])]
    order = {row["model"]: i for i, (row, _) in reversed(list(enumerate(results)))}
    for row, result in sorted(
        results, key=lambda pair: (order[pair[0]["model"]], pair[1]["evaluation"]["kl_mean"] or 0)
    ):
        lines.append(" | ".join(cells(row, result["evaluation"])))
    table = "\n".join(f"| {line} |" for line in lines)
    machines = sorted(
        {
            f"{r['evaluation']['hardware']['processor']}, torch {r['evaluation']['versions']['torch']}"
            for _, r in results
        }
    )
    return f"{table}\n\nMeasured on {'; '.join(machines)}.\n"


def block_of(readme: str) -> str:
    """What stands between the markers. Raises ValueError if they are not there."""
    if START not in readme or END not in readme:
        raise ValueError(f"README.md lacks the markers {START!r} and {END!r}")
    return readme.split(START, 1)[1].split(END, 1)[0].strip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme, table = path.read_text(encoding="utf-8"), render(load_results())
    current = block_of(readme)
    if args.check:
        raise SystemExit(0 if current == table else "README.md: run `python eval/results_table.py`")
    before, after = readme.split(START, 1)[0], readme.split(END, 1)[1]
    path.write_text(f"{before}{START}\n{table}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
