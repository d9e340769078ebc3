"""What the tests call in a child process with limits."""

from __future__ import annotations

from typing import Any


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


def built(config: dict[str, Any]) -> int:
    """Check a config and build its model; return the number of its modules."""
    from quantkit.checkpoint.foreign_files.config import check_config
    from quantkit.model.skeleton import build_skeleton

    check_config(config, "config.json")
    return sum(1 for _ in build_skeleton(config).modules())
