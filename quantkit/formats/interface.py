"""What every format implements: the protocols of writing and reading, and what passes through them. Imports core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """What a format's config says about a whole model."""

    # schemes of the quantized linears, by module name
    modules: Mapping[str, Scheme]
    # linears left at 16 bit, by module name
    dense: Sequence[str] = field(default=())
    # which of ``modules`` are the head or embeddings
    head_embeddings: Sequence[str] = field(default=())
    # True if scales of an fp8 KV cache are stored, see ``Format.holds_cache_scales``
    fp8_cache: bool = False
    # what the model computes in, as config.json says it; None where nobody asked
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a format cannot hold a weight (no full stop), and what to do instead (a sentence)."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}"


class Format(Protocol):
    """A stateless codec over the local names of one linear (``weight_packed``, ``weight_scale``, ...)."""

    name: str
    summary: str
    # what the weight files are called, see checkpoint.source.STEMS
    stem: str
    # quantized weights it holds besides the blocks' linears: "head", "embedding", "tied"
    head_embeddings: tuple[str, ...]
    # True if one model has one group size
    uniform_groups: bool
    # True if engines read k_scale and v_scale of an fp8 KV cache from it
    holds_cache_scales: bool

    @staticmethod
    def supports(scheme: Scheme, out_features: int, in_features: int) -> Refusal | None:
        """Explain why this format cannot hold such a weight, and the remedy; None if it can."""

    @staticmethod
    def group_size_for(scheme: Scheme, in_features: int) -> int | None:
        """Return the group size this format uses for that width (architecture section 3)."""

    @staticmethod
    def cannot_say(layout: CheckpointLayout) -> str | None:
        """Explain why the config cannot say this of one model (with the remedy); None if it can."""

    @staticmethod
    def stored_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
        """Count the bytes of all tensors that ``encode`` makes of such a weight."""

    @staticmethod
    def encode(q: QuantTensor) -> dict[str, Tensor]:
        """Turn codes, scales and zeros into tensors by local name. Never rounds a float."""

    @staticmethod
    def decode(parts: Mapping[str, Tensor], scheme: Scheme) -> QuantTensor:
        """Undo ``encode`` exactly."""

    @staticmethod
    def config(layout: CheckpointLayout, version: str) -> dict[str, Any]:
        """Build the ``quantization_config`` that other engines read."""

    @staticmethod
    def side_files(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return other JSON files that readers open beside config.json, by name."""


class TensorHeader(Protocol):
    """Dtype and shape of a stored tensor, as a file's header tells them; a tensor has both too."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Reader(Protocol):
    """The reading half: finds its modules in a checkpoint and decodes them."""

    name: str

    @staticmethod
    def modules(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """List quantized modules and the local names that each has in the file."""

    @staticmethod
    def scheme(module: str, infos: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> Scheme | str:
        """Read one module's scheme from headers alone, or return the name of another number format."""

    @staticmethod
    def shape(infos: Mapping[str, TensorHeader], bits: int) -> tuple[int, int] | None:
        """Read ``(out_features, in_features)`` from headers; None where only a tensor's contents tell.

        Those are tensors called ``shape`` or ``weight_shape``.
        """

    @staticmethod
    def read_module(module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantTensor | BlockTensor:
        """Decode one module."""
