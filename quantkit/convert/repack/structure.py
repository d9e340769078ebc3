"""The model's structure as a repack needs it: which stored matrices are embeddings, which biases have no place."""

from __future__ import annotations

from typing import Any

from torch import nn

from quantkit.errors import UnsupportedModel
from quantkit.formats.reader import QuantizedReader
from quantkit.model.naming import Naming
from quantkit.model.skeleton import build_skeleton
from quantkit.runtime.layers.build import find_modules


class Structure:
    """What the model's structure tells about the stored tensors.

    embeddings: stored matrices that are looked up, not multiplied (positions too), without ``.weight``.
    extra_biases: stored biases of quantized modules that have none in the model (AutoGPTQ wrote zeros for every layer).
    """

    def __init__(self, reader: QuantizedReader, config: dict[str, Any]) -> None:
        """Compare the stored names with the model's modules.

        reader: of the quantized source.
        config: content of its config.json.

        Raises UnsupportedModel for an unknown architecture, CheckpointError for quantized modules without a place.
        """
        source = reader.source
        model: Any = build_skeleton(config)
        plain = reader.plain_names()
        owners = {
            name: model.get_submodule(place) for name, place in find_modules(model, reader, str(source.path)).items()
        }
        biases = {f"{name}.bias" for name, owner in owners.items() if getattr(owner, "bias", None) is None}
        self.extra_biases = [name for name in plain if name in biases]
        naming, self.embeddings = Naming(model), set[str]()
        for name in plain:
            stored = name.removesuffix(".weight")
            if stored != name and len(source.info(name).shape) == 2:
                place = naming.module(stored)
                if place is not None and isinstance(model.get_submodule(place), nn.Embedding):
                    self.embeddings.add(stored)


def structure_of(reader: QuantizedReader, config: dict[str, Any]) -> Structure | str:
    """Return the structure, or why it is not known: models that quantkit cannot run are repacked too.

    reader: of the quantized source.
    config: content of its config.json.
    """
    try:
        return Structure(reader, config)
    except UnsupportedModel as error:
        return str(error)
