"""eval/kernels: the GPU benchmark runs on a CPU, in Triton's interpreter, from measuring to the table of tiles."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).parents[2] / "eval" / "kernels"
RESULTS = Path(__file__).parents[2] / "eval" / "results"


def test_the_gpu_benchmark_is_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "out.json"
    env = {**os.environ, "TRITON_INTERPRET": "1", "QUANTKIT_CACHE": str(tmp_path)}
    command = [sys.executable, KERNELS / "gpu_linear.py", "--rehearse", "--out", out, "--tokens", "4"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    assert stored["rehearsal"] is True
    assert stored["failed"] == []
    assert stored["left_out"]  # peers do not run here; each says so by name
    (row,) = stored["rows"]
    assert (row["tokens"], row["tile"]["kernel"]) == (4, "gemm")
    assert row["error"] < 1e-2


def test_it_is_not_rehearsed_outside_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, KERNELS / "gpu_linear.py", "--rehearse", "--out", tmp_path / "out.json"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "TRITON_INTERPRET=1" in done.stderr


def test_the_committed_prediction_is_what_the_script_computes(tmp_path: Path) -> None:
    out = tmp_path / "predicted.json"
    subprocess.run([sys.executable, KERNELS / "predict.py", "--out", out], check=True, capture_output=True)
    assert json.loads(out.read_text()) == json.loads((RESULTS / "gpu_predicted.json").read_text())


def test_a_tile_that_fails_is_noted_and_the_derived_one_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the compiler refuses must not cost the table.

    A table that time cut short must not be worse than none.
    """
    monkeypatch.syspath_prepend(str(KERNELS))
    bench, tuning = importlib.import_module("gpu_linear"), importlib.import_module("tuning")
    tiles = bench.tile_table
    weight = bench.TritonWeight(tuning.random_weight((128, 1024), bench.Scheme(4, 128, False), torch.device("cpu")))
    tried: list[object] = []

    def ours(bench: object, weights: object, x: object, tile: object, guess: float) -> float:
        tried.append(tile)
        if len(tried) == 2:
            raise RuntimeError("ptxas died")
        return 10.0 - len(tried)

    monkeypatch.setattr(bench, "ours", ours)
    x, failed = torch.randn(1, 1024, dtype=torch.bfloat16), list[str]()
    here = bench.Bench(x.device, 1, 1.0, float("inf"), True)
    found, spent = bench.tune(here, [weight], x, 1.0, failed)
    assert tried[0] == tiles.derive(weight, 1, tiles.processors(x.device))
    assert (found, spent) == (tried[-1], 10.0 - len(tried))
    assert len(tried) == len(set(tried)) > 10
    assert [note.partition("RuntimeError: ")[2] for note in failed] == ["ptxas died"]
    found, _ = bench.tune(bench.Bench(x.device, 1, 1.0, 0.0, True), [weight], x, 1.0, failed)
    assert found == tried[0]
    assert "no time left" in failed[-1]
    monkeypatch.setattr(bench, "ours", lambda *given: 1 / 0)
    with pytest.raises(SystemExit, match=r"no tile runs.*ZeroDivisionError"):
        bench.tune(here, [weight], x, 1.0, failed)


def test_results_and_tiles_are_written_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(KERNELS))
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    bench = importlib.import_module("gpu_linear")
    bench.tile_table.measured.cache_clear()
    options = argparse.Namespace(out=tmp_path / "out.json", tiles=tmp_path / "tiles.json", tune=True)
    for block in (32, 64):
        bench.write(options, {"device": "x"}, [{"us": 1}], [], {f"{block}": {"1": bench.Tile("gemv", block)}})
    assert json.loads(options.out.read_text())["rows"] == [{"us": 1}]
    assert sorted(json.loads(options.tiles.read_text())["tiles"]) == ["32", "64"]  # the second call keeps the first


def test_every_stage_of_the_conversion_benchmark_is_where_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces functions by name in the modules that call them; a renamed one would end the run on the GPU."""
    monkeypatch.syspath_prepend(str(KERNELS))
    bench = importlib.import_module("gpu_convert")
    with bench.Clock(cuda=False) as clock:
        assert len(clock._undo) == len(bench.STAGES) + len(bench.ONCE)


@pytest.mark.slow
def test_the_conversion_benchmark_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage is seen to run."""
    monkeypatch.syspath_prepend(str(KERNELS))
    bench = importlib.import_module("gpu_convert")
    out = tmp_path / "out.json"
    command = [sys.executable, KERNELS / "gpu_convert.py", "--rehearse", "--device", "cpu", "--products", "float32"]
    done = subprocess.run(
        [*command, "--out", out, "--folder", tmp_path], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(out.read_text())["runs"]
    assert "error" not in run, run["error"]
    assert {name for name, _, _ in bench.ONCE} <= set(run["once"])
    assert {name for name, _, _ in bench.STAGES} <= set(run["per_block"][0]) | set(run["once"])


@pytest.mark.parametrize(("part", "other"), [("right", "fast"), ("fast", "right")])
def test_the_first_call_stays_within_ten_minutes_and_names_what_is_there(part: str, other: str) -> None:
    """The limits of the steps of each half add up; files and layers exist."""
    script = KERNELS / "first_call.sh"
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    (half,) = re.findall(rf'^if \[ "\$part" != {other} \]; then$(.*?)^fi$', text, re.S | re.M)
    limits = [int(n) for n in re.findall(r"^(?:timeout|tests \w+) (\d+) ", half, re.M)]
    assert len(limits) >= 3
    assert sum(limits) < 590
    files = re.findall(r"(?:eval|tests)/\S+\.py", half)
    assert len(files) >= 3
    assert all((KERNELS.parents[1] / file).exists() for file in files)
    known = {row["layer"] for row in json.loads((RESULTS / "gpu_predicted.json").read_text())["rows"]}
    assert set(re.findall(r'"(\d+B \w+)"', half)) <= known


@pytest.mark.slow
def test_the_decode_benchmark_is_rehearsed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "out.json"
    env = {**os.environ, "TRITON_INTERPRET": "1", "QUANTKIT_CACHE": str(tmp_path)}
    command = [sys.executable, KERNELS / "gpu_decode.py", "--rehearse", "--out", out, "--prompt", "3", "--tokens", "3"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    assert stored["failed"] == []
    assert [(row["weights"], row["decoding"]) for row in stored["rows"]] == [
        ("int4", "graph"),
        ("bf16", "graph"),
        ("int4", "lean"),
    ]
    assert stored["rows"][0]["bytes_per_step"] < stored["rows"][1]["bytes_per_step"] / 2
    assert all(row["tokens_per_second"] > 0 for row in stored["rows"])


@pytest.mark.slow
def test_the_attention_benchmark_is_rehearsed(tmp_path: Path) -> None:
    """Every kind of page, against what the pages decode to."""
    pytest.importorskip("triton")
    out = tmp_path / "out.json"
    env = {**os.environ, "TRITON_INTERPRET": "1", "QUANTKIT_CACHE": str(tmp_path)}
    command = [sys.executable, KERNELS / "gpu_attention.py", "--rehearse", "--out", out]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    assert stored["failed"] == []
    assert [row["kv"] for row in stored["rows"]] == ["16", "8", "4", "k4v2"]
    assert all(row["error"] < 0.02 for row in stored["rows"])
    assert stored["rows"][2]["launches"][0]["error"] < 0.02
    assert stored["rows"][2]["bytes"] < stored["rows"][1]["bytes"] < stored["rows"][0]["bytes"]
