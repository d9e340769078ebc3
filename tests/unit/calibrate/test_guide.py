"""How much a token counts: measured gradients against autograd's own, and a regression that must find a law it is shown."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quantkit.calibrate.capture import observe
from quantkit.calibrate.guide import Guide, fit_guide, listening
from quantkit.model.stepper import Call


class Gated(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(8, width)
        self.idle = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))  # type: ignore[no-any-return]


NAMES = ("up", "gate", "down", "idle")


def test_what_is_heard_are_the_gradients_of_the_outputs_squared_and_averaged_over_rows() -> None:
    torch.manual_seed(0)
    block, x, push = Gated(), torch.randn(1, 5, 6, requires_grad=True), torch.randn(1, 5, 6)
    with listening(block, NAMES, 5) as heard:
        torch.autograd.grad(block(x), x, push)
    up, gate = block.up(x), block.gate(x)
    down = block.down(up * torch.sigmoid(gate))
    wanted = torch.autograd.grad(x + down, [up, gate, down], push)
    assert set(heard) == {"up", "gate", "down"}  # what does not run is not there
    for name, gradient in zip(("up", "gate", "down"), wanted, strict=True):
        torch.testing.assert_close(heard[name], gradient[0].square().mean(-1))
    with listening(block, NAMES, 7) as other:  # another number of tokens: an expert's
        torch.autograd.grad(block(x), x, push)
    assert not other
    assert not block.up._forward_hooks


def lawful(states: Tensor) -> Tensor:
    """|g| that falls with a state's size and depends on its direction."""
    size = states.square().mean(-1).sqrt()
    return (0.7 * states[..., 0] / size - 0.9 * states[..., 3] / size - size.log()).exp()


def fitted(factor: float = 1.0, spoil: bool = False) -> tuple[Guide, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(4, 1, 500, 6, generator=generator) * torch.exp(torch.randn(4, 1, 500, 1, generator=generator))
    squares = [{name: (factor * lawful(state[0])).square() for name in ("up", "gate", "down")} for state in states]
    if spoil:
        states, squares = states.clone(), [dict(one) for one in squares]
        states[0, 0, :3] = float("nan")
        squares[1]["up"] = squares[1]["up"].clone()
        squares[1]["up"][5] = float("inf")
    guide = fit_guide(Gated(), list(states), squares)
    assert guide is not None
    return guide, torch.randn(1, 300, 6, generator=generator)


def test_a_law_that_is_linear_in_direction_and_log_size_is_found_and_told_of_other_states() -> None:
    guide, others = fitted()
    ratio = guide.weights(("up", "gate"), others) / lawful(others)[0]
    # ridge pulls towards the mean: a tenth of the way
    assert float(ratio.min()) > 0.5
    assert float(ratio.max()) < 2
    known = torch.corrcoef(torch.stack([guide.weights(("down",), others).log(), lawful(others)[0].log()]))[0, 1]
    assert float(known) > 0.99


@pytest.mark.parametrize("factor", [1e-6, 1e4])
def test_gradients_so_many_times_larger_make_weights_that_much_larger(factor: float) -> None:
    (guide, others), (scaled, _) = fitted(), fitted(factor)
    torch.testing.assert_close(
        scaled.weights(("up",), others), factor * guide.weights(("up",), others), rtol=1e-4, atol=0.0
    )


def test_tokens_that_are_not_finite_are_left_out_of_the_fit_and_count_as_average_ones() -> None:
    (guide, others), (spoiled, _) = fitted(), fitted(spoil=True)
    torch.testing.assert_close(spoiled.weights(("up",), others), guide.weights(("up",), others), rtol=0.02, atol=0.0)
    others[0, 7] = float("inf")
    weights = guide.weights(("up",), others)
    rest = torch.arange(300) != 7
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights[7], weights[rest].mean())


def test_no_token_counts_more_or_less_than_any_that_was_seen() -> None:
    guide, others = fitted()
    far = guide.weights(("up",), torch.cat([others * 1e12, others * 1e-12], 1)).double().log()
    assert bool((far <= guide.highest[guide.linears.index("up")] + 1e-5).all())
    assert bool((far >= guide.lowest[guide.linears.index("up")] - 1e-5).all())


def test_linears_that_read_one_tensor_count_by_all_their_rows() -> None:
    block, state = Gated(), torch.randn(1, 50, 6, generator=torch.Generator().manual_seed(2))
    guide = fit_guide(block, [state], [{"up": torch.full((50,), 9.0), "idle": torch.full((50,), 1.0)}])
    assert guide is not None
    assert not guide.knows(("up", "gate"))
    torch.testing.assert_close(guide.weights(("up", "idle"), state), torch.full((50,), math.sqrt((8 * 9 + 2 * 1) / 10)))


def test_without_usable_tokens_every_token_counts_the_same_and_without_linears_there_is_no_guide() -> None:
    block, state = Gated(), torch.full((1, 4, 6), float("nan"))
    guide = fit_guide(block, [state], [{"up": torch.ones(4)}])
    assert guide is not None
    assert torch.equal(guide.weights(("up",), torch.ones(1, 3, 6)), torch.ones(3))
    assert fit_guide(block, [state, state], [{"up": torch.ones(4)}, {}]) is None


def test_statistics_are_weighted_where_the_guide_knows_all_linears_that_read_them() -> None:
    torch.manual_seed(3)
    block, call = Gated(), Call((), {})
    states = [torch.randn(2, 5, 6) for _ in range(2)]
    guide = fit_guide(block, [torch.randn(1, 40, 6)], [{"up": torch.rand(40), "gate": torch.rand(40)}])
    assert guide is not None
    read, inner = observe(block, states, call, [("up", "gate"), ("down",)], guide=guide)
    x = torch.cat(states).reshape(-1, 6)
    w = guide.weights(("up", "gate"), x)
    assert float(w.std()) > 0
    torch.testing.assert_close(read.result(), ((x * w[:, None]).t() @ x / w.sum()).double(), rtol=1e-4, atol=1e-5)
    assert inner.mass is None


def test_a_guide_is_the_same_after_it_was_stored() -> None:
    guide, others = fitted()
    again = Guide.restore(guide.linears, guide.outputs, guide.to_store())
    assert torch.equal(again.weights(("up", "down"), others), guide.weights(("up", "down"), others))
