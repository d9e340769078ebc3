"""A model on disk, read lazily: one named tensor at a time.

A source answers three questions: which tensors are stored, what they look like, and one tensor's values. Nothing here
loads a whole model, and no file stays mapped after a read, so peak memory does not grow with the number of layers.
Pickle files (``.bin``, ``.pt``) are never opened: unpickling runs code from the file.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.foreign_files.config import check_claims, check_config
from quantkit.checkpoint.foreign_files.fields import read_json, shown
from quantkit.checkpoint.safetensors_header import read_header
from quantkit.checkpoint.storage.links import refuse_link_out, refuse_links_out
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.kvscheme import LARGEST_SCALE, SMALLEST_SCALE
from quantkit.core.mapped import View, map_bytes, owned
from quantkit.errors import NumericsError, SourceError

FINITE_PIECE = 1 << 18
INFINITE_BITS = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
MOST_CACHE_SCALES = 1 << 24  # bytes of one tensor
LONGEST_NAME = 255  # bytes of a file's name

# How weight files may be called. The native format has a name of its own, so that plain transformers, which only warns
# about
# a quant_method it does not know, finds no weights and stops, instead of running random ones.
STEMS = ("model", "quantkit")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a stored tensor looks like, known without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source(Protocol):
    """A model on disk. ``names`` are the Hugging Face tensor names, whatever the file calls them."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json (rebuilt from a GGUF file's metadata)."""

    def names(self) -> list[str]:
        """Stored tensor names, in file order."""

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape without reading. Raises SourceError for an unknown name."""

    def read(self, name: str) -> Tensor:
        """One tensor in memory of its own. Raises SourceError if it is missing or damaged."""

    def view(self, name: str) -> View:
        """One tensor as it lies in the file, where that can be had: what is never looked at takes no memory.

        Valid while nobody writes to the file. Elsewhere, and errors: as ``read``.
        """

    def read_entry(self, name: str, index: int) -> Tensor:
        """One entry of a tensor's first dimension (one expert of a fused tensor), without reading the others."""

    def kinds(self) -> list[str]:
        """How numbers are stored: dtypes, or the packings of a GGUF file."""

    def file_bytes(self) -> int:
        """Bytes of the files that hold the tensors."""

    def digest(self) -> str:
        """sha256 that identifies the content."""

    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config``, or None for a floating-point model."""


class SeenSource(ABC):
    """A source seen as another model: what a subclass does not change is the original's.

    A subclass says ``config``, ``names``, ``info`` and ``read``.
    """

    def __init__(self, original: Source) -> None:
        self.original, self.path = original, original.path

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return one tensor, see ``Source.read``."""

    def view(self, name: str) -> View:
        return owned(self.read(name))

    def read_entry(self, name: str, index: int) -> Tensor:
        return self.read(name)[index]

    def kinds(self) -> list[str]:
        return self.original.kinds()

    def file_bytes(self) -> int:
        return self.original.file_bytes()

    def digest(self) -> str:
        return self.original.digest()


MODELOPT = "hf_quant_config.json"  # where ModelOpt says what it did


class FolderSource:
    """A Hugging Face folder: config.json and safetensors, one file or shards with an index."""

    def __init__(self, path: Path) -> None:
        """Read config.json and the shards' headers.

        Raises SourceError for anything missing, truncated or inconsistent, and for a link that leads out of the folder.
        """
        self.path = path
        refuse_links_out(path)
        self.config: dict[str, Any] = read_json(path / "config.json")
        check_config(self.config, str(path / "config.json"))
        generation = path / "generation_config.json"
        if generation.exists():  # read when the model runs; what is wrong with it is said before any work
            check_config(read_json(generation), str(generation))
        self._files = _tensor_files(path)
        self._infos: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}  # where a tensor's bytes begin in its file
        for file in dict.fromkeys(self._files.values()):
            refuse_link_out(path, file)
            for name, entry in read_header(path / file).items():
                self._infos[name] = TensorInfo(entry.dtype, entry.shape)
                self._begins[name] = entry.begin
        missing = [name for name in self._files if name not in self._infos]
        if missing:
            raise SourceError(
                f"{path}: the index names {len(missing)} tensors that are in no shard, first {missing[0]!r} "
                f"(expected in {self._files[missing[0]]}). Download the model again."
            )
        unnamed = [name for name in self._infos if name not in self._files]
        if unnamed:  # readers that follow the index would pass them over, others would not
            raise SourceError(
                f"{path}: the shards hold {len(unnamed)} tensors that the index does not name, first {unnamed[0]!r}."
                " Index and shards do not belong together: download the model again, or take away a stale index if"
                " there is one shard."
            )
        check_claims(self.config, [info.nbytes for info in self._infos.values()], str(path))
        self._check_cache_scales()

    def _check_cache_scales(self) -> None:
        """Raise SourceError for scales of a KV cache, written for other engines, that no cache needs."""
        for name in self.names():
            if not name.endswith((".k_scale", ".v_scale")):
                continue
            if self.info(name).nbytes > MOST_CACHE_SCALES:
                raise SourceError(f"{self.path}: {name} is too large for a cache's scales. Download it again.")
            value = self.read(name).float()
            if not bool(((value >= SMALLEST_SCALE) & (value <= LARGEST_SCALE)).all()):
                raise SourceError(
                    f"{self.path}: {name} holds a scale that is not finite, not positive, or that no keys or values"
                    " need. The file is damaged: download it again."
                )

    def names(self) -> list[str]:
        return list(self._files)

    def info(self, name: str) -> TensorInfo:
        if name not in self._files:
            raise SourceError(f"{self.path}: no tensor named {name!r}")
        return self._infos[name]

    def read(self, name: str) -> Tensor:
        return self._read(name, None)

    def view(self, name: str) -> View:
        info, begin, file = self.info(name), self._begins[name], self.path / self._files[name]
        if begin % info.dtype.itemsize or not info.nbytes:  # numbers that lie across their borders are copied
            return owned(self.read(name))
        raise_if_interrupted()
        try:
            raw, forget = map_bytes(file, begin, info.nbytes)
        except OSError as error:
            raise SourceError(f"{file}: cannot read {name!r} ({error}). Download it again.") from error
        return View(raw.view(info.dtype).reshape(info.shape), forget)

    def read_entry(self, name: str, index: int) -> Tensor:
        return self._read(name, index)

    def _read(self, name: str, index: int | None) -> Tensor:
        raise_if_interrupted()
        info, begin, file = self.info(name), self._begins[name], self.path / self._files[name]
        size, shape = info.nbytes, info.shape
        if index is not None:
            size, shape = size // shape[0], shape[1:]
            begin += index * size
        if len(shape) > 1 and not size:
            raise SourceError(f"{file}: {name!r} is empty, of shape {list(shape)}. Download it again.")
        # Read, not mapped: what stays mapped keeps every touched page in this process's memory.
        try:
            raw = np.fromfile(file, dtype=np.uint8, count=size, offset=begin)
        except OSError as error:
            raise SourceError(f"{file}: cannot read {name!r} ({error}). Download it again.") from error
        if len(raw) != size:
            raise SourceError(f"{file}: cannot read {name!r} (the file became shorter). Download it again.")
        return torch.from_numpy(raw).view(info.dtype).reshape(shape)

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted(set(self._files.values())):
            with (self.path / file).open("rb") as stream:
                digest.update(_hash(stream))
        return digest.hexdigest()

    def kinds(self) -> list[str]:
        return sorted({str(info.dtype).removeprefix("torch.") for info in self._infos.values()})

    def file_bytes(self) -> int:
        return sum((self.path / file).stat().st_size for file in set(self._files.values()))

    def digest(self) -> str:
        return self._digest

    def quantization(self) -> dict[str, Any] | None:
        found = self.config.get("quantization_config")
        if found is None and (self.path / MODELOPT).is_file():
            found = {"quant_method": "modelopt", **read_json(self.path / MODELOPT)}
        if found is None and any(name.endswith(".qweight") for name in self._files):
            found = self._legacy_quantization()
        if found is None and isinstance(self.config.get("quantization"), dict):
            found = {"quant_method": "mlx", **self.config["quantization"]}
        if found is not None and not isinstance(found, dict):
            raise SourceError(f"{self.path / 'config.json'}: quantization_config is no JSON object. Download it again.")
        return found

    def _legacy_quantization(self) -> dict[str, Any] | None:
        """Read the files of AutoGPTQ and AutoAWQ from before config.json held the settings."""
        for file in ("quantize_config.json", "quant_config.json"):
            if (self.path / file).is_file():
                settings = read_json(self.path / file)
                awq = "w_bit" in settings or "zero_point" in settings
                return {"quant_method": "awq" if awq else "gptq", **settings}
        return None


def finite(value: Tensor, path: Path, name: str) -> Tensor:
    """Return ``value``, which is (a part of) tensor ``name``.

    Raises NumericsError if it holds NaN or infinite values.
    """
    if not all_finite(value):
        raise non_finite(path, [name])
    return value


def all_finite(value: Tensor) -> bool:
    """Tell whether no number is NaN or infinite, in pieces that a cache holds."""
    if value.device.type != "cpu" or not value.is_floating_point() or not value.is_contiguous():
        return bool(torch.isfinite(value).all())
    infinite = INFINITE_BITS.get(value.dtype)
    for part in value.view(-1).split(FINITE_PIECE):
        if infinite is None:
            if not bool(torch.isfinite(part).all()):
                return False
        elif int((part.view(torch.int16) & 0x7FFF).max()) >= infinite:  # without their sign; NaN lies above infinity
            return False
    return True


def non_finite(path: Path, names: list[str]) -> NumericsError:
    """Make the error to raise for tensors that hold NaN or infinite values."""
    shown = ", ".join(repr(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    words = f"tensor {shown} holds" if len(names) == 1 else f"tensors {shown} hold"
    return NumericsError(
        f"{path}: {words} NaN or infinite values. The file is damaged or the training diverged; nothing sensible can be"
        " quantized from it."
    )


def _hash(stream: Any) -> bytes:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        raise_if_interrupted()
        digest.update(block)
    return digest.digest()


def _tensor_files(path: Path) -> dict[str, str]:
    """Map tensor names to file names, by the index or by the single file's header."""
    for stem in STEMS:
        index, single = path / f"{stem}.safetensors.index.json", path / f"{stem}.safetensors"
        if index.exists():
            return _indexed(path, index)
        if single.exists():
            return dict.fromkeys(read_header(single), single.name)
    pickles = [p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise SourceError(
            f"{path}: only pickle weights ({pickles[0]}), which are never opened (unpickling runs code). "
            "Save the model as safetensors first."
        )
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    hint = f"found {shards[0]} but no model.safetensors.index.json" if shards else "no *.safetensors file"
    raise SourceError(f"{path}: no weights ({hint}). Download the model again.")


def _indexed(path: Path, index: Path) -> dict[str, str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise SourceError(f"{index}: has no weight_map. Download it again.")
    for file in sorted(set(files.values())):
        bad = any(letter in file for letter in "/\\\0") or len(file.encode()) > LONGEST_NAME
        if bad or file in ("", ".", ".."):
            raise SourceError(
                f"{index}: weight_map names {shown(file)}, which is no file of this folder. Download it again."
            )
        if not (path / file).exists():
            lost = [name for name, where in files.items() if where == file]
            raise SourceError(
                f"{path}: shard {file} is missing ({len(lost)} tensors, first {lost[0]!r}). Download it again."
            )
    return dict(files)
