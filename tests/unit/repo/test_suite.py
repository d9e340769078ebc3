"""The evaluation suite resumes: a row runs once, a changed row runs again, an interrupted one leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[3]
ROW = {"id": "a-rtn", "model": "a", "label": "x", "convert": ["--bits", "4"], "expect": {"perplexity": [1.0, 2.0]}}
PROTOCOL = {"data": "wikipedia-sample", "protocol": "gptq", "seq_len": 16, "tokens": 64}
SUITE = {"evaluation": PROTOCOL, "row": [ROW]}
KEYS = {"id", "model", "label", "convert", "peer", "of", "evaluate", "expect", "cache", "against", "rotate"}


@pytest.fixture(scope="module")
def suite() -> Any:
    return script(ROOT / "eval" / "run_suite.py")


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


def test_rows_are_chosen_by_patterns_in_their_order(suite):
    rows = [{"id": name} for name in ("a-kv8", "a-kv4", "b-kv4", "b-kivi2")]
    assert [row["id"] for row in suite.chosen(rows, "*kivi*,*kv4")] == ["b-kivi2", "a-kv4", "b-kv4"]
    assert suite.chosen(rows, "a-kv4,a-*") == [rows[1], rows[0]]
    assert suite.chosen(rows, "c-*") == []


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
            assert len(set(row) & {"convert", "peer", "of", "cache"}) <= 1
            assert "of" not in row or row["of"] in {other["id"] for other in rows if other["model"] == row["model"]}
            for word in ("peer", "cache"):
                assert word not in row or (ROOT / row[word][0]).exists()
            assert row.get("against", "itself") == "itself"
            assert row.get("rotate", True) is True
            assert not ("rotate" in row and set(row) & {"peer", "of", "cache"})
            if "peer" in row:
                assert (ROOT / row["peer"][0]).exists()


def test_a_dequantized_peers_sizes_are_those_of_its_own_file(suite, tmp_path, monkeypatch):
    """The folder that is evaluated is float32; what the peer stored is in what its script reports."""
    runner = suite.Runner(SUITE, tmp_path / "work", tmp_path)
    (tmp_path / "work" / "twins" / "a").mkdir(parents=True)
    made = {
        "dequantized": True,
        "bits_per_weight": 4.25,
        "model_bits_per_weight": 6.5,
        "checkpoint_bytes": 1000,
        "layers": 3,
    }
    commands = []
    monkeypatch.setattr(suite, "execute", lambda command: commands.append(command) or json.dumps(made))
    monkeypatch.setattr(runner, "baseline", lambda model, twin: None)

    class Found:
        def to_json(self):
            return {"bits_per_weight": None, "model_bits_per_weight": 32.0, "checkpoint_bytes": 9, "perplexity": 1.5}

        def table(self, bands):
            return ""

    monkeypatch.setattr(suite, "evaluate", lambda *args, **options: Found())
    row = {"id": "a-peer", "model": "a", "label": "x", "peer": ["eval/peers/run.py", "hqq", "--work", "WORK"]}
    runner.run(row)
    stored = json.loads((tmp_path / "a-peer.json").read_text())
    assert {name: stored["evaluation"][name] for name in suite.SIZES} == {name: made[name] for name in suite.SIZES}
    work = str(tmp_path / "work")
    assert commands[0][1:] == [*row["peer"][:3], work, f"{work}/twins/a", "--out", f"{work}/models/a-peer"]
    assert str(tmp_path) not in stored["command"]
    assert {"started", "load_at_start"} <= set(stored["quantization"])


def test_the_ladder_has_every_peer_that_has_a_result(suite):
    """As the head of weights.toml says: no peer may be left out of the comparison."""
    suites = ROOT / "eval" / "suites"
    ladder, *others = (
        suite.tomllib.loads((suites / f"{name}.toml").read_text())["row"]
        for name in ("weights", "main", "peers", "peers-quick")
    )
    measured = [
        row["id"]
        for rows in others
        for row in rows
        if "peer" in row and (ROOT / "eval" / "results" / f"{row['id']}.json").exists()
    ]
    assert measured
    assert not set(measured) - {row["id"] for row in ladder}
