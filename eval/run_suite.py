"""Run a suite: quantize and evaluate every row that has no result yet, one JSON per row.

    python eval/run_suite.py                                  the rows of eval/suites/main.toml that are missing
    python eval/run_suite.py --only '*gptq*' --again          those rows, whether they have a result or not
    python eval/run_suite.py --list                           what is there, what is missing, what is out of range

Stops and resumes anywhere: a row's JSON is written when the row is done, under its final name at once. A row whose
definition has changed counts as missing. Rows of one model share the original's hidden states. Twins and quantized
models are kept in --work (default build/eval); delete it at will. Exit code 1 when a figure lies outside its expected
range.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from quantkit.errors import QuantkitError
from quantkit.evaluate.api import evaluate
from quantkit.evaluate.divergence import Baseline
from quantkit.evaluate.prepare import prepare, prepare_baseline

if TYPE_CHECKING:
    from foreign_cache import ForeignCache

PROBES = ("planted_fact", "greedy")  # of a quantized cache beside the 16-bit one
SIZES = ("bits_per_weight", "model_bits_per_weight", "checkpoint_bytes")
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suite", nargs="?", type=Path, default=ROOT / "eval" / "suites" / "main.toml")
    parser.add_argument(
        "--only", default="*", help="rows whose id matches one of these patterns, separated by commas, in their order"
    )
    parser.add_argument("--again", action="store_true", help="run rows that have a result, too")
    parser.add_argument("--list", action="store_true", help="show the state of every row and stop")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "eval")
    parser.add_argument("--results", type=Path, default=ROOT / "eval" / "results")
    args = parser.parse_args()
    suite = tomllib.loads(args.suite.read_text(encoding="utf-8"))
    rows = chosen(suite["row"], args.only)
    if not rows:
        raise SystemExit(f"no row of {args.suite} matches {args.only!r}")
    runner = Runner(suite, args.work, args.results)
    if not args.list:
        for row in sorted(rows, key=lambda row: row["model"]):  # one original in memory at a time
            if args.again or runner.result(row) is None:
                runner.run(row)
    wrong = [line for row in rows for line in runner.judge(row)]
    raise SystemExit(1 if any("OUT OF RANGE" in line for line in wrong) else 0)


def chosen(rows: list[dict[str, Any]], patterns: str) -> list[dict[str, Any]]:
    """Rows whose id matches, those of the first pattern first, each once."""
    found = [row for pattern in patterns.split(",") for row in rows if fnmatch.fnmatch(row["id"], pattern)]
    return [row for i, row in enumerate(found) if row not in found[:i]]


class Runner:
    """Runs rows, with the hidden states of the last original kept."""

    def __init__(self, suite: dict[str, Any], work: Path, results: Path) -> None:
        self.evaluation, self.work, self.results = suite["evaluation"], work, results
        self.rows = {row["id"]: row for row in suite["row"]}
        self._baseline: tuple[str, Baseline] | None = None
        self._foreign: tuple[str, ForeignCache] | None = None

    def result(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """The stored result, None if there is none for the row as it stands now."""
        path = self.results / f"{row['id']}.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if found["row"] == definition(row) and found["protocol"] == self.evaluation else None

    def run(self, row: dict[str, Any]) -> None:
        """Quantize, evaluate, write the JSON."""
        print(f"\n{row['id']}", flush=True)
        twin = self.twin(row["model"])
        try:
            figures, made, command = self.run_cache(row, twin) if "cache" in row else self.run_model(row, twin)
        except QuantkitError as error:
            raise SystemExit(f"{row['id']}: {error}") from error
        data = {
            "id": row["id"], "row": definition(row), "protocol": self.evaluation, "command": command,
            "date": time.strftime("%Y-%m-%d"), "quantization": made, "evaluation": figures,
        }  # fmt: skip
        self.results.mkdir(parents=True, exist_ok=True)
        partial = self.results / f".{row['id']}.partial"
        partial.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.rename(self.results / f"{row['id']}.json")

    def run_model(self, row: dict[str, Any], twin: Path) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
        """Figures of the row's model, what its maker reported, and the command that made it."""
        model, made, command = self.quantize(row, twin)
        options = {**self.evaluation, **row.get("evaluate", {})}
        # the original is its own baseline where its cache is quantized
        alone = model == twin and str(options.get("kv_bits", 16)) == "16"
        if alone:
            options = {name: value for name, value in options.items() if name not in PROBES}
        baseline: Baseline | str | None = None if alone else self.baseline(row["model"], twin)
        if row.get("against") == "itself":  # with a 16-bit cache
            baseline = str(model)
        elif "data" in row.get("evaluate", {}):  # another text than the one whose states are kept
            baseline = str(twin)
        evaluation = evaluate(str(model), baseline=baseline, progress=show, **options)
        figures = evaluation.to_json()
        figures["model"], figures["baseline"] = row["id"], None if alone else f"{row['model']}-original"
        if row.get("against") == "itself":
            figures["baseline"] = row["id"]
        if made is not None and made.get("dequantized"):  # what lies in the folder is float; the peer's own file is not
            figures |= {size: made[size] for size in SIZES}
        print(evaluation.table(bands=True), flush=True)
        return figures, made, command

    def run_cache(self, row: dict[str, Any], twin: Path) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
        """The same for a peer's cache over the original's weights."""
        from foreign_cache import ForeignCache  # beside this file

        if self._foreign is None or self._foreign[0] != row["model"]:
            self._foreign = None
            self._foreign = (row["model"], ForeignCache(str(twin), self.evaluation, self.baseline(row["model"], twin)))
        foreign = self._foreign[1]
        out = self.work / "caches" / row["id"]
        shutil.rmtree(out, ignore_errors=True)
        command = [*row["cache"], "TWIN", "--out", "OUT", *foreign.options(row.get("evaluate", {})), "--work", "WORK"]
        real = {"TWIN": str(twin), "OUT": str(out), "WORK": str(self.work)}
        begun = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load_at_start": os.getloadavg()[0]}
        made = {**json.loads(execute([sys.executable, *(real.get(word, word) for word in command)])), **begun}
        figures = foreign.figures(out, made)
        shutil.rmtree(out)  # hidden states: hundreds of megabytes
        return (
            figures | {"model": row["id"], "baseline": f"{row['model']}-original"},
            made,
            shlex.join(["python", *command]),
        )

    def twin(self, model: str) -> Path:
        """The twin's folder, built if it is missing."""
        twin = self.work / "twins" / model
        if not twin.exists():
            twin.parent.mkdir(parents=True, exist_ok=True)
            execute([sys.executable, str(ROOT / "eval" / "make_twins.py"), model, str(twin)])
        return twin

    def rotated(self, model: str, twin: Path) -> Path:
        """The twin's rotated copy (rotate.py), built if it is missing."""
        out = self.work / "rotated" / model
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            execute([sys.executable, str(ROOT / "eval" / "rotate.py"), str(twin), str(out)])
        return out

    def quantize(self, row: dict[str, Any], twin: Path) -> tuple[Path, dict[str, Any] | None, str | None]:
        """The row's model, what its maker reported, and the command that makes it."""
        out = self.work / "models" / row["id"]
        if "of" in row:  # another row's model, evaluated in another way
            return self.model_of(self.rows[row["of"]])
        source, name = (self.rotated(row["model"], twin), "ROTATED") if row.get("rotate") else (twin, "TWIN")
        if "convert" in row:
            command = ["-m", "quantkit.cli.main", "convert", name, "--out", "OUT", *row["convert"], "--json"]
        elif "peer" in row:
            command = [*row["peer"], "TWIN", "--out", "OUT"]
        else:
            return source, None, None
        if out.exists():
            shutil.rmtree(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        # its seconds are then those of the last process
        resumed = "convert" in row and (out.parent / f".{out.name}.work" / "job.json").exists()
        real = {name: str(source), "OUT": str(out), "WORK": str(self.work)}
        begun = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load_at_start": os.getloadavg()[0]}
        words = [*(real.get(word, word) for word in command), *(["--resume"] if resumed else [])]
        printed = execute([sys.executable, *words])
        for word, path in real.items():  # a warning may name one
            printed = printed.replace(path, word)
        made: dict[str, Any] = json.loads(printed)
        made = {**made, "out": row["id"], **begun, **({"resumed": True} if resumed else {})}
        if isinstance(made.get("layers"), list):
            made["layers"] = len(made["layers"])  # the per-layer report stays in the checkpoint
        return out, made, shlex.join(["python", *command])

    def model_of(self, row: dict[str, Any]) -> tuple[Path, dict[str, Any] | None, str | None]:
        """A row's model; the row is run first if it has no result or its model is gone."""
        out = self.work / "models" / row["id"]
        if self.result(row) is None or not out.exists():
            self.run(row)
        made = self.result(row)
        assert made is not None  # run() has just written it
        return out, made["quantization"], made["command"]

    def baseline(self, model: str, twin: Path) -> Baseline:
        """Hidden states of the original, made once for all rows of a model."""
        if self._baseline is None or self._baseline[0] != model:
            self._baseline = None
            cut = {name: value for name, value in self.evaluation.items() if name not in PROBES}
            self._baseline = (model, prepare_baseline(str(twin), prepare(str(twin), **cut), progress=show))
        return self._baseline[1]

    def judge(self, row: dict[str, Any]) -> list[str]:
        """One line per row, and one per figure outside its range; printed."""
        result = self.result(row)
        if result is None:
            lines = [f"{row['id']:<46} no result"]
        else:
            got = result["evaluation"]
            kl = (
                ""
                if got["kl_mean"] is None
                else f"  KL {got['kl_mean']:.4f}  top-1 {100 * got['top1_agreement']:.1f} %"
            )
            lines = [f"{row['id']:<46} perplexity {got['perplexity']:.4f}{kl}"]
            for figure, (low, high) in row.get("expect", {}).items():
                if not low <= got[figure] <= high:
                    lines.append(f"  OUT OF RANGE: {figure} {got[figure]:.6g} is not in {low} .. {high}")
        print("\n".join(lines))
        return lines


def definition(row: dict[str, Any]) -> dict[str, Any]:
    """What makes a row's result: label and expectation may change without running it again."""
    return {key: value for key, value in row.items() if key not in ("label", "expect")}


def execute(command: list[str]) -> str:
    """Run a command from the repository's root, its messages passing through; its stdout. Stops on failure."""
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"failed with exit code {done.returncode}: {shlex.join(command)}")
    return done.stdout


def show(what: str, done: int, total: int) -> None:
    """Progress on stderr, one line that is written over; silent when stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{total} ", end="" if done < total else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
