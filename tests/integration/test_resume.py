"""A job that was killed, interrupted or ran out of disk goes on with --resume and ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written import digest

import quantkit
from quantkit import algorithms
from quantkit.checkpoint.storage.record import read_record, write_record
from quantkit.convert import run
from quantkit.convert.job import work_folder
from quantkit.convert.plan.job_record import JOB
from quantkit.convert.stages import observe as observe_stage
from quantkit.errors import NumericsError, QuantkitError, RequestError

SMALL = dict(samples=4, seq_len=32, group_size=32)
Convert = Callable[..., Any]


def test_a_killed_job_that_replaces_a_model_ends_with_the_same_bytes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """The old model lies under the final name until the new one does."""
    out = tmp_path / "out"
    convert = convert_of(tiny_original, calibration_text, out)
    convert(bits=8)
    old = digest(out)
    wanted = digest(convert_of(tiny_original, calibration_text, tmp_path / "other")().out)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nimport quantkit\nrename = Path.rename\n"
        "def killed(self, target):\n"
        "    if 'partial' in self.name: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rename(self, target)\n"
        "Path.rename = killed\n"
        f"quantkit.convert({str(tiny_original)!r}, out={str(out)!r}, "
        f"calibration={str(calibration_text)!r}, overwrite=True, **{SMALL!r})\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not out.exists()  # killed between two renames: the one moment in which the name points nowhere
    assert [digest(p) for p in tmp_path.glob(".out.replaced-*")] == [old]
    convert(resume=True, overwrite=True)
    assert digest(out) == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "out"]


def convert_of(source: Path, text: Path, out: Path) -> Convert:
    def convert(**options: Any) -> Any:
        return quantkit.convert(source, out=out, **{**SMALL, "calibration": str(text), **options})

    return convert


@pytest.fixture
def convert(tiny_original: Path, calibration_text: Path, tmp_path: Path, states_after_each_block: None) -> Convert:
    """Convert the tiny model to ``tmp_path / "out"``, states stored after each block."""
    return convert_of(tiny_original, calibration_text, tmp_path / "out")


class Stopped(Exception):
    """What a test raises in the middle of a job."""


def stop_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """The next job fails in its n-th block, after its quantization and before its states are advanced."""
    count = 0

    def fails(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == call:
            monkeypatch.setattr(run, "advance", advance)
            raise error
        advance(*args)

    advance = run.advance
    monkeypatch.setattr(run, "advance", fails)


@pytest.fixture
def stopped(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """A job that stopped in its second block: its work folder, and what it should become."""
    convert()
    wanted = digest(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "wanted")
    stop_at(monkeypatch, 2, Stopped())
    with pytest.raises(Stopped) as caught:
        convert()
    assert "--resume" in caught.value.__notes__[0]
    return tmp_path / ".out.work", wanted


def test_an_error_leaves_a_job_that_can_go_on(
    stopped: tuple[Path, dict[str, str]], convert: Convert, tmp_path: Path
) -> None:
    work, wanted = stopped
    assert {p.name for p in (work / "parts").glob("*.json")} == {"block-0000.json", "block-0001.json"}
    seen = []
    report = convert(resume=True, on_progress=lambda progress: seen.append((progress.stage, progress.done)))
    assert seen[0] == ("blocks", 1)  # the states in front of block 1 were stored: block 0 is not done again
    assert len(report.layers) == 21
    assert " s since it was resumed" in report.table()
    assert report.to_json()["resumed"]
    assert digest(tmp_path / "out") == wanted
    assert not work.exists()


def test_a_job_that_was_killed_while_it_looked_at_the_weights_looks_again(
    stopped: tuple[Path, dict[str, str]], convert: Convert
) -> None:
    record = read_record(stopped[0] / "job.json", JOB)
    assert record is not None
    assert record["read"]
    write_record(stopped[0] / "job.json", {**record, "read": False})
    seen = []
    convert(resume=True, on_progress=lambda progress: seen.append(progress.stage))
    assert seen[0] == "read"


def test_the_original_models_states_are_taken_up_beside_the_quantized_ones(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms, "PAIRED", ("gptq",))
    seen: list[tuple[str, str]] = []
    observe = observe_stage.observe

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(tuple(hashlib.sha256(b"".join(s.numpy().tobytes() for s in args[i])).hexdigest() for i in (1, 5)))
        return observe(*args, **named)

    monkeypatch.setattr(observe_stage, "observe", watched)
    convert()
    whole, wanted = seen.copy(), digest(tmp_path / "out")
    assert [mine == original for mine, original in whole] == [True, False, False]
    (tmp_path / "out").rename(tmp_path / "wanted")
    stop_at(monkeypatch, 2, Stopped())
    with pytest.raises(Stopped):
        convert()
    seen.clear()
    convert(resume=True)
    assert seen == whole[1:]
    assert digest(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("damaged", "first"),
    [("states-0.bin", 0), ("states-0.json", 0), ("parts/block-0000.json", 0), ("parts/block-0000.safetensors", 0),
     ("parts/block-0001.safetensors", 1)],
)  # fmt: skip
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_record_is_done_again(
    damaged: str, first: int, how: str, stopped: tuple[Path, dict[str, str]], convert: Convert, tmp_path: Path
) -> None:
    work, wanted = stopped
    data = bytearray((work / damaged).read_bytes())
    data[len(data) // 2] ^= 1
    (work / damaged).write_bytes(data if how == "flip" else data[: len(data) // 2])
    if how == "remove":
        (work / damaged).unlink()
    seen = []
    convert(resume=True, on_progress=lambda progress: seen.append((progress.stage, progress.done)))
    assert seen[0] == ("blocks", first)
    assert digest(tmp_path / "out") == wanted


def test_older_states_are_used_when_the_younger_ones_are_damaged(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert()
    wanted = digest(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "wanted")
    monkeypatch.setattr(run, "finish", lambda *rest: (_ for _ in ()).throw(Stopped()))
    with pytest.raises(Stopped):
        convert()
    monkeypatch.undo()
    work = tmp_path / ".out.work"
    (work / "parts" / "block-0002.json").unlink()
    young = max((0, 1), key=lambda slot: json.loads((work / f"states-{slot}.json").read_text().split("\n")[1])["block"])
    (work / f"states-{young}.bin").write_bytes(b"")
    seen = []
    convert(resume=True, on_progress=lambda progress: seen.append((progress.stage, progress.done)))
    assert seen[0] == ("blocks", 1)
    assert digest(tmp_path / "out") == wanted


CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"bits": 8}, ["--bits: 4 there, 8 here"]),
    ({"samples": 3}, ["--samples: 4 there, 3 here", "the tokens drawn from the text"]),
    ({"seq_len": 16}, ["--seq-len: 32 there, 16 here", "the tokens drawn from the text"]),
    ({"seed": 1, "damping": 0.1}, ["--seed: 0 there, 1 here", "--damping: 0.01 there, 0.1 here"]),
    ({"method": "awq"}, ["--method: gptq there, awq here"]),
    ({"group_size": None}, ["--group-size: 32 there, none here"]),
    ({"symmetric": True}, ["--symmetric: False there, True here"]),
    ({"scales": "minmax"}, ["--scales: search there, minmax here"]),
    ({"scale_dtype": "bfloat16"}, ["--scale-dtype: float16 there, bfloat16 here"]),
    ({"format": "native"}, ["--format: compressed-tensors there, native here"]),
    ({"kv_bits": 8}, ["--kv-bits: 16 there, 8 here"]),
    ({"rules": ["*.o_proj=bits:8"]}, ["--rule: none there, ['*.o_proj=bits:8'] here"]),
    ({"calibration": "self"}, ["--calibration: ", "the calibration text (sha256)"]),
]


def test_another_job_is_refused_and_the_differences_named(
    stopped: tuple[Path, dict[str, str]], convert: Convert, tmp_path: Path
) -> None:
    before = digest(stopped[0] / "parts")
    for change, words in CHANGES:
        with pytest.raises(RequestError, match="work folder of another job") as caught:
            convert(resume=True, **change)
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert digest(stopped[0] / "parts") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.work", "wanted"]


def test_another_output_folder_is_refused(
    stopped: tuple[Path, dict[str, str]], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    convert = convert_of(tiny_original, calibration_text, tmp_path / "elsewhere")
    with pytest.raises(RequestError) as caught:
        convert(resume=True, work_dir=stopped[0])
    assert f"--out: {tmp_path / 'out'} there, {tmp_path / 'elsewhere'} here" in str(caught.value)


def test_another_number_of_threads_or_version_is_refused(
    stopped: tuple[Path, dict[str, str]], convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(work_folder, "__version__", "99")
    with pytest.raises(
        RequestError, match=r"(?s)version of quantkit: .* there, 99 here.*\(OMP_NUM_THREADS\): .* there, 77 here"
    ):
        convert(resume=True)


def test_a_work_folder_of_an_earlier_layout_is_refused_by_name(
    stopped: tuple[Path, dict[str, str]], convert: Convert
) -> None:
    job = read_record(stopped[0] / "job.json", JOB)
    assert job is not None
    job["identity"]["layout"] = work_folder.LAYOUT - 1
    write_record(stopped[0] / "job.json", job)
    with pytest.raises(RequestError, match=f"the version of the work folder: {work_folder.LAYOUT - 1} there"):
        convert(resume=True)


def test_a_changed_source_or_text_is_refused(
    tiny_model: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(calibration_text.read_bytes())
    convert = convert_of(tiny_model, text, tmp_path / "out")
    stop_at(monkeypatch, 1, Stopped())
    with pytest.raises(Stopped):
        convert()
    text.write_text("Another text. " * 500)
    with pytest.raises(RequestError, match="the calibration text"):
        convert(resume=True)
    text.write_bytes(calibration_text.read_bytes())
    weights = bytearray((tiny_model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tiny_model / "model.safetensors").write_bytes(weights)
    with pytest.raises(RequestError, match="the source's weights"):
        convert(resume=True)
    weights[-1] ^= 1
    (tiny_model / "model.safetensors").write_bytes(weights)
    (tiny_model / "LICENSE.txt").write_text("another one")
    with pytest.raises(RequestError, match="the files beside the source's weights"):
        convert(resume=True)
    (tiny_model / "LICENSE.txt").unlink()
    convert(resume=True)


def test_a_job_that_waits_is_not_overrun(
    stopped: tuple[Path, dict[str, str]], convert: Convert, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=r"--resume to go on with it, or --overwrite"):
        convert()
    convert(overwrite=True, bits=8)
    assert digest(tmp_path / "out") != stopped[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "wanted"]


def test_two_processes_do_not_work_in_one_folder(stopped: tuple[Path, dict[str, str]], convert: Convert) -> None:
    held = work_folder._lock(stopped[0])
    try:
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(RequestError, match="another process is working"):
                convert(**options)
    finally:
        os.close(held)
    convert(resume=True)


def test_resume_without_a_job_says_what_to_do(
    tiny_original: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    done = quantkit("convert", tiny_original, "--out", tmp_path / "out", "--method", "rtn", "--resume")
    assert done.returncode == 2
    assert "no unfinished job" in done.stderr
    assert "Leave --resume out" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_in_it_is_no_work_folder(convert: Convert, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("important")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(RequestError, match=r"thesis\.txt.*no work folder"):
            convert(work_dir=mine, **options)
    for inside in (tmp_path / "out" / "work", tmp_path, tmp_path / "out"):
        with pytest.raises(RequestError, match="--work-dir"):
            convert(work_dir=inside)
    assert (mine / "thesis.txt").read_text() == "important"


def test_the_work_folder_may_lie_elsewhere(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at(monkeypatch, 1, Stopped())
    with pytest.raises(Stopped):
        convert(work_dir=tmp_path / "work")
    assert [p.name for p in tmp_path.iterdir()] == ["work"]
    convert(work_dir=tmp_path / "work", resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_resumed_job_cannot_cure_leaves_nothing(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 2, NumericsError("model.layers.1: all of it is NaN"))
    with pytest.raises(NumericsError) as caught:
        convert()
    assert not getattr(caught.value, "__notes__", [])
    assert list(tmp_path.iterdir()) == []


INTERRUPT = """
import os, signal, sys
import quantkit.convert.stages.observe as stage
block, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
observe = stage.observe
def interrupted(*args, **named):
    global block
    block -= 1
    if block < 0:
        os.kill(os.getpid(), number)
    return observe(*args, **named)
stage.observe = interrupted
from quantkit.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "block"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_an_interrupted_command_says_how_to_go_on(
    number: int, block: int, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """One that had finished no block leaves nothing, so that the same command starts anew."""
    out = tmp_path / "out"
    command = ["convert", str(tiny_original), "--out", str(out), "--calibration", str(calibration_text)]
    command += ["--group-size", "32", "--samples", "4", "--seq-len", "32"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, str(block), str(int(number)), *command],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr.strip().startswith("Error: Interrupted.")
    assert "Traceback" not in done.stderr
    assert ("--resume" in done.stderr) == (block > 0)
    assert ("starts anew" in done.stderr) == (block == 0)
    assert [p.name for p in tmp_path.iterdir()] == ([".out.work"] if block else [])


@pytest.mark.parametrize("limit", [10_000, 25_000, 40_000, 60_000])
def test_a_file_that_cannot_grow_stops_the_job_cleanly(limit: int, convert: Convert, tmp_path: Path) -> None:
    """Files beyond ``limit`` bytes cannot be written. A really full disk: test_full_disk.py.

    10 kB is less than a block's part, 25 kB than the states, 40 kB than the plain tensors, 60 kB than the whole file.
    """
    convert()
    wanted = digest(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "wanted")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(QuantkitError, match=r"a file has grown larger than is allowed here"):
            convert()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "out").exists()
    convert(resume=(tmp_path / ".out.work").exists())
    assert digest(tmp_path / "out") == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "wanted"]
