"""What was measured before the first block, in the work folder: ``measured.json``, and beside it the numbers of the guides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantkit.calibrate.guide import Guide
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
            save_file(numbers, folder / NUMBERS)
            sync(folder / NUMBERS)
        write_record(folder / RECORD, record)


def kept_measured(folder: Path) -> Measured | None:
    """What ``keep_measured`` kept, or None."""
    found = read_record(folder / RECORD)
    if found is None:
        return None
    channels = [torch.tensor(one) for one in found["channels"]]
    if "guides" not in found:
        return Measured(found["damage"], channels)
    numbers: list[dict[str, torch.Tensor]] = [{} for _ in found["guides"]]
    for name, value in load_file(folder / NUMBERS).items():
        index, _, kind = name.partition(".")
        numbers[int(index)][kind] = value
    guides = [
        None if of is None else Guide.restore(of[0], of[1], mine)
        for of, mine in zip(found["guides"], numbers, strict=True)
    ]
    return Measured(found["damage"], channels, guides)
