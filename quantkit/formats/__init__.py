"""One file is one on-disk format, a stateless encode/decode pair. Imports core.

``FORMATS`` is what convert can write; ``READERS`` maps the ``quant_method`` of a config.json to the format that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RequestError


@dataclass(frozen=True, slots=True)
class Layout:
    """What a format's config says about a whole model."""

    modules: Mapping[str, Scheme]  # quantized linears, by module name
    dense: Sequence[str] = field(default=())  # linears left at 16 bit, by module name
    outside: Sequence[str] = field(default=())  # which of ``modules`` are head or embeddings
    fp8_cache: bool = False  # True if scales of an fp8 KV cache are stored, see ``Format.holds_cache_scales``


class Format(Protocol):
    """A stateless codec over the local names of one linear (``weight_packed``, ``weight_scale``, ...)."""

    name: str
    summary: str
    stem: str  # what the weight files are called, see checkpoint.source.STEMS
    outside: tuple[str, ...]  # quantized weights it holds besides the blocks' linears: "head", "embedding", "tied"
    uniform_groups: bool  # True if one model has one group size
    holds_cache_scales: bool  # True if engines read k_scale and v_scale of an fp8 KV cache from it

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> str | None:
        """None, or why this format cannot hold such a weight (with the remedy)."""

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        """The group size this format uses for that width (architecture section 3)."""

    @staticmethod
    def cannot_say(layout: Layout) -> str | None:
        """None, or why the config cannot say this of one model (with the remedy)."""

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        """Bytes of all tensors that ``encode`` makes of such a weight."""

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        """Codes, scales and zeros -> tensors by local name. Never rounds a float."""

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        """Undo ``encode`` exactly."""

    @staticmethod
    def config(layout: Layout, version: str) -> dict[str, Any]:
        """The ``quantization_config`` that other engines read."""

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        """Other JSON files that readers open beside config.json, by name."""


class Stored(Protocol):
    """What a header tells of a tensor; a tensor has it too."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Reader(Protocol):
    """The reading half: finds its modules in a checkpoint and decodes them."""

    name: str

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """Quantized modules and the local names that each has in the file."""

    @staticmethod
    def scheme(module: str, infos: Mapping[str, Stored], config: Mapping[str, Any]) -> Scheme | str:
        """How one module is quantized, from headers alone: a scheme, or the name of another number format."""

    @staticmethod
    def shape(infos: Mapping[str, Stored], bits: int) -> tuple[int, int] | None:
        """``(out_features, in_features)`` from headers, or None where a tensor called ``shape`` or ``weight_shape`` tells."""

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor | BlockTensor:
        """Decode one module."""


def _table() -> dict[str, Any]:
    from quantkit.formats.awq import AWQ
    from quantkit.formats.bitsandbytes import BitsAndBytes
    from quantkit.formats.compressed_tensors import CompressedTensors
    from quantkit.formats.gptq import GPTQ
    from quantkit.formats.native import Native

    return {form.name: form for form in (CompressedTensors, GPTQ, AWQ, Native, BitsAndBytes)}


WRITABLE = ("compressed-tensors", "gptq", "awq", "native")
READABLE = {
    "compressed-tensors": "compressed-tensors", "gptq": "gptq", "awq": "awq", "quantkit": "native", "bitsandbytes": "bitsandbytes",
}  # fmt: skip
LATER = ("gguf", "bitsandbytes")


def writer_format(name: str) -> Format:
    """The format convert writes under ``name``. Raises RequestError for one that is unknown or has not landed."""
    if name not in WRITABLE:
        known = f"writing '{name}' has not landed yet" if name in LATER else f"no format is called '{name}'"
        raise RequestError(f"--format {name}: {known}. Formats that can be written: {', '.join(WRITABLE)}.")
    found: Format = _table()[name]
    return found


def reader_format(config: Mapping[str, Any]) -> Reader:
    """The format that reads a ``quantization_config``. Raises CheckpointError for a method that is not read."""
    method = config.get("quant_method")
    if method not in READABLE:
        raise CheckpointError(
            f"quantization_config says quant_method {method!r}, which quantkit does not read. Readable: {', '.join(READABLE)}."
        )
    found: Reader = _table()[READABLE[str(method)]]
    return found


def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """JSON files, by name, that readers of this ``quantization_config`` look for beside config.json."""
    found: Format = _table()[READABLE[str(config["quant_method"])]]
    return found.side_files(config)
