"""QuantEmbedding: a packed embedding that dequantizes only the rows it looks up.

Its matrix may be shared with a tied head.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from quantkit.errors import UnsupportedModel
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.layers.weight_view import WeightView


class QuantEmbedding(nn.Module):
    """Takes the place of an ``nn.Embedding`` (or a subclass: Gemma scales what it looks up) in a model ready to run.

    The looked-up rows become the small weight of a copy of the original module, whose own forward then runs on their
    indices: whatever a subclass adds stays right. ``dtype`` is that of the rows.

    Raises UnsupportedModel for an embedding that renormalises its rows (``max_norm``).
    """

    def __init__(self, weight: PackedWeight, original: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        if original.max_norm is not None:
            raise UnsupportedModel("an embedding with max_norm changes its rows as it runs; it cannot be quantized.")
        self.packed, self.dtype = weight, dtype
        self.num_embeddings, self.embedding_dim = weight.out_features, weight.in_features
        self.original = original
        original._parameters.pop("weight", None)
        original.padding_idx = None  # matters to gradients only

    @property
    def weight(self) -> WeightView:
        """The matrix as a model's own code sees it."""
        return WeightView(self.packed, self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up: int64 ``[...]`` -> ``[..., embedding_dim]``."""
        view = copy.copy(self.original)  # a copy per call: two threads may look up at once
        view.__dict__["weight"] = self.packed.rows(ids.reshape(-1), self.dtype)
        looked_up: Tensor = view(torch.arange(ids.numel(), device=ids.device).view(ids.shape))
        return looked_up

    def dequantize(self) -> Tensor:
        """Return the matrix, float32 ``[num_embeddings, embedding_dim]``."""
        return self.packed.dequantize()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, layout={self.packed.layout}"
