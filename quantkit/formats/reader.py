"""See a checkpoint as quantized modules plus plain tensors, whatever its format."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.core.mapped import View
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RequestError
from quantkit.formats import labelled, reader_format
from quantkit.formats.common import signed_scales
from quantkit.formats.interface import Reader, TensorHeader
from quantkit.formats.stored_parts import check_layouts, check_values

CACHE_SCALES = (".k_scale", ".v_scale")


class Readable(Protocol):
    """What the reader needs of a source."""

    path: Path

    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorHeader: ...
    def read(self, name: str) -> Tensor: ...
    def view(self, name: str) -> View: ...
    def quantization(self) -> dict[str, Any] | None: ...


@contextlib.contextmanager
def _damaged(where: str) -> Iterator[None]:
    """Blame whatever a codec stumbles over on the file or its config; the message says where."""
    try:
        yield
    except (CheckpointError, RequestError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, re.error,
    ) as error:  # fmt: skip
        raise CheckpointError(f"{where}: damaged or incomplete ({error!r}). Download or convert it again.") from error


class QuantizedReader:
    """View of a source. ``modules`` maps each quantized module to the local names of its tensors ({} for fp models).

    Raises CheckpointError if a tensor of a quantized module is missing.
    """

    def __init__(self, source: Readable, form: Reader | None = None) -> None:
        """Find the modules. form: the format that reads them, where the source's config names none of the readable."""
        self.source = source
        self.config = source.quantization()
        self._format: Reader | None = None
        self.modules: dict[str, tuple[str, ...]] = {}
        if self.config is not None:
            if form is None:
                with _damaged(str(source.path)):
                    self.config = labelled(self.config)
                    form = reader_format(self.config)
            self._format = form
            with _damaged(f"{source.path}: quantization_config"):
                self.modules = self._format.modules(source.names(), self.config)
            stored = set(source.names())
            for module, local in self.modules.items():
                lost = [part for part in local if f"{module}.{part}" not in stored]
                if lost:
                    raise CheckpointError(
                        f"{source.path}: {module} lacks its tensor {lost[0]!r}. The checkpoint is incomplete."
                    )
            self._refuse_lone_codes()
            if not self.modules:
                raise CheckpointError(f"{source.path}: config.json says quantized, but no quantized tensor is stored.")

    def _refuse_lone_codes(self) -> None:
        """Refuse FP8 numbers that belong to no quantized module: what they mean is lost with their scale."""
        for name in self.plain_names():
            if self.source.info(name).dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                raise CheckpointError(
                    f"{self.source.path}: {name} is stored in FP8, but its scale is missing. The checkpoint is"
                    " incomplete."
                )

    @property
    def format(self) -> str | None:
        """The name of the format, as ``--format`` says it; None for a floating-point model."""
        return None if self._format is None else self._format.name

    def scheme(self, name: str) -> Scheme | str:
        """Read one module's scheme from headers alone, or return the name of another number format.

        Raises CheckpointError, naming the module, if config and tensors do not fit.
        """
        if self._format is None or self.config is None:
            raise CheckpointError(f"{self.source.path}: not a quantized checkpoint")
        infos = {part: self.source.info(f"{name}.{part}") for part in self.modules[name]}
        with _damaged(f"{self.source.path}: {name}"):
            check_layouts(infos)
            return self._format.scheme(name, infos, self.config)

    def shape(self, name: str) -> tuple[int, int]:
        """Read ``(out_features, in_features)`` of a module with a scheme, without its codes. Raises CheckpointError."""
        scheme = self.scheme(name)
        assert self._format is not None
        assert isinstance(scheme, Scheme)
        with _damaged(f"{self.source.path}: {name}"):
            sizes = self._format.shape(
                {part: self.source.info(f"{name}.{part}") for part in self.modules[name]}, scheme.bits
            )
            if sizes is None:
                stored = next(part for part in self.modules[name] if part in ("shape", "weight_shape"))
                out_features, in_features = (int(n) for n in self.source.read(f"{name}.{stored}"))
                sizes = out_features, in_features
        return sizes

    def module(self, name: str, *, view: bool = False) -> QuantTensor | BlockTensor:
        """Decode one quantized module.

        name: of the module. view: its tensors may be those of the mapped file.

        Raises CheckpointError, naming the module, if its tensors do not fit.
        """
        if self._format is None or self.config is None:
            raise CheckpointError(f"{self.source.path}: not a quantized checkpoint")
        source = self.source
        stored = {part: f"{name}.{part}" for part in self.modules[name]}
        parts = {part: source.view(full).value if view else source.read(full) for part, full in stored.items()}
        with _damaged(f"{self.source.path}: {name}"):
            check_layouts(parts)
            check_values(parts, signed=self.format == "gptq" and signed_scales(self.config))
            return self._format.read_module(name, parts, self.config)

    def plain_names(self) -> list[str]:
        """List the tensors that are no part of a quantized module, and no scales of an fp8 cache."""
        packed = {f"{module}.{part}" for module, local in self.modules.items() for part in local}
        packed |= set(self.cache_names())
        return [name for name in self.source.names() if name not in packed]

    def cache_names(self) -> list[str]:
        """List the scales of an fp8 KV cache, if the config speaks of one.

        They are for other engines; quantkit_kv.safetensors has them too.
        """
        if not (self.config or {}).get("kv_cache_scheme") and str(self.format) not in ("fp8", "modelopt"):
            return []  # the two of them store such scales without a word in the config that is always the same
        return [name for name in self.source.names() if name.endswith(CACHE_SCALES)]

    def read(self, name: str) -> Tensor:
        """Read a plain tensor."""
        return self.source.read(name)
