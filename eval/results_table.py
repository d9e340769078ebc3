"""Make the README's tables from eval/results/*.json.

python eval/results_table.py            rewrite the tables between their markers in README.md
python eval/results_table.py --check    exit code 1 if a table of the README is not what the results say
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
Results = list[tuple[dict[str, Any], dict[str, Any]]]
HEAD = ["model", "weights", "bits / weight", "size", "perplexity", "KL (nats)", "same top token"]
PEER_HEAD = ["model", "made by", "bits / weight", "perplexity", "KL (nats)", "seconds", "peak memory"]


def load_results(suite_name: str = "main", root: Path = ROOT) -> Results:
    """(row of the suite, its result) in the suite's order, for rows that have a result."""
    suite = tomllib.loads((root / "eval" / "suites" / f"{suite_name}.toml").read_text(encoding="utf-8"))
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


def render(results: Results) -> str:
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


def peer_cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """One line of the peers' table."""
    made, figures = result["quantization"], result["evaluation"]
    bits = figures["bits_per_weight"]
    return [
        row["model"],
        row["label"],
        "" if bits is None else f"{bits:.3f}",
        f"{figures['perplexity']:.2f}",
        f"{figures['kl_mean']:.4f} ± {figures['kl_stderr']:.4f}",
        f"{made['seconds']:.0f}",
        f"{made['peak_host_bytes'] / 1e9:.2f} GB",
    ]


def render_peers(results: Results) -> str:
    """The peers beside us: by model, then by KL."""
    lines = [" | ".join(PEER_HEAD), " | ".join(["---", "---", *["--:"] * 5])]
    order = {row["model"]: i for i, (row, _) in reversed(list(enumerate(results)))}
    for row, result in sorted(results, key=lambda pair: (order[pair[0]["model"]], pair[1]["evaluation"]["kl_mean"])):
        lines.append(" | ".join(peer_cells(row, result)))
    return "".join(f"| {line} |\n" for line in lines)


def tables() -> dict[str, str]:
    """Every table of the README by the name in its markers."""
    peers = [*load_results("peers-quick"), *load_results("peers")]
    return {"results": render(load_results()), "peers": render_peers(peers)}


def block_of(readme: str, name: str = "results") -> str:
    """What stands between a table's markers. Raises ValueError if they are not there."""
    _, table, _ = split(readme, name)
    return table.strip("\n") + "\n"


def split(readme: str, name: str) -> tuple[str, str, str]:
    """Text before a table, the table, and text after it, the markers with the text around."""
    start, end = f"<!-- {name}: made by eval/results_table.py -->\n", f"<!-- end of {name} -->"
    if start not in readme or end not in readme:
        raise ValueError(f"README.md lacks the markers {start!r} and {end!r}")
    before, rest = readme.split(start, 1)
    table, after = rest.split(end, 1)
    return before + start, table, end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    for name, table in tables().items():
        if args.check and block_of(readme, name) != table:
            raise SystemExit(f"README.md, {name}: run `python eval/results_table.py`")
        before, _, after = split(readme, name)
        readme = before + table + after
    if not args.check:
        path.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
