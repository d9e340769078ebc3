"""Make the tables of README.md, docs/kv.md, docs/quality.md and the studies' page from the results beside their suites.

python eval/results_table.py            rewrite the tables between their markers
python eval/results_table.py --check    exit code 1 if a table is not what the results say
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
Results = list[tuple[dict[str, Any], dict[str, Any]]]
HEAD = ["model", "weights", "bits / weight", "size", "perplexity", "KL (nats)", "same top token"]
PEER_HEAD = ["model", "made by", "bits / weight", "perplexity", "KL (nats)", "peak memory"]


def load_results(suite_name: str = "main", root: Path = ROOT) -> Results:
    """(row of the suite, its result) in the suite's order, for rows that have a result."""
    return load_suite(root / "eval" / "suites" / f"{suite_name}.toml", root / "eval" / "results")


def load_suite(path: Path, results: Path) -> Results:
    """The same of a suite anywhere."""
    suite = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for row in suite["row"]:
        made = results / f"{row['id']}.json"
        if made.exists():
            found.append((row, json.loads(made.read_text(encoding="utf-8"))))
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
        f"{made['peak_host_bytes'] / 1e9:.2f} GB",
    ]


def render_peers(results: Results) -> str:
    """The peers beside us: by model, then by KL."""
    lines = [" | ".join(PEER_HEAD), " | ".join(["---", "---", *["--:"] * 4])]
    order = {row["model"]: i for i, (row, _) in reversed(list(enumerate(results)))}
    for row, result in sorted(results, key=lambda pair: (order[pair[0]["model"]], pair[1]["evaluation"]["kl_mean"])):
        lines.append(" | ".join(peer_cells(row, result)))
    return "".join(f"| {line} |\n" for line in lines)


KV_HEAD = ["model", "cache", "bits / number", "perplexity", "change", "KL (nats)", "same top token"]


def kv_order(results: Results) -> list[tuple[str, list[tuple[dict[str, Any], dict[str, Any]]]]]:
    """(model, its rows by KL without the original) of results that compare caches."""
    models = list(dict.fromkeys(row["model"] for row, _ in results))
    compared = [(row, result["evaluation"]) for row, result in results if result["evaluation"]["kl_mean"] is not None]
    return [
        (model, sorted([one for one in compared if one[0]["model"] == model], key=lambda one: one[1]["kl_mean"]))
        for model in models
    ]


def render_caches(results: Results) -> str:
    """Caches beside each other: what each costs against the 16-bit cache of the same weights. Change: of perplexity."""
    lines = []
    for _, rows in kv_order(results):
        for row, got in rows:
            change = math.expm1(got["delta_ln_ppl"])
            lines.append(
                [
                    row["model"], row["label"], f"{got['kv_bits_per_number']:.3f}", f"{got['perplexity']:.3f}",
                    f"{100 * change:+.2f} %", f"{got['kl_mean']:.5f}", f"{100 * got['top1_agreement']:.1f} %",
                ]
            )  # fmt: skip
    return markdown(KV_HEAD, lines)


def render_positions(results: Results) -> str:
    """KL by position in the window."""
    bands = list(dict.fromkeys(
        (band["start"], band["stop"]) for _, result in results for band in result["evaluation"]["by_position"]
    ))  # fmt: skip
    lines = [
        [row["model"], row["label"], *(f"{band['kl_mean']:.5f}" for band in got["by_position"])]
        for _, rows in kv_order(results)
        for row, got in rows
    ]
    return markdown(["model", "cache", *(f"{start} - {stop}" for start, stop in bands)], lines)


def render_planted(results: Results) -> str:
    """Planted facts: log-probability of the answer with each cache minus that with the 16-bit one."""
    lines = []
    for _, rows in kv_order(results):
        for row, got in rows:
            facts = got["planted_fact"]
            lines.append(
                [
                    row["model"], row["label"], f"{got['kv_bits_per_number']:.3f}", f"{got['kl_mean']:.5f}",
                    f"{facts['difference']:+.3f} ± {facts['difference_stderr']:.3f}",
                    f"{100 * facts['answered']:.0f} % ({100 * facts['answered_16_bit']:.0f} %)",
                ]
            )  # fmt: skip
    return markdown(["model", "cache", "bits / number", "KL (nats)", "ln p(answer)", "answered (at 16 bits)"], lines)


def render_greedy(results: Results) -> str:
    """Greedy text: how much of it is what a 16-bit cache leads to."""
    lines = []
    for _, rows in kv_order(results):
        for row, got in rows:
            g = got["greedy"]
            lines.append(
                [
                    row["model"], row["label"], f"{got['kv_bits_per_number']:.3f}", f"{got['kl_mean']:.5f}",
                    f"{100 * g['share']:.1f} ± {100 * g['share_stderr']:.1f} %", f"{100 * g['identical']:.0f} %",
                ]
            )  # fmt: skip
    return markdown(["model", "cache", "bits / number", "KL (nats)", "equal tokens", "identical texts"], lines)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table; the first two columns are words."""
    every = [head, ["---", "---", *["--:"] * (len(head) - 2)], *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in every)


def kv_tables() -> dict[str, str]:
    """Every table of docs/kv.md by the name in its markers."""
    memory = beside("kv_memory")
    at_4k = load_results("kv")
    return {
        "kv-4k": render_caches(at_4k),
        "kv-positions": render_positions(at_4k),
        "kv-8k": render_positions(load_results("kv-8k")),
        "kv-2k": render_caches(load_results("kv-2k")),
        "kv-greedy": render_greedy(load_results("kv-greedy")),
        "kv-planted": render_planted(load_results("kv-planted")),
        "kv-token": memory.token_table(),
        "kv-batch": memory.batch_table(),
    }


LADDER_HEAD = ["model", "made by", "bits / weight", "perplexity", "KL (nats)", "same top token"]


def render_ladder(results: Results) -> str:
    """Rows by model and KL, without the original.

    Each has the bits of the quantized weights and, where it was measured, the memory that quantizing took.
    """
    peak = {row["id"]: (result.get("quantization") or {}).get("peak_host_bytes") for row, result in results}
    lines = []
    for _, rows in kv_order(results):
        for row, got in rows:
            memory = peak[row["id"]]
            lines.append(
                [
                    row["model"], row["label"], f"{got['bits_per_weight']:.3f}", f"{got['perplexity']:.2f}",
                    f"{got['kl_mean']:.4f} ± {got['kl_stderr']:.4f}", f"{100 * got['top1_agreement']:.1f} %",
                    f"{memory / 1e9:.2f} GB" if memory else "",
                ]
            )  # fmt: skip
    return markdown([*LADDER_HEAD, "peak memory"], lines)


def render_mixes(results: Results) -> str:
    """Rows as in the ladder, with the bits of the whole model: mixes quantize the embedding, too."""
    lines = [
        [
            row["model"], row["label"], f"{got['model_bits_per_weight']:.3f}", f"{got['perplexity']:.2f}",
            f"{got['kl_mean']:.4f} ± {got['kl_stderr']:.4f}", f"{100 * got['top1_agreement']:.1f} %",
        ]
        for _, rows in kv_order(results)
        for row, got in rows
    ]  # fmt: skip
    return markdown(["model", "mix", "bits / weight of the model", *LADDER_HEAD[3:]], lines)


def render_times(results: Results) -> str:
    """Seconds from the start of the process to the files on disk, and peak memory; the fastest first."""
    lines = [
        [row["model"], row["label"], f"{made['seconds']:.0f}", f"{made['peak_host_bytes'] / 1e9:.2f} GB"]
        for row, result in sorted(results, key=lambda one: one[1]["quantization"]["seconds"])
        for made in (result["quantization"],)
    ]
    return markdown(["model", "made by", "seconds", "peak memory"], lines)


def quality_tables() -> dict[str, str]:
    """Every table of docs/quality.md, by its name.

    The main suite, the peers, the presets beside each other, seeds one by one, the same models on another text,
    llama.cpp's mixes, times.
    """
    ladder = load_results("weights")
    peers = [*load_results("peers-quick"), *load_results("peers")]
    return {
        "results": render(load_results()),
        "peers": render_peers(peers),
        "ladder": render_ladder([one for one in ladder if "of" not in one[0]]),
        "news": render_ladder([one for one in ladder if "of" in one[0]]),
        "mixes": render_mixes(load_results("llamacpp")),
        "times": render_times(load_results("times")),
    }


def study_tables() -> dict[str, str]:
    """What each calibration text gave."""
    here = ROOT / "calibration" / "studies"
    return {"studies": render_ladder(load_suite(here / "studies.toml", here / "results"))}


def beside(name: str) -> Any:
    """A script of this folder as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "eval" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


# The README's preset table: the preset, what it does, the row its time is of, the row its KL is of.
PRESETS = (
    (
        "`fast`",
        "reads no text: scales channels by what random tokens do, searches ranges (HQQ)",
        "smollm2-135m-times-fast",
        "smollm2-135m-fast-w4-g64-asym",
    ),
    (
        "`balanced`",
        "reads a text: AWQ's channel scales, then GPTQ with weighted tokens",
        "smollm2-135m-times-balanced",
        "smollm2-135m-balanced-w4-g64-asym",
    ),
    (
        "`best`",
        "learns codes and scales block by block, then scales and norms end to end",
        "smollm2-135m-best-w4-g64-asym",
        "smollm2-135m-best-w4-g64-asym",
    ),
)
# The README's results table: rows of eval/suites/weights.toml.
SHORT = (
    "smollm2-135m-best-w4-g64-asym",
    "smollm2-135m-balanced-w4-g64-asym",
    "smollm2-135m-quick-autoround-light-w4-g64-asym",
    "smollm2-135m-quick-llmcompressor-awq-w4-g64-asym-float32",
    "smollm2-135m-fast-w4-g64-asym",
    "smollm2-135m-bitsandbytes-nf4",
    "gemma3-270m-best-w4-g64-asym",
    "gemma3-270m-balanced-w4-g64-asym",
    "gemma3-270m-quick-autoround-light-w4-g64-asym",
)


def duration(seconds: float) -> str:
    """Seconds below five minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 300 else f"{seconds / 60:.0f} min"


def render_presets() -> str:
    """Which preset: what each does, how long it took and what it cost. Raises KeyError for a row without a result."""
    results = {row["id"]: result for suite in ("weights", "times") for row, result in load_results(suite)}
    lines = [
        [
            preset,
            words,
            duration(results[timed]["quantization"]["seconds"]),
            f"{results[judged]['evaluation']['kl_mean']:.3f}",
        ]
        for preset, words, timed, judged in PRESETS
    ]
    return markdown(["preset", "what it does", "time", "KL (nats)"], lines)


def render_short(results: Results) -> str:
    """A few rows of the ladder, by model, then by KL. Raises KeyError for a row without a result."""
    by_id = {row["id"]: (row, result) for row, result in results}
    lines = [
        [
            row["model"],
            row["label"],
            f"{figures['bits_per_weight']:.3f}",
            f"{figures['kl_mean']:.4f} ± {figures['kl_stderr']:.4f}",
        ]
        for _, rows in kv_order([by_id[name] for name in SHORT])
        for row, figures in rows
    ]
    return markdown(["model", "made by", "bits / weight", "KL (nats)"], lines)


def tables() -> dict[str, str]:
    """Every table of the README by the name in its markers."""
    return {"presets": render_presets(), "short": render_short(load_results("weights"))}


def block_of(readme: str, name: str = "results") -> str:
    """What stands between a table's markers. Raises ValueError if they are not there."""
    _, table, _ = split(readme, name)
    return table.strip("\n") + "\n"


def split(readme: str, name: str) -> tuple[str, str, str]:
    """Text before a table, the table, and text after it, the markers with the text around."""
    start, end = f"<!-- {name}: made by eval/results_table.py -->\n", f"<!-- end of {name} -->"
    if start not in readme or end not in readme:
        raise ValueError(f"the page lacks the markers {start!r} and {end!r}")
    before, rest = readme.split(start, 1)
    table, after = rest.split(end, 1)
    return before + start, table, end + after


PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "README.md": tables,
    "docs/kv.md": kv_tables,
    "docs/quality.md": quality_tables,
    "calibration/studies/README.md": study_tables,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for page, made in PAGES.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        for name, table in made().items():
            if args.check and block_of(text, name) != table:
                raise SystemExit(f"{page}, {name}: run `python eval/results_table.py`")
            before, _, after = split(text, name)
            text = before + table + after
        if not args.check:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
