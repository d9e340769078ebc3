"""SIGKILL at seeded moments of a conversion and of a repack.

What follows gives the same bytes and leaves nothing behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quantkit

KILLER = Path(__file__).parents[1] / "integration" / "killer.py"


def killed(folder: Path, options: dict[str, Any], **how: Any) -> dict[str, Any]:
    """Kill this job at ``moments`` random moments, and ``hard`` more by the kernel's clock: see killer.py."""
    task = {"at": "", "moments": 0, "again": 0, "hard": 0, "seed": 21, **how, "folder": str(folder), "options": options}
    done = subprocess.run(
        [sys.executable, KILLER], input=json.dumps(task) + "\n", stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    print({**found, "events": len(found["events"])})
    assert found["failures"] == []
    return found


@pytest.fixture
def packed(tiny_original: Path, tmp_path: Path) -> Path:
    """A quantized model in the native format, to be repacked."""
    quantkit.convert(tiny_original, tmp_path / "packed", method="rtn", group_size=32, format="native")
    return tmp_path / "packed"


def test_a_repack_that_is_killed_is_made_anew_and_leaves_nothing(packed: Path, tmp_path: Path) -> None:
    found = killed(tmp_path / "k", {"source": str(packed)}, moments=6, again=1, hard=1)
    assert found["kills"] >= 5


@pytest.mark.slow
def test_a_hundred_kills_of_a_conversion_give_the_same_bytes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Before every change of a file, at seeded moments between them, and inside system calls."""
    options = dict(
        source=str(tiny_original), group_size=32, calibration=str(calibration_text), samples=4, seq_len=32, kv_bits=8
    )
    found = killed(tmp_path / "k", options, at="events", moments=20, again=10, hard=10)
    assert found["kills"] >= 100


@pytest.mark.slow
def test_kills_of_a_repack_at_every_change_of_a_file_give_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    found = killed(tmp_path / "k", {"source": str(packed)}, at="events", moments=20, again=8, hard=8)
    assert found["kills"] >= 30
