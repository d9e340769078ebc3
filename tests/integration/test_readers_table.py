"""The tables of docs/formats/readers.md: what the results say, and the results what the engines' table says today."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[2]
READERS = ROOT / "eval" / "readers"
RESULTS = json.loads((ROOT / "eval" / "results" / "readers.json").read_text(encoding="utf-8"))
NAMES = ("judge", "matrix", "models", "places", "reading", "environments")


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    sys.path.insert(0, str(READERS))
    yield script(READERS / "run_readers.py")
    sys.path.remove(str(READERS))
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_page_shows_what_the_results_say(run: Any) -> None:
    table = script(READERS / "table.py")
    page = table.PAGE.read_text(encoding="utf-8")
    for name, made in table.tables(RESULTS).items():
        assert table.block_of(page, name) == made, f"{name}: run `python eval/readers/table.py`"


def test_the_results_know_no_false_yes_and_no_false_no() -> None:
    assert RESULTS["rows"]
    assert not [
        row for row in RESULTS["rows"] if row["verdict"] or (row["status"] == "wrong" and row["says"] is not False)
    ]


def test_every_folder_and_reader_has_its_result(run: Any) -> None:
    """Of the readers that were run. A folder of another tool's needs that tool, too: it may be left out."""
    known = {(row["case"], row["reader"]) for row in RESULTS["rows"]}
    wanted = {
        (case.id, name)
        for case in run.matrix.cases()
        for name in RESULTS["readers"]
        if case.format in run.readers()[name]["formats"] and not (case.by and case.id not in RESULTS["cases"])
    }
    assert known == wanted, "run eval/readers/run_readers.py: the matrix has changed"


def test_the_results_are_of_todays_engines_table(run: Any, tmp_path: Path) -> None:
    """A rule that changes is seen here, until the readers have run again."""
    (tmp_path / "models").mkdir()
    planned = 0
    for case in run.matrix.cases():
        verdicts = run.matrix.verdicts_of_plan(case, tmp_path)
        if verdicts is None:
            continue
        planned += 1
        told = RESULTS["cases"][case.id]["engines"]
        assert {one.engine: one.loads for one in verdicts} == told, f"{case.id}: run eval/readers/run_readers.py again"
        for row in RESULTS["rows"]:
            engine = run.readers()[row["reader"]].get("engine", "")
            if row["case"] == case.id:
                assert row["says"] == told.get(engine)
    assert planned > 40


def test_pins_and_scripts_are_there(run: Any) -> None:
    for reader in run.readers().values():
        assert (READERS / reader["script"]).exists()
        if "environment" in reader:
            assert "install" in run.readers()[reader["environment"]]
            continue
        assert all("==" in one for one in [*reader["install"], *reader.get("install_alone", [])])


@pytest.mark.parametrize(
    ("says", "loads", "difference", "wanted"),
    [
        (True, True, 0.001, ("right", "")),
        (True, True, 0.1, ("wrong", "false yes")),
        (True, False, 0.0, ("refused", "false yes")),
        (False, True, 0.001, ("right", "false no")),
        (False, True, 0.1, ("wrong", "")),
        (False, False, 0.0, ("refused", "")),
        (None, True, 0.001, ("right", "")),
    ],
)
def test_a_false_yes_and_a_false_no_are_told(
    run: Any, says: bool | None, loads: bool, difference: float, wanted: tuple[str, str]
) -> None:
    what = run.judge.status({"loads": loads, "errors": {}}, difference, 0.003, [])
    assert (what, run.judge.verdict(says, what)) == wanted


def test_a_kernel_that_this_machine_lacks_is_no_answer(run: Any) -> None:
    answer = {"loads": False, "errors": {"float32": "ValueError: Failed to find a kernel that can implement it"}}
    what = run.judge.status(answer, 0.0, 0.003, ["Failed to find a kernel"])
    assert (what, run.judge.verdict(True, what), run.judge.verdict(False, what)) == ("not testable", "", "")


def test_answers_of_another_shape_or_not_finite_differ_without_end(run: Any) -> None:
    ours = np.zeros((2, 3))
    assert run.judge.difference(ours + 0.25, ours) == 0.25
    assert run.judge.difference(np.zeros((2, 4)), ours) == float("inf")
    assert run.judge.difference(ours * np.nan, ours) == float("inf")


def test_an_answer_comes_from_a_child_and_one_that_dies_is_an_answer(run: Any, tmp_path: Path) -> None:
    code = (
        "import os\nfrom reading import serve\n"
        "def read(path, ids, new, dtype):\n"
        "    if path == 'dies': os._exit(3)\n"
        "    if dtype == 'float32': raise ValueError('not in float32')\n"
        "    return [[0.0, -1.0]], ids, {}\n"
        "serve(read)\n"
    )
    (tmp_path / "reader.py").write_text(f"import sys\nsys.path.insert(0, {str(READERS)!r})\n{code}")
    asked = {
        "jobs": [{"case": name, "path": name} for name in ("dies", "lives")], "ids": [1, 2], "new_tokens": 1,
        "dtypes": ["float32", "bfloat16"], "out": str(tmp_path), "versions": ["numpy", "no-such-package"],
        "seconds": 60,
    }  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    done = run.subprocess.run([sys.executable, str(tmp_path / "reader.py"), str(tmp_path / "asked.json")], check=False)
    assert done.returncode == 0
    dead, alive = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("dies", "lives"))
    assert (dead["loads"], dead["errors"]) == (False, {"all": "died with exit code 3"})
    assert (alive["loads"], alive["dtype"], alive["greedy"]) == (True, "bfloat16", [1, 2])
    assert "not in float32" in alive["errors"]["float32"]
    assert json.loads((tmp_path / "versions.json").read_text())["no-such-package"] == "none"
