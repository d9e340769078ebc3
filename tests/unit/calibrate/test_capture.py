"""One pass over a block: statistics of what its linears read, and the original model's states beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.calibrate.capture import observe
from quantkit.calibrate.stats import Hessian, InputRoot
from quantkit.model.arguments import BlockArguments
from quantkit.model.stepper import run_block


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def inner(self, x: Tensor) -> Tensor:
        return self.up(x) * torch.sigmoid(self.gate(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x))  # type: ignore[no-any-return]


def test_original_states_are_advanced_and_every_input_is_compared_with_its_own() -> None:
    torch.manual_seed(0)
    block, call = Gated(), BlockArguments((), {})
    states = [torch.randn(2, 5, 6) for _ in range(2)]
    exact = [state + 0.1 * torch.randn_like(state) for state in states]
    before, kept = [state.clone() for state in exact], [state.clone() for state in states]
    groups = [("up", "gate"), ("down",)]
    found = observe(block, states, call, groups, None, exact)
    x, y = torch.cat(states).reshape(-1, 6), torch.cat(before).reshape(-1, 6)
    with torch.no_grad():
        pairs = [(x, y), (block.inner(x), block.inner(y))]
    for h, (mine, original) in zip(found, pairs, strict=True):
        assert h.cross is not None
        torch.testing.assert_close(h.cross, ((original - mine).t() @ mine).double(), rtol=1e-4, atol=1e-5)
    for a, b in zip(exact, before, strict=True):
        assert torch.equal(a, run_block(block, b, call))
    assert all(torch.equal(a, b) for a, b in zip(states, kept, strict=True))
    plain = observe(block, states, call, groups)
    assert all(torch.equal(a.sum, b.sum) and b.cross is None for a, b in zip(found, plain, strict=True))


def test_original_states_go_on_where_nothing_is_observed() -> None:
    torch.manual_seed(1)
    block, call = Gated(), BlockArguments((), {})
    exact = [torch.randn(1, 3, 6)]
    wanted = run_block(block, exact[0], call)
    assert observe(block, [torch.zeros(1, 3, 6)], call, [], None, exact) == []
    assert torch.equal(exact[0], wanted)


def test_original_states_go_on_without_a_comparison() -> None:
    torch.manual_seed(2)
    block, call = Gated(), BlockArguments((), {})
    exact = [torch.randn(1, 3, 6)]
    wanted = run_block(block, exact[0], call)
    (found,) = observe(block, [torch.zeros(1, 3, 6)], call, [("up", "gate")], None, exact, False)
    assert found.cross is None
    assert torch.equal(exact[0], wanted)


def test_inputs_are_kept_themselves_where_they_are_few_and_nobody_reads_correlations() -> None:
    torch.manual_seed(3)
    block, call, groups = Gated(), BlockArguments((), {}), [("up", "gate"), ("down",)]
    states = [torch.randn(1, 7, 6)]  # more than the 6 inputs of up, fewer than the 8 of down
    assert [type(each) for each in observe(block, states, call, groups)] == [Hessian, Hessian]
    up, down = observe(block, states, call, groups, correlations=False)
    assert [type(up), type(down)] == [Hessian, InputRoot]
    (_, expected) = observe(block, states, call, groups)
    root = down.result()
    torch.testing.assert_close(root.t().double() @ root.double(), expected.result(), rtol=1e-5, atol=1e-6)
