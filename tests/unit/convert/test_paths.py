"""Folders and free space are checked before anything is written."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.storage.record import write_record
from quantkit.checkpoint.storage.unfinished import partial_folder
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.job_record import read_job
from quantkit.convert.plan.memory import Prediction
from quantkit.convert.plan.paths import (
    check_paths,
    check_room,
    check_work_folder,
    lacks_room,
    refuse_busy,
    resumed_note,
)
from quantkit.errors import RequestError

TOKEN = "0123abcd"
JOB: dict[str, Any] = {"token": TOKEN, "finished": None}


def asked(folder: Path, **options: Any) -> ConvertOptions:
    return ConvertOptions("model", folder / "out", **options)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The work folder of an unfinished job."""
    work = tmp_path / ".out.work"
    (work / "parts").mkdir(parents=True)
    write_record(work / "job.json", {**JOB, "identity": {"out": str(tmp_path / "out")}})
    return work


def test_a_new_folder_needs_nothing(tmp_path: Path) -> None:
    check_paths(asked(tmp_path))
    check_paths(asked(tmp_path, work_dir=tmp_path / "work"))
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_job_is_resumed_or_replaced_and_nothing_else(job: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds an unfinished job for .*out\. Add --resume .*, or --overwrite"):
        check_paths(asked(tmp_path))
    check_paths(asked(tmp_path, resume=True))
    check_paths(asked(tmp_path, overwrite=True))


def test_resume_without_a_job_says_whether_all_is_done(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no unfinished job in .*\.out\.work\. Leave --resume out"):
        check_paths(asked(tmp_path, resume=True))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "quantkit.json").write_text("{}")
    with pytest.raises(RequestError, match="is complete, nothing is left to do"):
        check_paths(asked(tmp_path, resume=True))


def test_a_job_whose_output_has_its_name_already_may_find_it_there(job: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(RequestError, match="exists already"):
        check_paths(asked(tmp_path, resume=True))
    write_record(job / "job.json", {"identity": {"out": ""}, "token": TOKEN, "finished": {}})
    check_paths(asked(tmp_path, resume=True))
    partial_folder(tmp_path / "out", TOKEN).mkdir()  # not renamed yet: the name must be free for it
    with pytest.raises(RequestError, match="exists already"):
        check_paths(asked(tmp_path, resume=True))


def test_a_damaged_record_is_named(job: Path) -> None:
    assert read_job(job) == {**JOB, "identity": {"out": str(job.parent / "out")}}
    assert read_job(job / "parts") is None
    (job / "job.json").write_text("nonsense")
    with pytest.raises(RequestError, match=r"job\.json: is damaged; this job cannot go on\. Delete"):
        read_job(job)


def test_a_folder_in_use_is_refused_and_one_that_was_let_go_is_not(job: Path) -> None:
    refuse_busy(job)  # no lock was ever there
    with (job / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="another process is working on this job now"):
            refuse_busy(job)
    refuse_busy(job)


def test_work_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    for work, words in [
        ("out", "is, holds or lies in --out"),
        ("out/work", "is, holds or lies in --out"),
        (".", "is, holds or lies in --out"),
        ("nowhere/work", "nowhere does not exist"),
        ("file", "is no folder"),
        ("mine", r"holds 'thesis\.txt', so it is no work folder"),
    ]:
        with pytest.raises(RequestError, match=words):
            check_work_folder(tmp_path / work, asked(tmp_path))
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "lock").write_text("")  # of a job that was killed before its record
    check_work_folder(tmp_path / "left", asked(tmp_path))


def test_the_note_counts_finished_blocks(job: Path) -> None:
    for name in ("block-0000.json", "block-0001.json", "block-0001.safetensors", "plain.json"):
        (job / "parts" / name).write_text("")
    assert resumed_note(job, 5) == f"--resume: {job} holds 2 of 5 blocks"


def test_room_is_counted_on_one_disk_and_what_a_stopped_job_wrote_is_free(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 92, 8))

    def need(disk: int) -> Prediction:
        return Prediction(host=0, device=0, disk=disk, work=6, output=6, phases={})

    assert check_room(asked(tmp_path), need(8)) == []  # not the sum of work and output: the peak of both
    (problem,) = check_room(asked(tmp_path), need(9000))
    assert problem.startswith(f"disk: 9 kB are needed in {tmp_path}, 0 kB are free.")
    assert "an --out on another disk" in problem
    (job / "parts" / "block-0000.safetensors").write_bytes(bytes(8000))
    partial_folder(tmp_path / "out", TOKEN).mkdir()
    (partial_folder(tmp_path / "out", TOKEN) / "model.safetensors").write_bytes(bytes(1000))
    assert check_room(asked(tmp_path, resume=True), need(9000)) == []
    assert len(check_room(asked(tmp_path), need(9000))) == 1


def test_room_just_enough_is_enough(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert lacks_room(tmp_path, free // 2, "an --out") == []
    (problem,) = lacks_room(tmp_path, 4 * free, "a --work-dir")
    assert "or choose a --work-dir on another disk" in problem
    assert lacks_room(tmp_path, 4 * free, "a --work-dir", written=4 * free) == []
