"""What stands for ``layer.weight`` of a packed layer where a model's own code reads it.

Models ask a head for its dtype (mamba, xlstm), or an embedding for a row (gemma4). Dtype, shape and device cost nothing
here; numbers are dequantized when they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.runtime.kernels.reference import PackedWeight


class WeightView:
    """The weight ``[rows, in_features]`` of a packed layer, read-only.

    dtype: the one that it shows, that of activations.
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        self._packed, self.dtype = packed, dtype

    @property
    def shape(self) -> torch.Size:
        """``[rows, in_features]``."""
        return torch.Size((self._packed.out_features, self._packed.in_features))

    @property
    def device(self) -> torch.device:
        """Where the packed weight lies."""
        return next(self._packed.buffers()).device

    def __getitem__(self, index: Any) -> Tensor:
        """Return what is asked for; of a single row only that one is dequantized."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, int):
            row = torch.tensor([first % len(self)], device=self.device)
            return self._packed.rows(row, self.dtype)[0][(*rest,)]
        return self._numbers()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """Return anything else that a tensor has, of the dequantized numbers."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._numbers(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let torch's functions have the dequantized numbers."""
        given = [each._numbers() if isinstance(each, WeightView) else each for each in args]
        named = {k: v._numbers() if isinstance(v, WeightView) else v for k, v in (kwargs or {}).items()}
        return function(*given, **named)

    def _numbers(self) -> Tensor:
        return self._packed.dequantize().to(self.dtype)
