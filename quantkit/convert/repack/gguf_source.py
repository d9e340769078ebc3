"""A GGUF file seen as quantized modules: the matrices whose blocks are codes and scales that another format holds.

The others, an embedding in Q6_K beside linears in Q4_0 for example, are read as 16-bit numbers; what that rounds is
kept for the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.gguf_files.architectures import OUTER
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.source import SeenSource, TensorInfo
from quantkit.convert.gguf.types import FLOATS
from quantkit.core.blocks import KINDS, block_kind
from quantkit.errors import RequestError
from quantkit.formats.ggml import blocks as gguf_blocks
from quantkit.formats.ggml import codes as gguf_codes
from quantkit.formats.gguf import local_name
from quantkit.formats.interface import Format

HEAD_EMBEDDINGS = tuple(name for name in OUTER.values() if not name.endswith("norm"))


class PackedGGUF(SeenSource):
    """The file as a quantized source, for one target format.

    rounded: tensors that were read as 16-bit numbers -> the error of that, relative to their size; grows as they are.
    """

    original: GGUFSource

    def __init__(self, source: GGUFSource, form: Format) -> None:
        """Choose the matrices that stay packed, from the table and from the signs of their scales.

        Head and embedding become 16-bit numbers unless the target holds both, tied or not: engines want them so.

        Raises RequestError if that is fewer than half of the blocks' matrices.
        """
        super().__init__(source)
        self.config = source.config
        self.rounded: dict[str, float] = {}
        kinds = {name.removesuffix(".weight"): source.kind(name) for name in source.names() if name.endswith(".weight")}
        plain = () if "tied" in form.head_embeddings else HEAD_EMBEDDINGS
        self._kinds = {
            module: kind
            for module, kind in kinds.items()
            if kind in gguf_codes.READ and module not in plain and self._held(module, kind, form)
        }
        linears = [m for m, kind in kinds.items() if m.startswith("model.layers.") and kind not in FLOATS]
        if not self._kinds or 2 * sum(module in self._kinds for module in linears) < len(linears):
            counted = ", ".join(f"{kind} x {n}" for kind, n in Counter(kinds.values()).most_common())
            raise RequestError(
                f"{self.path}: most of its weights have no codes that {form.name} holds ({counted}). Without --repack"
                " it is quantized anew; --dequantize writes its weights as floating-point numbers; --format native"
                " holds most kinds."
            )
        symmetric = not any(KINDS[kind].minima or self._turned(module) for module, kind in self._kinds.items())
        self._quantization = {
            "quant_method": "gguf",
            "modules": {module: {"kind": kind, "symmetric": symmetric} for module, kind in self._kinds.items()},
        }
        self._packed = {f"{module}.{local_name(kind)}": module for module, kind in self._kinds.items()}

    def _held(self, module: str, kind: str, form: Format) -> bool:
        """Tell whether the target holds a matrix as it is."""
        shape = self.original.info(f"{module}.weight").shape
        if len(shape) != 2:
            return False
        rows, columns = shape
        if form.supports(gguf_codes.scheme_of(kind, symmetric=False), rows, columns) is not None:
            return False
        return not KINDS[kind].minima or all(gguf_codes.whole_minima(part) for part in self._pieces(module, kind))

    def _turned(self, module: str) -> bool:
        return any(gguf_codes.turned(part) for part in self._pieces(module, self._kinds[module]))

    def _pieces(self, module: str, kind: str) -> Iterator[Any]:
        for part in self.original.packed_pieces(f"{module}.weight"):
            yield gguf_blocks.decode(part, block_kind(kind))

    def names(self) -> list[str]:
        left = [name for name in self.original.names() if name.removesuffix(".weight") not in self._kinds]
        return [*self._packed, *left]

    def info(self, name: str) -> TensorInfo:
        if name not in self._packed:
            return self.original.info(name)
        stored = f"{self._packed[name]}.weight"
        return TensorInfo(torch.uint8, (self.original.info(stored).shape[0], self.original.row_bytes(stored)))

    def read(self, name: str) -> Tensor:
        if name in self._packed:
            return self.original.packed(f"{self._packed[name]}.weight")
        value, error = self.original.read_as(name, self.original.info(name).dtype)
        if error:
            self.rounded[name] = error
        return value

    def quantization(self) -> dict[str, Any]:
        return self._quantization

    def notes(self) -> list[str]:
        """Return what was read as 16-bit numbers and rounded by that, by the type it is stored in."""
        by_kind: dict[str, list[str]] = {}
        for name in self.rounded:
            by_kind.setdefault(self.original.kind(name), []).append(name)
        return [
            f"{len(names)} tensor{'s' if len(names) > 1 else ''} of {kind} (first {names[0]}):"
            f" written in 16 bits, rounded by {max(self.rounded[name] for name in names):.1e} of"
            f" {'their' if len(names) > 1 else 'its'} size"
            for kind, names in by_kind.items()
        ]
