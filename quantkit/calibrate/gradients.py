"""Collect gradient sizes at a block's linears, token by token: ``algorithms.guide`` is fitted to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn


@contextlib.contextmanager
def listening(block: nn.Module, names: Sequence[str], tokens: int) -> Iterator[dict[str, Tensor]]:
    """Collect gradient sizes of linears from a forward and backward pass through ``block`` inside.

    The pass fills the dictionary that is yielded: by linear, the mean of its outputs' squared gradients, float32
    [tokens]. Linears that do not run, or on other than ``tokens`` tokens, are left out.
    """
    squares: dict[str, Tensor] = {}

    def hook(name: str, output: Tensor) -> None:
        def keep(gradient: Tensor) -> None:
            squares[name] = gradient.detach().flatten(0, -2).float().square().mean(-1)

        if output.requires_grad and output[..., 0].numel() == tokens:
            output.register_hook(keep)

    handles = [
        block.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: hook(name, output))
        for name in names
    ]
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()
