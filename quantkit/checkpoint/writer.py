"""Write a checkpoint: one part file per step of the job, assembled into shards at the end, finished by one rename.

The folder under its final name is either absent or complete. Parts make memory independent of the model's size: only
one part is ever held. Assembly streams tensor by tensor, so the disk holds the packed model twice for a moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError, QuantkitError, RequestError

SHARD_BYTES = 5 * 10**9  # the size that hubs and loaders are used to
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One written tensor: where it lies and what it is."""

    part: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sha256: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointWriter:
    """``add_part`` as often as needed, other files into ``folder``, ``assemble``, check, ``commit``; or ``abandon``.

    Raises RequestError if ``out`` exists (unless overwrite), CheckpointError if a name is written twice,
    QuantkitError when the disk is full.
    """

    def __init__(
        self, out: Path, *, overwrite: bool = False, stem: str = "model", shard_bytes: int = SHARD_BYTES
    ) -> None:
        """stem: what the weight files are called, one of ``source.STEMS``."""
        check_output(out, overwrite)
        self.out, self.overwrite, self.stem, self.shard_bytes = out, overwrite, stem, shard_bytes
        self.entries: dict[str, Entry] = {}
        self.folder = out.parent / f".{out.name}.partial-{os.getpid()}"
        self._parts = self.folder / "parts"
        with disk(self.folder):
            self._parts.mkdir(parents=True)

    def add_part(self, part: str, tensors: dict[str, Tensor]) -> None:
        """Write some tensors to disk now. They may be freed afterwards."""
        from safetensors.torch import save_file

        twice = sorted(set(tensors) & set(self.entries))
        if twice:
            raise CheckpointError(f"{twice[0]}: written twice")
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with disk(self.folder):
            save_file(contiguous, self._parts / f"{part}.safetensors")
        for name, tensor in contiguous.items():
            self.entries[name] = Entry(part, tensor.dtype, tuple(tensor.shape), tensor_sha256(tensor))

    def assemble(self) -> None:
        """Join the parts into shards and write the index. The folder is complete then, but not yet under its final name."""
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
            shutil.rmtree(self._parts)

    def commit(self) -> None:
        """Give the folder its final name."""
        with disk(self.folder):
            old = self.out.parent / f".{self.out.name}.old-{os.getpid()}"
            if self.out.exists() and self.overwrite:
                self.out.rename(old)
            try:
                self.folder.rename(self.out)
            except BaseException:
                if old.exists():
                    old.rename(self.out)
                raise
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove everything written so far."""
        shutil.rmtree(self.folder, ignore_errors=True)

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
        """One safetensors file, streamed. Wide dtypes first, as the library orders them: every tensor stays aligned."""
        from safetensors import safe_open

        ordered = sorted(names, key=lambda n: (-self.entries[n].dtype.itemsize, n))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in ordered:
            entry = self.entries[name]
            end = offset + entry.nbytes
            header[name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in ordered:
                with safe_open(self._parts / f"{self.entries[name].part}.safetensors", framework="pt") as part:
                    stream.write(_bytes(part.get_tensor(name)))
            stream.flush()
            os.fsync(stream.fileno())


def check_output(out: Path, overwrite: bool) -> None:
    """Raises RequestError if ``out`` cannot become a new folder."""
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
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 over dtype, shape and bytes of a tensor."""
    digest = hashlib.sha256(f"{NAMES[tensor.dtype]}{list(tensor.shape)}".encode())
    digest.update(_bytes(tensor.cpu().contiguous()))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """The tensor's bytes as a buffer, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""  # type: ignore[arg-type]


class disk:  # noqa: N801  (reads as a statement)
    """Turn a full or read-only disk into one clear error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        full = isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
        if error is not None and full:
            raise QuantkitError(
                f"{self.folder.parent}: cannot write ({error}). Free some space, or choose another --out."
            ) from error
