"""How large a checkpoint is, in bytes and in bits per weight. Read from headers and module shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantkit.checkpoint.source import Source
from quantkit.formats.kv_scales import FILE_NAME
from quantkit.formats.reader import QuantizedReader


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """The size of a checkpoint.

    checkpoint_bytes: bytes of all stored tensors. bits_per_weight: of quantized linears alone, scales and zeros
    counted; None for a model that is not quantized. model_bits_per_weight: ``8 * checkpoint_bytes / parameters`` of the
    whole model, tied ones counted once; the figure to compare with files of other tools.
    """

    checkpoint_bytes: int
    bits_per_weight: float | None
    model_bits_per_weight: float


def measure_sizes(source: Source) -> CheckpointSizes:
    """Measure a checkpoint of any format that is read. One quantized module is in memory at a time."""
    reader = QuantizedReader(source)
    stored = checkpoint_bytes(source)
    bits, weights = 0, 0
    for name in reader.modules:
        module = reader.module(name)
        bits += module.bits_stored
        weights += math.prod(module.shape)
    return CheckpointSizes(stored, bits / weights if weights else None, 8 * stored / count_parameters(source))


def checkpoint_bytes(source: Source) -> int:
    """Count the bytes of all tensors as they lie in the file, scales of the KV cache included.

    For a GGUF file these are the packed bytes, not those of what its tensors are read as.
    """
    from quantkit.checkpoint.gguf_files.source import GGUFSource

    if isinstance(source, GGUFSource):
        return sum(tensor.nbytes for tensor in source.header.tensors.values())
    scales = source.path / FILE_NAME if source.path.is_dir() else None
    beside = scales.stat().st_size if scales is not None and scales.exists() else 0
    return beside + sum(source.info(name).nbytes for name in source.names())


def count_parameters(source: Source) -> int:
    """Count the parameters of the model that the config describes; a tied head counts once."""
    from quantkit.model.skeleton import build_skeleton
    from quantkit.model.weights import tied_parameters

    model = build_skeleton(source.config)
    tied = tied_parameters(model)
    return sum(p.numel() for name, p in model.named_parameters() if name not in tied)
