"""What was measured before the first block, in the work folder: ``measured.json``, and beside it the numbers of the guides, whose checksum is in it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from quantkit.algorithms.guide import Guide
from quantkit.checkpoint.writer import disk, read_record, sync, write_record
from quantkit.convert.probe import Measured

RECORD, NUMBERS = "measured.json", "guides.safetensors"


def keep_measured(folder: Path, found: Measured) -> None:
    """The record comes last: where it is, the numbers are."""
    record: dict[str, Any] = {"damage": found.damage, "channels": [one.tolist() for one in found.channels]}
    with disk(folder):
        if found.guides is not None:
            record["guides"] = [None if g is None else [g.linears, g.outputs] for g in found.guides]
            numbers = {
                f"{i}.{k}": v for i, g in enumerate(found.guides) if g is not None for k, v in g.to_store().items()
            }
            data = save(numbers)
            (folder / NUMBERS).write_bytes(data)
            sync(folder / NUMBERS)
            record["guides_sha256"] = hashlib.sha256(data).hexdigest()
        write_record(folder / RECORD, record)


def kept_measured(folder: Path) -> Measured | None:
    """What ``keep_measured`` kept; None if nothing did, or not all of it is whole: it is measured again then, with the same result."""
    found = read_record(folder / RECORD)
    if found is None:
        return None
    channels = [torch.tensor(one) for one in found["channels"]]
    if "guides" not in found:
        return Measured(found["damage"], channels)
    try:
        data = (folder / NUMBERS).read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != found["guides_sha256"]:
        return None
    numbers: list[dict[str, torch.Tensor]] = [{} for _ in found["guides"]]
    for name, value in load(data).items():
        index, _, kind = name.partition(".")
        numbers[int(index)][kind] = value
    guides = [
        None if of is None else Guide.restore(of[0], of[1], mine)
        for of, mine in zip(found["guides"], numbers, strict=True)
    ]
    return Measured(found["damage"], channels, guides)
