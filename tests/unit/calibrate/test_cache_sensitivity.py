"""What a rounded cache does to a block: against a block whose attention can be written down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate import cache_sensitivity as room
from quantkit.calibrate.cache_sensitivity import cache_sensitivity
from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import BlockArguments


class Averages(nn.Module):
    """A token's output is itself and the mean of all values up to it; values are the hidden state, in two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.runs: list[int] = []

    def forward(self, hidden: Tensor, past_key_values: Any = None) -> Tensor:
        self.runs.append(hidden.shape[0])
        values = hidden.unflatten(-1, (2, -1)).transpose(1, 2)
        if past_key_values is not None:
            _, values = past_key_values.update(values, values, 0)
        flat = values.transpose(1, 2).flatten(-2)
        return hidden + flat.cumsum(1) / torch.arange(1, flat.shape[1] + 1)[:, None]


CALL = BlockArguments((), {"past_key_values": None})


def states(windows: int = 3, tokens: int = 100) -> list[Tensor]:
    return [torch.randn(windows, tokens, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def test_a_cache_that_gives_back_what_went_in_has_no_sensitivity() -> None:
    assert cache_sensitivity(Averages(), states(), CALL, [lambda k, v: (k, v)]) == [0.0]


def test_the_sensitivity_is_the_relative_change_of_the_newest_tokens() -> None:
    found = cache_sensitivity(Averages(), states(), CALL, [lambda k, v: (k, v + 1), lambda k, v: (k + 1, v)])
    wanted = []
    for hidden in states():
        out = Averages()(hidden)[:, -64:]
        wanted.append(8 / out.square().sum(-1))  # the mean of all values moves by 1 in each of 8 channels
    assert found == [pytest.approx(float(torch.cat(wanted).mean()), rel=1e-4), 0.0]


def test_only_so_many_tokens_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_TOKENS", 450)
    block = Averages()
    cache_sensitivity(block, states(), CALL, [lambda k, v: (k, v)])
    assert block.runs == [3, 3, 1, 1]  # 4 windows of 100, each exact and rounded
    monkeypatch.setattr(room, "MOST_TOKENS", 50)
    block = Averages()
    cache_sensitivity(block, states(), CALL, [])
    assert block.runs == [1]


def test_tokens_that_are_not_finite_are_left_out() -> None:
    bad = states()
    bad[1][2, 5] = torch.nan
    good = [bad[0], bad[1][:2]]
    change = [lambda k, v: (k, v + 1)]
    assert cache_sensitivity(Averages(), bad, CALL, change) == pytest.approx(
        cache_sensitivity(Averages(), good, CALL, change)
    )


def test_a_block_without_a_cache_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="Averages: takes no past_key_values"):
        cache_sensitivity(Averages(), states(), BlockArguments((), {}), [lambda k, v: (k, v)])
