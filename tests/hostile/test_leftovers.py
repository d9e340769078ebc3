"""What a killed process leaves beside an output: the next one removes it, or says what it is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stopping import stop_at
from written import digest

import quantkit
from quantkit.checkpoint.storage.unfinished import lock_new, partial_folder, replaced_folder, sweep
from quantkit.convert.api import plan_request
from quantkit.errors import RequestError


@pytest.fixture
def packed(tiny_original: Path, tmp_path: Path) -> Path:
    """A quantized model in the native format, to be repacked."""
    quantkit.convert(tiny_original, tmp_path / "packed", method="rtn", group_size=32, format="native")
    return tmp_path / "packed"


def killed_at_the_last_rename(source: Path, out: Path) -> None:
    """Repack over ``out`` in another process, which is killed while the name points nowhere."""
    code = (
        "import os, signal\nfrom pathlib import Path\nimport quantkit\nrename = Path.rename\n"
        "def killed(self, target):\n"
        "    if 'partial' in self.name: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rename(self, target)\n"
        "Path.rename = killed\n"
        f"quantkit.convert({str(source)!r}, out={str(out)!r}, overwrite=True)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_a_repack_killed_between_two_renames_loses_neither_model(packed: Path, tmp_path: Path) -> None:
    wanted = digest(quantkit.convert(packed, tmp_path / "wanted").out)
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    old = digest(out)
    killed_at_the_last_rename(packed, out)
    assert sorted(path.name.rpartition("-")[0] for path in tmp_path.glob(".out.*")) == [
        ".out.partial-repack",
        ".out.replaced-repack",
    ]
    assert not out.exists()
    with pytest.raises(RequestError, match="exists already"):
        quantkit.convert(packed, out)
    assert digest(out) == old  # it has its name again
    assert not list(tmp_path.glob(".out.*"))
    killed_at_the_last_rename(packed, out)
    quantkit.convert(packed, out, overwrite=True)
    assert digest(out) == wanted
    assert not list(tmp_path.glob(".out.*"))


def test_a_conversion_removes_what_a_repack_left(tiny_original: Path, tmp_path: Path) -> None:
    token, lock = lock_new(tmp_path / "out")
    (partial_folder(tmp_path / "out", token) / "parts").mkdir()
    os.close(lock)  # as the kernel does for a killed process
    quantkit.convert(tiny_original, tmp_path / "out", method="rtn", group_size=32)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    token, lock = lock_new(out)
    replaced_folder(out, token).mkdir()
    sweep(out)
    assert partial_folder(out, token).is_dir()
    assert replaced_folder(out, token).is_dir()
    os.close(lock)
    sweep(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what it was about to replace


def test_only_names_of_our_own_are_swept(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    others = [".out.partial-repack-0123abc", ".out.partial-0123abcd", ".other.partial-repack-0123abcd",
              ".out.partial-1234", ".outXpartial-repack-0123abcd", ".out.partial-repack-0123abcd.old"]  # fmt: skip
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.partial-repack-0123abcd").symlink_to(tmp_path / "victim")
    (tmp_path / ".out.replaced-repack-0123abcd").symlink_to(tmp_path / "victim")
    sweep(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*others, "victim", ".out.partial-repack-0123abcd", ".out.replaced-repack-0123abcd"]
    )


def test_folders_of_a_lost_job_are_named_in_the_plan(tiny_original: Path, tmp_path: Path) -> None:
    """Only its work folder, which may lie anywhere, tells whether it can go on: they are not removed."""
    out = tmp_path / "out"
    for kind in ("partial", "replaced"):
        (tmp_path / f".out.{kind}-0123abcd").mkdir()
    plan = plan_request(tiny_original, out, method="rtn", group_size=32)
    (note,) = [warning for warning in plan.warnings if "another job" in warning]
    assert ".out.partial-0123abcd, .out.replaced-0123abcd" in note
    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(tiny_original, out, method="rtn", group_size=32, on_progress=stop_at("verify", 3))
    shutil.rmtree(tmp_path / ".out.replaced-0123abcd")
    shutil.rmtree(tmp_path / ".out.partial-0123abcd")
    own = plan_request(tiny_original, out, method="rtn", group_size=32, resume=True)
    assert not [warning for warning in own.warnings if "another job" in warning]


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o002, 0o664, 0o775)]
)
def test_the_umask_decides_who_may_read_an_output(
    mask: int, file: int, folder: int, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    old = os.umask(mask)
    try:
        out = quantkit.convert(
            tiny_original, tmp_path / "out", method="gptq", group_size=32, calibration=str(calibration_text), samples=2,
            seq_len=32, kv_bits=8, format="native",
        ).out  # fmt: skip
        again = quantkit.convert(out, tmp_path / "again").out
    finally:
        os.umask(old)
    for root in (out, again):
        assert {path.name: path.stat().st_mode & 0o777 for path in root.iterdir()} == {
            p.name: file for p in root.iterdir()
        }
        assert root.stat().st_mode & 0o777 == folder
