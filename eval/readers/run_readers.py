"""Run the real readers on folders that quantkit writes, and compare their log-probabilities with ours.

    python eval/readers/run_readers.py                                  # every reader and folder: results/readers.json
    python eval/readers/run_readers.py --reader vllm --case 'ct-*'      # these only; the other rows stay as they were

Each reader runs in an environment of its own (environments.toml), made under build/interop/envs when it is missing. The
variable QUANTKIT_READER_<NAME> (VLLM, LLAMA_CPP, TRANSFORMERS_5, ...) names the Python of one that exists already.
The exit code is 1 if the engines' table said a false yes or a false no. `eval/readers/table.py` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import judge  # noqa: E402
import matrix  # noqa: E402
from models import token_ids  # noqa: E402
from places import ROOT, WORK, inherited, python_of, readers  # noqa: E402

from quantkit.evaluate.environment import hardware  # noqa: E402

RESULTS = ROOT / "eval" / "results" / "readers.json"
SECONDS = 600.0  # that a folder may take


def ask(name: str, folders: Sequence[matrix.Folder], work: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Let a reader load the folders; versions, and its answers by case."""
    reader, out = readers()[name], work / "answers" / name
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    asked = {
        "jobs": [{"case": folder.case.id, "path": str(folder.path.resolve())} for folder in folders],
        "ids": token_ids(), "new_tokens": matrix.NEW_TOKENS, "dtypes": reader["dtypes"], "out": str(out.resolve()),
        "versions": reader["versions"], "seconds": SECONDS,
    }  # fmt: skip
    (out / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    command = [str(python_of(name)), str(HERE / reader["script"]), str((out / "asked.json").resolve())]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=out,
        env={**inherited(), "HF_HUB_OFFLINE": "1", **reader.get("variables", {})},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed with exit code {done.returncode}: {(done.stderr or done.stdout)[-3000:]}")
    answers = {one.case.id: json.loads((out / f"{one.case.id}.json").read_text(encoding="utf-8")) for one in folders}
    return json.loads((out / "versions.json").read_text(encoding="utf-8")), answers


def rows(name: str, folders: Sequence[matrix.Folder], work: Path = WORK) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """One reader on the folders of its formats: versions, and a row for each."""
    reader = readers()[name]
    mine = [folder for folder in folders if folder.case.format in reader["formats"]]
    if not mine:
        return {}, []
    versions, answers = ask(name, mine, work)
    return versions, [row(name, folder, answers[folder.case.id], work / "answers" / name) for folder in mine]


def row(name: str, folder: matrix.Folder, answer: dict[str, Any], out: Path) -> dict[str, Any]:
    """What one reader made of one folder, and whether the engines' table said so."""
    reader, case = readers()[name], folder.case
    said = next((one for one in folder.verdicts if one.engine == reader.get("engine")), None)
    found, limit = float("inf"), 0.0
    if answer["loads"]:
        found = judge.difference(np.load(out / f"{case.id}.npy"), folder.logs)
        limit = case.limits.get(name, reader["limits"][answer["dtype"]])
    what = judge.status(answer, found, limit, reader.get("lacks", []))
    if what == judge.WRONG and not judge.has_flags(case.needs.get(name, [])):
        what = judge.UNTESTABLE
    word = said.loads if said else None
    agrees = judge.verdict(None if reader.get("only_yes") and not word else word, what)
    told: dict[str, Any] = {"case": case.id, "reader": name, "says": word, "status": what, "verdict": agrees}
    if answer["loads"]:
        told |= {
            "dtype": answer["dtype"],
            "difference": round(found, 6) if np.isfinite(found) else None,
            "limit": limit,
        }
        if answer["dtype"] == "float32":
            told["greedy_equal"] = agreeing(answer["greedy"], folder.greedy)
    else:
        told["error"] = short(next(iter(answer["errors"].values()), ""))
    if said and not said.loads:
        told["reason"] = said.reason
    return told


def agreeing(theirs: list[int], ours: list[int]) -> int:
    """How many greedy tokens are equal before the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), len(ours))


def short(error: str) -> str:
    """The first line of an error that says something, without folders."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return " ".join(word for word in " ".join(lines)[:240].split() if "/" not in word or len(word) < 24)


def facts(folder: matrix.Folder, originals: dict[str, Any]) -> dict[str, Any]:
    """What the results keep of a case. effect: how far its weights move our log-probabilities from the original's."""
    case = folder.case
    theirs = {} if folder.unlike_theirs is None else {"unlike_theirs": float(f"{folder.unlike_theirs:.3g}")}
    return {
        **theirs, "model": case.model, "format": case.format, "label": case.label or folder.scheme, "from": case.origin,
        "effect": round(judge.difference(folder.logs, originals[case.model]), 6),
        "engines": {one.engine: one.loads for one in folder.verdicts},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reader", action="append", choices=sorted(readers()))
    parser.add_argument("--case", action="append", help="a pattern of ids; repeatable")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="where folders and answers are kept")
    args = parser.parse_args()
    folders = matrix.write(matrix.cases(*(args.case or ["*"])), args.work / "folders")
    originals = matrix.originals(folders, args.work / "folders")
    kept = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    result: dict[str, Any] = {"readers": {}, "cases": {}, "rows": [], **kept}
    for folder in folders:
        result["cases"][folder.case.id] = facts(folder, originals)
    result["cases"] = {one.id: result["cases"][one.id] for one in matrix.cases() if one.id in result["cases"]}
    result["rows"] = [one for one in result["rows"] if one["case"] in result["cases"]]
    for name in args.reader or readers():
        versions, made = rows(name, folders, args.work)
        if not made:
            continue
        new = {one["case"] for one in made}
        others = [one for one in result["rows"] if one["reader"] != name or one["case"] not in new]
        result["rows"] = sorted([*others, *made], key=order)
        result["readers"][name] = {"versions": versions, "processor": hardware()["processor"]}
        result["readers"] = {one: result["readers"][one] for one in readers() if one in result["readers"]}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for one in made:
            print(one["reader"], one["case"], one["status"], one.get("difference", ""), one["verdict"], flush=True)
    if any(one["verdict"] for one in result["rows"]):
        raise SystemExit(1)


def order(one: dict[str, Any]) -> tuple[int, int]:
    """Rows lie by case, then by reader, as their files name them."""
    return [case.id for case in matrix.cases()].index(one["case"]), list(readers()).index(one["reader"])


if __name__ == "__main__":
    main()
