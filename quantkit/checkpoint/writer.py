"""Write a checkpoint: one part file per step of the job, assembled into shards at the end, finished by one rename.

The folder under its final name is either absent or complete. Parts make memory independent of the model's size: only
one part is ever held. Assembly streams tensor by tensor, so the disk holds the packed model twice for a moment.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.regular import require_utf8
from quantkit.checkpoint.storage.record import AGAIN, SHA256, read_record, sync, write_record
from quantkit.checkpoint.storage.removal import remove
from quantkit.checkpoint.storage.unfinished import lock_new, partial_folder, put_back, replaced_folder, sweep
from quantkit.core.host import size_text
from quantkit.core.interrupt import raise_if_interrupted, undisturbed
from quantkit.errors import CheckpointError, QuantkitError, RequestError, WorkFolderError

SHARD_BYTES = 5 * 10**9  # the size that hubs and loaders are used to
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
# the record of a part: its tensors, and what its caller keeps with them
PART = {"entries": [(str, re.compile("|".join(NAMES.values())), [int], SHA256)], "facts": dict}


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One written tensor: where it lies and what it is."""

    part: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointWriter:
    """Writes a folder: ``add_part`` as often as needed, ``assemble``, check, ``commit``; or ``abandon``.

    Other files go into ``folder`` meanwhile.

    Raises RequestError if ``out`` exists (unless overwrite), CheckpointError if a name is written twice, QuantkitError
    when the disk is full.
    """

    def __init__(
        self, out: Path, *, overwrite: bool = False, stem: str = "model", shard_bytes: int = SHARD_BYTES,
        kept: Path | None = None, token: str = "",
    ) -> None:  # fmt: skip
        """Make the folder for the parts.

        stem: what the weight files are called, one of ``source.STEMS``. kept: a folder for the parts that outlives this
        process; ``token`` then names ``folder`` and must be the same each time. ``folder`` is made by ``fresh_folder``
        then, and parts with facts can be found again by ``find_part``. Without it ``folder`` is locked, and removed by
        the next writer if this process is killed.
        """
        with disk(out.parent):
            sweep(out)
        self._lock: int | None = None
        if kept is None:
            check_output(out, overwrite)
            with disk(out.parent):
                token, self._lock = lock_new(out)
        self.out, self.overwrite, self.stem, self.shard_bytes, self.kept = out, overwrite, stem, shard_bytes, kept
        self.entries: dict[str, WrittenTensor] = {}
        self.folder, self._old = partial_folder(out, token), replaced_folder(out, token)
        self._parts = (kept or self.folder) / "parts"
        with disk(self._parts.parent):
            self._parts.mkdir(parents=True, exist_ok=kept is not None)

    def read(self, name: str) -> Tensor:
        """Read back a tensor that was written, from its part."""
        from safetensors import safe_open

        with safe_open(self._parts / f"{self.entries[name].part}.safetensors", framework="pt") as file:
            value: Tensor = file.get_tensor(name)
        return value

    def add_part(
        self, part: str, tensors: dict[str, Tensor], facts: dict[str, Any] | None = None, *, over: bool = False
    ) -> None:
        """Write some tensors to disk now; they may be freed afterwards.

        facts: a JSON object to keep with them; the part is then written durably: see ``find_part``.
        over: the tensors take the place of those that earlier parts hold under the same names.
        """
        twice = [] if over else sorted(set(tensors) & set(self.entries))
        if twice:
            raise CheckpointError(f"{twice[0]}: written twice")
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        entries = {n: WrittenTensor(part, t.dtype, tuple(t.shape), tensor_sha256(t)) for n, t in contiguous.items()}
        file = self._parts / f"{part}.safetensors"
        with disk(self._parts):
            with (file if facts is None else file.with_suffix(".new")).open("wb") as stream:
                stream.write(_header(entries))
                for name in _ordered(entries):
                    stream.write(_bytes(contiguous[name]))
            if facts is not None:
                sync(file.with_suffix(".new"))
                os.replace(file.with_suffix(".new"), file)
                stored = [[n, NAMES[e.dtype], list(e.shape), e.sha256] for n, e in entries.items()]
                write_record(self._parts / f"{part}.json", {"entries": stored, "facts": facts})
        self.entries.update(entries)

    def find_part(self, part: str) -> dict[str, Any] | None:
        """Return the facts of a part that an earlier process finished; its tensors then count as written.

        None if there is no such part or any byte of it is damaged: it has to be made again.

        Raises WorkFolderError for a whole part that quantkit did not write.
        """
        from safetensors import SafetensorError, safe_open

        path, entries = self._parts / f"{part}.json", dict[str, WrittenTensor]()
        record = read_record(path, PART)
        if record is None:
            return None
        try:
            with safe_open(path.with_suffix(".safetensors"), framework="pt") as file:
                for name, dtype, shape, sha256 in record["entries"]:
                    raise_if_interrupted()
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in NAMES:
                        raise WorkFolderError(f"{path}: {name!r} is {tensor.dtype} in its file. {AGAIN}")
                    if tensor_sha256(tensor) != sha256:
                        return None
                    entries[name] = WrittenTensor(part, tensor.dtype, tuple(tensor.shape), sha256)
                    if [NAMES[tensor.dtype], list(tensor.shape)] != [dtype, shape]:
                        raise WorkFolderError(f"{path}: {name!r} is not what its file holds. {AGAIN}")
                    if tensor.is_floating_point() and not bool(torch.isfinite(_computable(tensor)).all()):
                        raise WorkFolderError(f"{path.with_suffix('.safetensors')}: {name!r} is not finite. {AGAIN}")
        except (SafetensorError, OSError):
            return None
        self.entries.update(entries)
        facts: dict[str, Any] = record["facts"]
        return facts

    def forget(self, parts: Iterable[str]) -> None:
        """Forget parts that will be made again: their tensors no longer count as written."""
        gone = set(parts)
        self.entries = {name: entry for name, entry in self.entries.items() if entry.part not in gone}

    def fresh_folder(self) -> None:
        """Make ``folder``, empty: what an earlier process left in it is removed."""
        with disk(self.folder):
            remove(self.folder, self.out.parent)
            self.folder.mkdir()

    def assemble(self) -> None:
        """Join the parts into shards and write the index.

        The folder is complete then, but not yet under its final name.
        """
        with disk(self.folder):
            shards = self._shards()
            weight_map: dict[str, str] = {}
            for i, names in enumerate(shards, 1):
                one = len(shards) == 1
                suffix = "" if one else f"-{i:05d}-of-{len(shards):05d}"
                file = f"{self.stem}{suffix}.safetensors"
                self._assemble(self.folder / file, names)
                weight_map.update(dict.fromkeys(names, file))
            total = sum(entry.nbytes for entry in self.entries.values())
            write_json(
                self.folder / f"{self.stem}.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
            )
        self.settle()

    def settle(self) -> None:
        """Bring what lies in the folder to the disk; parts that nobody keeps are removed."""
        with disk(self.folder):
            if self.kept is None:
                remove(self._parts, self.folder)
            for path in [*self.folder.rglob("*"), self.folder]:
                sync(path)

    def commit(self) -> None:
        """Give the folder its final name. May be called again after a kill: it goes on where it stopped."""
        with disk(self.folder):
            if self.folder.exists():
                if self.out.exists():
                    check_output(self.out, self.overwrite)
                    remove(self._old, self.out.parent)
                    self.out.rename(self._old)
                try:
                    self.folder.rename(self.out)
                except BaseException:
                    if self._old.exists():
                        self._old.rename(self.out)
                    raise
                sync(self.out.parent)
            remove(self._old, self.out.parent)
        self._release()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside: write everything. Behind it the folder has its final name, or, after an error, is gone."""
        try:
            yield
            self.commit()
        except BaseException:
            with undisturbed():  # by a second Ctrl-C
                self.abandon()
            raise

    def abandon(self) -> None:
        """Remove everything written so far; a model that was about to be replaced is put back."""
        put_back(self.out, self._old)
        # what went wrong is being told already; what cannot be removed now is left to the next writer
        with contextlib.suppress(OSError):
            remove(self.folder, self.out.parent)
        with contextlib.suppress(OSError):
            remove(self._parts, self.kept or self.folder)
        self._release()

    def _release(self) -> None:
        """Give up the lock on ``folder``."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _shards(self) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        size = 0
        for name, entry in self.entries.items():
            if size and size + entry.nbytes > self.shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += entry.nbytes
        return shards

    def _assemble(self, file: Path, names: list[str]) -> None:
        """Write one safetensors file, streamed."""
        from safetensors import safe_open

        entries = {name: self.entries[name] for name in names}
        with file.open("wb") as stream:
            stream.write(_header(entries))
            # Neighbours mostly lie in one part, whose header takes longer to read than a small tensor. One is open at a
            # time: what
            # was read of it stays in memory until it is closed.
            for part, group in groupby(_ordered(entries), lambda name: entries[name].part):
                with safe_open(self._parts / f"{part}.safetensors", framework="pt") as opened:
                    for name in group:
                        raise_if_interrupted()
                        stream.write(_bytes(opened.get_tensor(name)))
            stream.flush()
            os.fsync(stream.fileno())


def _ordered(entries: Mapping[str, WrittenTensor]) -> list[str]:
    """Sort the tensors of one file: wide dtypes first, as the library orders them, so that every one is aligned."""
    return sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))


def _header(entries: Mapping[str, WrittenTensor]) -> bytes:
    """Return what a safetensors file of these tensors begins with: the library's own writer copies every byte first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in _ordered(entries):
        entry = entries[name]
        end = offset + entry.nbytes
        header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_output(out: Path, overwrite: bool) -> None:
    """Raise RequestError if ``out`` cannot become a new folder."""
    require_utf8(out)
    if out.is_symlink():
        raise RequestError(f"{out}: is a symbolic link. Give the folder itself as --out.")
    if out.exists() and not overwrite:
        raise RequestError(f"{out}: exists already. Choose another --out, or pass --overwrite to replace it.")
    if out.exists() and not (
        (out.is_dir() and (out / "config.json").exists()) or (out.is_dir() and not any(out.iterdir()))
    ):
        raise RequestError(f"{out}: is no model folder, so --overwrite will not delete it. Choose another --out.")
    if not out.parent.is_dir():
        raise RequestError(f"{out}: the folder {out.parent} does not exist. Create it, or choose another --out.")


def write_json(path: Path, data: object) -> None:
    """Write JSON for people: indented, UTF-8."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tensor_sha256(tensor: Tensor) -> str:
    """Return the sha256 over dtype, shape and bytes of a tensor."""
    digest = hashlib.sha256(f"{NAMES[tensor.dtype]}{list(tensor.shape)}".encode())
    digest.update(_bytes(tensor.cpu().contiguous()))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """Return the tensor's bytes as a buffer, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""  # type: ignore[arg-type]


class disk:  # noqa: N801  (reads as a statement)
    """Turn a full, read-only or failing disk into one clear error: which disk, how much is free, what to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        number = _system_error(error)
        if number is not None:
            raise QuantkitError(_cannot_write(self.folder, number, error)) from error


def _system_error(error: BaseException | None) -> int | None:
    """Return the system's error number; 0 if it is not known; None if the system is not what failed.

    The libraries that write for us raise errors of their own, with the number in the text.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    if found:
        return int(found[1])
    return 0 if type(error).__name__ == "SafetensorError" else None


def _cannot_write(folder: Path, number: int, error: BaseException | None) -> str:
    place = _existing(folder)
    if number in (errno.ENOSPC, errno.EDQUOT):
        what = "the quota of this disk is used up" if number == errno.EDQUOT else "the disk is full"
        free, mount = shutil.disk_usage(place).free, _mount(place)
        return f"{folder}: {what}: {size_text(free)} are free on {mount}. Free some space there."
    if number == errno.EFBIG:
        return (
            f"{folder}: a file has grown larger than is allowed here. Raise the limit (ulimit -f), or use another disk."
        )
    reason = os.strerror(number) if number else str(error)
    return f"{folder}: cannot write ({reason}). Make it writable, or use a folder on another disk."


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _mount(path: Path) -> Path:
    """Return the root of the file system that holds ``path``: what `df` calls "mounted on"."""
    path = path.resolve()
    device = path.stat().st_dev
    return [p for p in (path, *path.parents) if p.stat().st_dev == device][-1]


def _computable(tensor: Tensor) -> Tensor:
    """Return floats of 8 bits, with which torch does not compute, as float32; others as they are."""
    return tensor.float() if tensor.element_size() == 1 else tensor
