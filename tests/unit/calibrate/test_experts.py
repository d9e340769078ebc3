"""Experts that saw too few tokens: named, and completed with what their layer saw."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_config
from torch import Tensor, nn

from quantkit.calibrate.experts import share_statistics
from quantkit.calibrate.stats import Hessian
from quantkit.errors import NumericsError
from quantkit.model.mixture.experts import expert_groups, expert_modules
from quantkit.model.skeleton import build_skeleton, find_blocks

WIDTH = 32


def planted(tokens: list[int]) -> tuple[nn.Module, list[tuple[str, ...]], list[Hessian], list[Tensor]]:
    """A mixtral block whose experts saw these numbers of tokens, at gate and up, and at down."""
    block = find_blocks(build_skeleton(tiny_config("mixtral", intermediate_size=WIDTH))).modules[0]
    name, experts = next(iter(expert_modules(block)))
    groups, generator = expert_groups(name, experts), torch.Generator().manual_seed(0)
    rows = [torch.randn(count, WIDTH, generator=generator) for count in tokens for _ in range(2)]
    hessians = [Hessian(WIDTH) for _ in groups]
    for hessian, x in zip(hessians, rows, strict=True):
        hessian.add(x)
    return block, groups, hessians, rows


def test_an_expert_that_is_never_routed_to_gets_the_average_and_is_named() -> None:
    block, groups, hessians, rows = planted([40, 0, 50, 60])
    (starved,) = share_statistics(block, groups, hessians)
    assert starved.tokens == {1: 0}
    assert starved.describe().startswith("mlp.experts: 1 experts")
    assert starved.describe().endswith("1 (0)")
    for offset in (0, 1):  # gate and up; down
        seen = torch.cat(rows[offset::2]).double()
        torch.testing.assert_close(hessians[2 + offset].result(), seen.T @ seen / 150, rtol=1e-5, atol=1e-5)


def test_few_tokens_count_as_many_as_they_are() -> None:
    block, groups, hessians, rows = planted([40, 8, 50, 60])
    before = hessians[0].result()
    (starved,) = share_statistics(block, groups, hessians)
    assert starved.tokens == {1: 8}
    seen, own = torch.cat(rows[::2]).double(), rows[2].double()
    expected = (own.T @ own + (WIDTH - 8) * seen.T @ seen / 158) / WIDTH
    torch.testing.assert_close(hessians[2].result(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(hessians[0].result(), before)  # saw enough: its own statistic


def test_experts_with_enough_tokens_are_left_alone() -> None:
    block, groups, hessians, _ = planted([40, 32, 50, 60])
    assert share_statistics(block, groups, hessians) == []


def test_no_token_for_any_expert_is_an_error_that_names_them() -> None:
    block, groups, hessians, _ = planted([0, 0, 0, 0])
    with pytest.raises(NumericsError, match=r"mlp\.experts: no calibration token"):
        share_statistics(block, groups, hessians)
