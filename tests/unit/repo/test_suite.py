"""The evaluation suite resumes: a row runs once, a changed row runs again, an interrupted one leaves nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROW = {"id": "a-rtn", "model": "a", "label": "x", "convert": ["--bits", "4"], "expect": {"perplexity": [1.0, 2.0]}}
PROTOCOL = {"data": "wikipedia-sample", "protocol": "gptq", "seq_len": 16, "tokens": 64}
SUITE = {"evaluation": PROTOCOL, "row": [ROW]}
KEYS = {"id", "model", "label", "convert", "peer", "of", "evaluate", "expect"}


@pytest.fixture(scope="module")
def suite() -> Any:
    spec = importlib.util.spec_from_file_location("run_suite", ROOT / "eval" / "run_suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store(folder: Path, row: dict[str, Any], suite: Any, perplexity: float = 1.5) -> None:
    figures = {"perplexity": perplexity, "kl_mean": None, "top1_agreement": None}
    data = {"row": suite.definition(row), "protocol": PROTOCOL, "evaluation": figures}
    (folder / f"{row['id']}.json").write_text(json.dumps(data))


def test_a_stored_row_is_not_run_again_and_a_changed_one_is(suite, tmp_path):
    runner = suite.Runner(SUITE, tmp_path / "work", tmp_path)
    assert runner.result(ROW) is None
    store(tmp_path, ROW, suite)
    assert runner.result(ROW) is not None
    assert runner.result(ROW | {"label": "another name"}) is not None
    assert runner.result(ROW | {"convert": ["--bits", "3"]}) is None
    assert (
        suite.Runner(SUITE | {"evaluation": PROTOCOL | {"tokens": 32}}, tmp_path / "work", tmp_path).result(ROW) is None
    )


def test_a_figure_outside_its_range_is_told(suite, tmp_path):
    runner = suite.Runner(SUITE, tmp_path / "work", tmp_path)
    store(tmp_path, ROW, suite)
    assert len(runner.judge(ROW)) == 1
    store(tmp_path, ROW, suite, perplexity=2.5)
    assert "OUT OF RANGE: perplexity 2.5" in runner.judge(ROW)[1]


def test_a_failing_command_stops_with_its_words_and_leaves_no_result(suite, tmp_path):
    runner = suite.Runner(SUITE, tmp_path / "work", tmp_path)
    (tmp_path / "work" / "twins" / "a").mkdir(parents=True)
    with pytest.raises(SystemExit, match="failed with exit code 2"):
        runner.run(ROW | {"convert": ["--bits", "99"]})
    assert not list(tmp_path.glob("*.json"))


def test_every_row_of_the_suites_is_well_formed(suite):
    for path in sorted((ROOT / "eval" / "suites").glob("*.toml")):
        rows = suite.tomllib.loads(path.read_text(encoding="utf-8"))["row"]
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            assert {"id", "model", "label"} <= set(row) <= KEYS
            assert row["id"].startswith(row["model"])
            assert len(set(row) & {"convert", "peer", "of"}) <= 1
            assert "of" not in row or row["of"] in {other["id"] for other in rows if other["model"] == row["model"]}
            if "peer" in row:
                assert (ROOT / row["peer"][0]).exists()
