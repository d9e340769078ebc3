"""Records of the work folder: results of the sensitivity pass, ranges of the KV cache, results of blocks.

The sensitivity pass's lie in ``measured.json``, and beside it the numbers of the token-importance guides, whose
checksum is in it.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quantkit.algorithms.guide import NUMBERS as GUIDE_NUMBERS
from quantkit.algorithms.guide import Guide
from quantkit.algorithms.kv import LayerRanges, Range
from quantkit.checkpoint.storage.record import AGAIN, SHA256, Either, as_record, read_record, sync, write_record
from quantkit.checkpoint.writer import disk
from quantkit.convert.results import DISTILLED, LAYER, TUNED, BlockResult, LayerReport, Measured
from quantkit.errors import WorkFolderError

RECORD, NUMBERS = "measured.json", "guides.safetensors"
MEASURED = {
    "sensitivity": [[float]],
    "channels": [[float]],
    "guides?": [Either(None, ([str], [int]))],
    "guides_sha256?": SHA256,
}
BITS = re.compile("[0-9]{1,2}")
# shape and base64 of a float32 tensor
TENSOR = ([int], str)
RANGES = {
    "keys": {str: (TENSOR, TENSOR)},
    "values": {str: (TENSOR, TENSOR)},
    "damage": ({str: float}, {str: float}),
}
RESULT = {
    "digests": {str: str},
    "layers": [LAYER],
    "kv": {str: RANGES},
    "notes": [str],
    "folds": {str: {str: bool}},
    "tuning": {str: TUNED},
    "distilled": Either(None, DISTILLED),
}


def keep_measured(folder: Path, measured: Measured) -> None:
    """Keep the results of the sensitivity pass in the work folder.

    The record is written last: if it exists, the guides' numbers do, too.

    folder: the work folder.
    measured: the results.
    """
    record: dict[str, Any] = {
        "sensitivity": measured.sensitivity,
        "channels": [channels.tolist() for channels in measured.channels],
    }
    with disk(folder):
        if measured.guides is not None:
            record["guides"] = [None if g is None else [g.linears, g.outputs] for g in measured.guides]
            numbers = {
                f"{i}.{k}": v for i, g in enumerate(measured.guides) if g is not None for k, v in g.to_store().items()
            }
            data = save(numbers)
            (folder / NUMBERS).write_bytes(data)
            sync(folder / NUMBERS)
            record["guides_sha256"] = hashlib.sha256(data).hexdigest()
        write_record(folder / RECORD, record)


def kept_measured(folder: Path) -> Measured | None:
    """Return the results that ``keep_measured`` kept.

    None if there are none, or not all of them are intact: they are measured again then, with the same result.

    folder: the work folder.

    Raises WorkFolderError for intact ones that quantkit did not write.
    """
    record = read_record(folder / RECORD, MEASURED)
    if record is None:
        return None
    channels = [torch.tensor(stored) for stored in record["channels"]]
    if "guides" not in record:
        return Measured(record["sensitivity"], channels)
    try:
        data = (folder / NUMBERS).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != record.get("guides_sha256"):
        return None
    return Measured(record["sensitivity"], channels, _guides(record["guides"], data, folder / NUMBERS))


def _guides(described: Sequence[Any], data: bytes, path: Path) -> list[Guide | None]:
    """Restore the guides of all blocks.

    described: linears and their rows by block, None for a block without a guide.
    data: content of the file ``path``.

    Raises WorkFolderError if numbers are missing, of other shapes, or not finite.
    """
    try:
        numbers = load(data)
        guides = [
            None if of is None else Guide.restore(of[0], of[1], {k: numbers.pop(f"{i}.{k}") for k in GUIDE_NUMBERS})
            for i, of in enumerate(described)
        ]
    except (SafetensorError, KeyError) as error:
        raise WorkFolderError(f"{path}: {error}: not what {RECORD} names. {AGAIN}") from error
    if numbers or not all(guide is None or guide.is_whole() for guide in guides):
        raise WorkFolderError(f"{path}: its numbers do not fit {RECORD}, or are not finite. {AGAIN}")
    return guides


def to_record(ranges: LayerRanges) -> dict[str, Any]:
    """Return the ranges as JSON that ``from_record`` reads back, to the bit."""
    return {
        "keys": {str(bits): [_text(part) for part in by_bits] for bits, by_bits in ranges.keys.items()},
        "values": {str(bits): [_text(part) for part in by_bits] for bits, by_bits in ranges.values.items()},
        "damage": [
            {str(bits): cost for bits, cost in by_bits.items()}
            for by_bits in (ranges.key_sensitivity, ranges.value_sensitivity)
        ],
    }


def from_record(stored: Mapping[str, Any]) -> LayerRanges:
    """Read ranges back from what ``to_record`` returned.

    Raises ValueError for numbers that no calibration gives.
    """

    def side(stored_side: Mapping[str, Any]) -> dict[int, Range]:
        return {_bits(bits): (_tensor(entry[0]), _tensor(entry[1])) for bits, entry in stored_side.items()}

    sensitivity = [{_bits(bits): float(cost) for bits, cost in entry.items()} for entry in stored["damage"]]
    ranges = LayerRanges(side(stored["keys"]), side(stored["values"]), *sensitivity)
    shapes = {part.shape for side in (ranges.keys, ranges.values) for pair in side.values() for part in pair}
    if len(shapes) > 1:
        raise ValueError("the ranges of a layer differ in shape")
    return ranges


def _bits(text: str) -> int:
    if not BITS.fullmatch(text):
        raise ValueError(f"{text[:20]!r} is no number of bits")
    return int(text)


def _text(value: Tensor) -> list[Any]:
    """Return shape and base64 of a float32 tensor."""
    return [list(value.shape), base64.b64encode(value.numpy().tobytes()).decode()]


def _tensor(stored: Sequence[Any]) -> Tensor:
    data, shape = base64.b64decode(stored[1], validate=True), stored[0]
    if len(shape) != 2 or min(shape) < 1 or len(data) != 4 * math.prod(shape):
        raise ValueError(f"{len(data)} bytes are no float32 numbers of shape {shape}")
    value = torch.from_numpy(np.frombuffer(data, dtype=np.float32).copy()).reshape(shape)
    if not bool(torch.isfinite(value).all()):
        raise ValueError("a range is not finite")
    return value


def result_record(result: BlockResult) -> dict[str, Any]:
    """Return a block's result as JSON, without its tensors."""
    kv = {name: to_record(ranges) for name, ranges in result.kv.items()}
    layers = [asdict(layer) for layer in result.layers]
    return {
        "digests": result.digests,
        "layers": layers,
        "kv": kv,
        "notes": result.notes,
        "folds": result.folds,
        "tuning": result.tuning,
        "distilled": result.distilled,
    }


def restored_result(facts: dict[str, Any], path: Path) -> BlockResult:
    """Read a block's result back from what ``result_record`` returned, without tensors.

    facts: the content of the record.
    path: the record that it was read from.

    Raises WorkFolderError for a result that quantkit did not write.
    """
    as_record(facts, RESULT, path)
    try:
        kv = {name: from_record(record) for name, record in facts["kv"].items()}
    except ValueError as error:
        raise WorkFolderError(f"{path}: the ranges of the KV cache are wrong: {error}. {AGAIN}") from error
    layers = [LayerReport(**layer) for layer in facts["layers"]]
    return BlockResult(
        {}, facts["digests"], layers, kv, facts["notes"], facts["folds"], facts["tuning"], facts["distilled"]
    )
