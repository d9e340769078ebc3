"""What the tests call in a child process with limits."""

from __future__ import annotations


def opened_and_built(path: str) -> int:
    """Open a model and build its structure, as every command does first; return its number of parameters."""
    from quantkit.checkpoint.open import open_source
    from quantkit.formats.reader import QuantizedReader
    from quantkit.model.end_tokens import end_tokens
    from quantkit.model.skeleton import build_skeleton, find_blocks
    from quantkit.model.weights import Weights

    source = open_source(path)
    end_tokens(source)
    model = build_skeleton(source.config)
    find_blocks(model)
    if QuantizedReader(source).modules:
        return 0
    return len(Weights(model, source).parameters)
