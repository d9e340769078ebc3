"""The engines' table against the engines: each real reader loads the folders of eval/readers/matrix.toml.

Environments are made on first use (eval/readers/environments.toml), minutes and gigabytes each; QUANTKIT_READER_<NAME>
names the Python of one that exists already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script

READERS = Path(__file__).resolve().parents[2] / "eval" / "readers"
sys.path.insert(0, str(READERS))
run: Any = script(READERS / "run_readers.py")

pytestmark = [pytest.mark.interop, pytest.mark.real]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run.matrix.write(run.matrix.cases(), tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("name", list(run.readers()))
def test_a_reader_loads_what_the_table_says_and_refuses_the_rest(name: str, folders: list[Any], tmp_path: Path) -> None:
    _, rows = run.rows(name, folders, tmp_path)
    assert rows
    assert not [row for row in rows if row["verdict"]]
    assert not [row for row in rows if row["status"] == "wrong" and row["says"] is not False]


def test_what_other_tools_write_is_read_to_their_own_weights(folders: list[Any]) -> None:
    found = {folder.case.id: folder.unlike_theirs for folder in folders if folder.unlike_theirs is not None}
    assert found
    assert all(difference < 1e-3 for difference in found.values()), found
