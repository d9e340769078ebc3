"""A disk that fills up in the middle of a job, for real: a small tmpfs, in a mount namespace of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("full_disk.py")
# At 4 kB the next record of a block fails, at 48 kB the states or the plain tensors, then the files
# beside, then the shard.
CASES = [("both", 4096), ("both", 49152), ("work", 4096), ("out", 4096), ("out", 49152), ("repack", 4096)]
ROOMS = range(0, 400_000, 20_000)
EVERYWHERE = [(what, room) for what in ("both", "work", "out", "repack") for room in ROOMS]


def namespace() -> list[str]:
    """The command that gives a process mounts of its own; skips the test where the system allows none."""
    tried = []
    for options in ("-m", "-Urm"):
        command = ["unshare", options]
        try:
            probe = [*command, "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/tmp"]
            done = subprocess.run(probe, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(f"a small disk needs the program unshare: {error}")
        if done.returncode == 0:
            return command
        tried.append(done.stderr.strip())
    pytest.skip(f"no tmpfs can be mounted here: {tried}")


def run(folder: Path, source: Path, text: Path, cases: list[tuple[str, int]]) -> dict[str, Any]:
    """What full_disk.py saw of each case; ``folder`` then holds what the jobs should become, too."""
    command = namespace()
    task = folder / "task.json"
    paths = {"source": source, "calibration": text, "folder": folder}
    task.write_text(json.dumps({**{name: str(path) for name, path in paths.items()}, "cases": cases}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, sys.executable, SCRIPT, task], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(folder: Path, what: str, room: int, found: dict[str, Any]) -> None:
    error, disk = found["error"], folder / f"{what}-{room}" / "small"
    if error is not None:
        assert ": the disk is full: " in error["text"]
        assert error["text"].endswith(f" are free on {disk}. Free some space there.")
        assert not any(name.endswith("/out") for name in found["left"])
        if what == "repack":
            assert found["left"] == ["small/ballast"]
            assert error["notes"] == []
        else:
            work = disk.parent / ("other" if what == "out" else "small") / "work"
            assert error["notes"] == [
                f"Finished blocks are kept in {work}: the same command with --resume goes on from there."
            ]
            early = found["too_early"]
            assert early is None or f" {disk}" in early["text"]
    assert found["second"] is None
    expected = folder / ("wanted-repack" if what == "repack" else "wanted")
    assert found["digest"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in expected.iterdir()}
    assert found["at_the_end"] == sorted(["other/out" if what == "work" else "small/out", "small/ballast"])


@pytest.fixture(scope="module")
def seen(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("disk")
    return folder, run(folder, tiny_original, calibration_text, CASES)


@pytest.mark.parametrize(("what", "room"), CASES)
def test_a_full_disk_stops_cleanly_and_the_job_goes_on_when_there_is_room(what: str, room: int, seen: Any) -> None:
    folder, found = seen
    assert found[f"{what}-{room}"]["error"] is not None
    check(folder, what, room, found[f"{what}-{room}"])


@pytest.mark.slow
def test_a_disk_may_fill_up_at_any_step(
    tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    found = run(folder, tiny_original, calibration_text, EVERYWHERE)
    errors = {
        what: {one["error"]["text"].partition(":")[0] for name, one in found.items() if what in name and one["error"]}
        for what in ("both", "work", "out", "repack")
    }
    print(errors)
    for what, room in EVERYWHERE:
        check(folder, what, room, found[f"{what}-{room}"])
    assert all(
        any(found[f"{what}-{room}"]["error"] is None for room in ROOMS) for what in errors
    )  # as much as was needed
