"""GPT-2's ``Conv1D`` and its kin seen as ordinary linears: the same product, its weight stored as ``[in, out]``."""

from __future__ import annotations

from torch import nn

from quantkit.model.language import language_model


class TransposedLinear(nn.Linear):
    """A linear whose weight checkpoints store as ``[in_features, out_features]``. Its parameter is ``[out, in]``."""


def replace_conv1d(model: nn.Module) -> None:
    """Put a ``TransposedLinear`` (parameters on meta) in the place of every ``Conv1D`` of the language model."""
    from transformers.pytorch_utils import Conv1D

    for parent in language_model(model).modules():
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                inputs, outputs = child.weight.shape
                linear = TransposedLinear(inputs, outputs, bias=child.bias is not None, device="meta")
                setattr(parent, name, linear.requires_grad_(False))
