"""One block in memory at a time, and the next one read beside the work on it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stage_models import Stored, stored
from torch import Tensor

from quantkit.convert.stages.loaded_block import NextBlock, loaded
from quantkit.errors import NumericsError
from quantkit.model.weights import Weights

CPU = torch.device("cpu")


@pytest.fixture
def tiny(tmp_path: Path) -> Stored:
    return stored(tmp_path)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was read, and in which thread."""
    seen: list[tuple[str, str]] = []
    read: Callable[..., Tensor] = Weights.raw

    def raw(self: Weights, name: str, device: torch.device | str = "cpu") -> Tensor:
        seen.append((name, threading.current_thread().name))
        return read(self, name, device)

    monkeypatch.setattr(Weights, "raw", raw)
    return seen


def test_blocks_hold_the_same_weights_whether_they_were_read_ahead_or_not(
    tiny: Stored, recorded: list[tuple[str, str]]
) -> None:
    weights, blocks = tiny.weights, tiny.blocks
    plain = []
    for index in range(len(blocks)):
        with loaded(weights, blocks, index, CPU) as block:
            plain.append({name: param.clone() for name, param in block.named_parameters()})
    recorded.clear()
    with NextBlock(weights, blocks) as ahead:
        for index in range(len(blocks)):
            with loaded(weights, blocks, index, CPU, ahead) as block:
                for name, param in block.named_parameters():
                    assert param.dtype == torch.float32
                    assert torch.equal(param, plain[index][name]), name
    assert len({name for name, _ in recorded}) == len(recorded)  # nothing is read twice
    first = f"{blocks.name(0)}."
    assert all(name.startswith(first) != thread.startswith("next-block") for name, thread in recorded)


def test_a_block_that_was_not_the_next_one_is_read_where_it_is_needed(tiny: Stored) -> None:
    weights, blocks = tiny.weights, tiny.blocks
    with NextBlock(weights, blocks) as ahead:
        for index in (1, 0, 0):
            with loaded(weights, blocks, index, CPU, ahead) as block:
                for name, param in block.named_parameters():
                    assert torch.equal(param, weights.read(f"{blocks.name(index)}.{name}")), name


def test_what_goes_wrong_while_the_next_block_is_read_is_told_when_it_is_needed(
    tiny: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, blocks = tiny.weights, tiny.blocks
    read: Callable[..., Tensor] = Weights.raw

    def raw(self: Weights, name: str, device: torch.device | str = "cpu") -> Tensor:
        if name.startswith(f"{blocks.name(1)}."):
            raise NumericsError(f"{name} holds NaN")
        return read(self, name, device)

    monkeypatch.setattr(Weights, "raw", raw)
    with NextBlock(weights, blocks) as ahead:
        with loaded(weights, blocks, 0, CPU, ahead):
            pass
        with pytest.raises(NumericsError, match="holds NaN"), loaded(weights, blocks, 1, CPU, ahead):
            pass
