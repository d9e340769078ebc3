"""What stands for ``layer.weight`` of a packed layer where a model's own code reads it.

Models ask a head for its dtype (mamba, xlstm), or an embedding for a row (gemma4). Dtype, shape and device cost nothing
here; numbers are dequantized when they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quantkit.runtime.kernels.reference import PackedWeight


class WeightView:
    """The weight ``[rows, in_features]`` of a packed layer, read-only.

    dtype: the one that it shows, that of activations.
    rows: those of the packed weight that are this layer's; None: all.
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype, rows: range | None = None) -> None:
        self._packed, self.dtype = packed, dtype
        self._rows = range(packed.out_features) if rows is None else rows

    @property
    def shape(self) -> torch.Size:
        """``[rows, in_features]``."""
        return torch.Size((len(self._rows), self._packed.in_features))

    @property
    def device(self) -> torch.device:
        """Where the packed weight lies."""
        return next(self._packed.buffers()).device

    def __getitem__(self, index: Any) -> Tensor:
        """Return what is asked for; of a single row only that one is dequantized. Raises IndexError as tensors do."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, int):
            row = torch.tensor([self._rows[first]], device=self.device)
            return self._packed.rows(row, self.dtype)[0][(*rest,)]
        return self._numbers()[index]

    def __iter__(self) -> Iterator[Tensor]:
        """Return the rows."""
        return iter(self._numbers())

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> Any:
        """Return anything else that a tensor has, of the dequantized numbers."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._numbers(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let torch's functions have the dequantized numbers, also in lists."""
        given, named = tree_map_only(cls, lambda view: view._numbers(), (tuple(args), dict(kwargs or {})))
        return function(*given, **named)

    def _numbers(self) -> Tensor:
        whole = self._packed.dequantize()[self._rows.start : self._rows.stop]
        return whole.to(self.dtype)
