"""Importance of inputs from a file of llama.cpp's, for the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from quantkit.checkpoint.gguf_files.imatrix import read_imatrix
from quantkit.checkpoint.gguf_files.out_names import Names
from quantkit.convert.gguf.names import config_of
from quantkit.errors import RequestError
from quantkit.model.weights import Weights


def weighing(path: Path, weights: Weights) -> Callable[[str], Tensor | None]:
    """Return a function that gives the mean square of a weight's inputs, float32 ``[in]``, by its checkpoint name.

    It gives None where the file has no entry, or saw no input.

    Raises SourceError for a damaged file, UnsupportedModel for a model that is not written as GGUF.
    """
    entries, names = read_imatrix(path), Names(config_of(weights.model))

    def weigh(stored: str) -> Tensor | None:
        place = names.place(f"{stored}.weight")
        entry, matrix = entries.get(place.name), place.expert or 0
        return None if entry is None or matrix >= len(entry.counts) else entry.mean(matrix)

    return weigh


def check_importance(path: Path, weights: Weights, linears: Sequence[tuple[str, int]]) -> list[str]:
    """Check that a file is of this model; return a note if it lacks some of its weights.

    linears: names in the checkpoint, with their inputs.

    Raises RequestError if it is another model's, SourceError if it is damaged.
    """
    weigh = weighing(path, weights)
    missing = []
    for stored, width in linears:
        found = weigh(stored)
        if found is None:
            missing.append(stored)
        elif len(found) != width:
            raise RequestError(
                f"--imatrix {path}: has {len(found)} inputs for {stored}, which has {width}: it is another model's."
                " Make one with `quantkit imatrix`."
            )
    if linears and len(missing) == len(linears):
        raise RequestError(
            f"--imatrix {path}: has no entry for any weight of this model. Make one with `quantkit imatrix`."
        )
    if not missing:
        return []
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return [f"the importance matrix has no entry for {missing[0]}{more}: all their inputs count alike"]
