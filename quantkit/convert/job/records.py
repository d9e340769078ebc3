"""Records of the work folder: results of the sensitivity pass, ranges of the KV cache, results of blocks.

The sensitivity pass's lie in ``measured.json``, and beside it the numbers of the token-importance guides, whose
checksum is in it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from quantkit.algorithms.guide import Guide
from quantkit.algorithms.kv import LayerRanges, Range
from quantkit.checkpoint.writer import (
    disk,
    read_record,
    sync,
    write_record,
)
from quantkit.convert.results import BlockResult, LayerReport, Measured

RECORD, NUMBERS = "measured.json", "guides.safetensors"


def keep_measured(folder: Path, measured: Measured) -> None:
    """Keep the results of the sensitivity pass; the record is written last: where it is, the guides' numbers are."""
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
    """
    record = read_record(folder / RECORD)
    if record is None:
        return None
    channels = [torch.tensor(stored) for stored in record["channels"]]
    if "guides" not in record:
        return Measured(record["sensitivity"], channels)
    try:
        data = (folder / NUMBERS).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != record["guides_sha256"]:
        return None
    numbers: list[dict[str, torch.Tensor]] = [{} for _ in record["guides"]]
    for name, value in load(data).items():
        index, _, kind = name.partition(".")
        numbers[int(index)][kind] = value
    guides = [
        None if of is None else Guide.restore(of[0], of[1], mine)
        for of, mine in zip(record["guides"], numbers, strict=True)
    ]
    return Measured(record["sensitivity"], channels, guides)


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
    """Read ranges back from what ``to_record`` returned."""

    def side(stored_side: Mapping[str, Any]) -> dict[int, Range]:
        return {int(bits): (_tensor(entry[0]), _tensor(entry[1])) for bits, entry in stored_side.items()}

    sensitivity = [{int(bits): float(cost) for bits, cost in entry.items()} for entry in stored["damage"]]
    return LayerRanges(side(stored["keys"]), side(stored["values"]), *sensitivity)


def _text(value: Tensor) -> list[Any]:
    """Return shape and base64 of a float32 tensor."""
    return [list(value.shape), base64.b64encode(value.numpy().tobytes()).decode()]


def _tensor(stored: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(stored[1]), dtype=np.float32).copy()).reshape(stored[0])


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


def restored_result(facts: dict[str, Any]) -> BlockResult:
    """Read a block's result back from what ``result_record`` returned, without tensors."""
    kv = {name: from_record(record) for name, record in facts["kv"].items()}
    layers = [LayerReport(**layer) for layer in facts["layers"]]
    return BlockResult(
        {}, facts["digests"], layers, kv, facts["notes"], facts["folds"], facts["tuning"], facts["distilled"]
    )
