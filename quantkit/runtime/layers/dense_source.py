"""See a checkpoint stored in FP8, NVFP4 or MXFP4 as the floating-point model that it means, tensor by tensor.

For models whose original is stored so: they are quantized anew, and compared with, as a 16-bit original would be.
Weights become the config's own dtype (bfloat16 if it names none), as transformers makes them: exact for MXFP4.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.source import SeenSource, Source, TensorInfo
from quantkit.core.mapped import View, owned
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitWarning
from quantkit.formats.floats import gpt_oss
from quantkit.formats.reader import QuantizedReader
from quantkit.formats.stored_parts import STATIC

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def named_dtype(config: dict[str, Any]) -> torch.dtype:
    """Return the dtype that a config.json names, bfloat16 if it names none."""
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return DTYPES.get(named.removeprefix("torch."), torch.bfloat16)


def as_original(source: Source) -> Source:
    """Return a source whose quantized weights all are floating-point numbers as the dense model that they mean.

    Any other source is returned as it is. Raises CheckpointError for damage that headers tell.
    """
    config = source.quantization()
    if config is None:
        return source
    if config.get("quant_method") == gpt_oss.METHOD:
        return DenseSource(source, None)
    reader = QuantizedReader(source)
    schemes = [reader.scheme(name) for name in reader.modules]
    if not all(isinstance(scheme, Scheme) and scheme.number != "integer" for scheme in schemes):
        return source
    return DenseSource(source, reader)


def stored_experts(source: Source) -> Source:
    """Return gpt-oss's MXFP4 as the dense model that it means, and any other source as it is: for running it."""
    config = source.quantization()
    return as_original(source) if config is not None and config.get("quant_method") == gpt_oss.METHOD else source


def tell_of_static_activations(reader: QuantizedReader) -> None:
    """Warn if a checkpoint stores fixed scales of activations, which other engines round by: quantkit does not."""
    modules = [name for name, local in reader.modules.items() if set(STATIC) & set(local)]
    if modules:
        warnings.warn(
            f"{reader.source.path}: {len(modules)} linears (first {modules[0]}) store a fixed scale for their"
            " activations. quantkit leaves activations in floating point there: engines that round them lose more.",
            QuantkitWarning,
            stacklevel=3,
        )


class DenseSource(SeenSource):
    """A source whose packed tensors are seen as the parameters that they stand for.

    original: the source as it is stored. reader: of its quantized modules; None for gpt-oss's experts.
    dtype: of the dequantized weights; None for the config's own.
    """

    def __init__(self, original: Source, reader: QuantizedReader | None, dtype: torch.dtype | None = None) -> None:
        super().__init__(original)
        self._reader = reader
        self.config: dict[str, Any] = {k: v for k, v in original.config.items() if k != "quantization_config"}
        self.dtype = named_dtype(self.config) if dtype is None else dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        if reader is None:
            names = original.names()
            try:
                for name in gpt_oss.parameters(names):
                    parts = (original.info(f"{name}{end}").shape for end in (gpt_oss.BLOCKS, gpt_oss.SCALES))
                    self._shapes[name] = gpt_oss.dense_shape(*parts)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from error
            packed = {f"{name}{end}" for name in self._shapes for end in (gpt_oss.BLOCKS, gpt_oss.SCALES)}
            self._plain = [name for name in names if name not in packed]
        else:
            self._shapes = {f"{name}.weight": _shape(reader, name) for name in reader.modules}
            self._plain = [name for name in reader.plain_names() if name.rpartition(".")[2] not in STATIC]

    @property
    def format(self) -> str:
        """The format that it is stored in."""
        return gpt_oss.METHOD if self._reader is None else str(self._reader.format)

    def is_packed(self, name: str) -> bool:
        """Tell whether a tensor is dequantized, and not stored as it is."""
        return name in self._shapes

    def names(self) -> list[str]:
        return [*self._plain, *self._shapes]

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.dtype, self._shapes[name]) if name in self._shapes else self.original.info(name)

    def read(self, name: str) -> Tensor:
        if name not in self._shapes:
            return self.original.read(name)
        if self._reader is not None:
            return self._reader.module(name.removesuffix(".weight")).dequantize().to(self.dtype)
        return torch.stack([self.read_entry(name, index) for index in range(self._shapes[name][0])])

    def read_entry(self, name: str, index: int) -> Tensor:
        if name not in self._shapes or self._reader is not None:
            return self.original.read_entry(name, index)
        parts = (self.original.read_entry(f"{name}{end}", index) for end in (gpt_oss.BLOCKS, gpt_oss.SCALES))
        try:
            return gpt_oss.decode_expert(*parts).to(self.dtype).contiguous()
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {name}, expert {index}: {error}") from error

    def view(self, name: str) -> View:
        return owned(self.read(name)) if name in self._shapes else self.original.view(name)

    def stored_as(self) -> str:
        """Name the schemes of the stored weights, for people."""
        if self._reader is None:
            return "W4 mxfp4"
        schemes = (self._reader.scheme(name) for name in self._reader.modules)
        return ", ".join(sorted({scheme.describe() for scheme in schemes if isinstance(scheme, Scheme)}))

    def digest(self) -> str:
        return hashlib.sha256(f"{self.original.digest()} dequantized {self.dtype}".encode()).hexdigest()

    def quantization(self) -> dict[str, Any] | None:
        return None


def _shape(reader: QuantizedReader, name: str) -> tuple[int, int]:
    """Return the shape of a quantized module; of a number format that headers do not tell, by reading it."""
    return reader.shape(name) if isinstance(reader.scheme(name), Scheme) else reader.module(name).shape
