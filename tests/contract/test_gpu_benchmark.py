"""eval/kernels: the GPU benchmark runs on a CPU, in Triton's interpreter, from measuring to the table of tiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert row["us"] > 0


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
