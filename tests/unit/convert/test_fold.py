"""The fold stage: what it makes of the statistics is what the scaled block's inputs would give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate.capture import observe
from quantkit.convert.results import InputGroup
from quantkit.convert.stages.fold import _FoldStep
from quantkit.model.arguments import BlockArguments
from quantkit.model.folds import Fold, find_folds
from quantkit.model.skeleton import find_blocks
from quantkit.model.stepper import input_groups, record
from quantkit.model.twin import small_twin

PLAN: Any = SimpleNamespace(targets={}, rewritten=[])  # nothing is quantized and nothing stored: no rounding anywhere


def observed(
    block: nn.Module, names: list[tuple[str, ...]], x: Tensor, y: Tensor, call: BlockArguments
) -> list[InputGroup]:
    """Statistics of the inputs when ``x`` enters the block, and ``y`` the original model's in its place."""
    found = observe(block, [x.clone()], call, names, None, [y.clone()])
    return [
        InputGroup(group, h.sum / h.tokens, h.tokens, 0, h.largest.clone(), h.cross / h.tokens)
        for group, h in zip(names, found, strict=True)
    ]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "gemma2", "opt"])
def test_statistics_scaled_by_a_fold_are_those_of_the_scaled_inputs(kind: str) -> None:
    """Every fold of the block by itself: the block is scaled, and both streams run through it again."""
    config = {"model_type": kind, **({"num_key_value_heads": 4} if kind in ("llama", "qwen2") else {})}
    twin = small_twin({**config, **({"pad_token_id": 0} if kind == "phi3" else {})}, torch.float32)
    ids = torch.randint(3, 100, (2, 33), generator=torch.Generator().manual_seed(1))
    recording = record(twin, find_blocks(twin), ids)
    block, call, x = find_blocks(twin).modules[0], recording.calls[0], recording.hidden
    y = x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) * x.std()
    names, folds = input_groups(block, x, call), find_folds(block, x, call).accepted
    assert len(folds) >= 3
    for seed, fold in enumerate(folds):
        groups = observed(block, names, x, y, call)
        factors = 0.25 + 4 * torch.rand(fold.channels, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            assert _FoldStep(PLAN, "block", block, fold).apply(factors, groups) is None
        assert any(group.names[0] in fold.consumers for group in groups)
        for mine, direct in zip(groups, observed(block, names, x, y, call), strict=True):
            for what in ("hessian", "cross", "largest"):
                found, wanted = getattr(mine, what), getattr(direct, what)
                scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-20)  # every row against its own size
                torch.testing.assert_close(
                    found / scale, wanted / scale, rtol=0, atol=2e-5, msg=f"{fold.describe()}: {what}"
                )


def test_targets_of_the_original_inputs_are_scaled_with_the_weight() -> None:
    """The targets of the scaled weight and statistics are those of the unscaled ones, times the factors.

    A target is ``W + W C H^-1``; the factors multiply its columns.
    """
    torch.manual_seed(0)
    block = nn.ModuleDict({"norm": nn.LayerNorm(6), "up": nn.Linear(6, 5)})
    x = torch.randn(50, 6, dtype=torch.float64)
    y = x + 0.3 * torch.randn(50, 6, dtype=torch.float64)
    group = InputGroup(("up",), x.t() @ x / 50, 50, cross=(y - x).t() @ x / 50)

    def target() -> Tensor:
        assert group.hessian is not None
        assert group.cross is not None
        weight = block["up"].weight.double()
        return weight + weight @ group.cross @ torch.linalg.inv(group.hessian)

    before, factors = target(), 0.25 + 4 * torch.rand(6)
    fold = Fold("norm", torch.arange(6), {"up": torch.arange(6)})
    with torch.no_grad():
        _FoldStep(PLAN, "block", block, fold).apply(factors, [group])
    torch.testing.assert_close(target(), before * factors.double(), rtol=1e-5, atol=1e-6)
