"""How much a token counts: measured gradients against autograd's own.

Also a regression that must find a law it is shown.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from memory_peak import least_of_three, peak_taken
from torch import Tensor, nn

from quantkit.algorithms.guide import RIDGES, Guide, _ridge, bytes_to_fit, fit_guide
from quantkit.calibrate.capture import observe
from quantkit.calibrate.gradients import listening
from quantkit.convert.job.records import NUMBERS, keep_measured, kept_measured
from quantkit.convert.results import Measured
from quantkit.model.arguments import BlockArguments


class Gated(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(8, width)
        self.idle = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))  # type: ignore[no-any-return]


def told(guide: Guide, names: tuple[str, ...], states: Tensor) -> Tensor:
    """Of one group that the guide knows."""
    (found,) = guide.weights([names], states)
    assert found is not None
    return found


NAMES = ("up", "gate", "down", "idle")
ROWS = {"up": 8, "gate": 8, "down": 6, "idle": 2}


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
    guide = fit_guide(ROWS, list(states), squares)
    assert guide is not None
    return guide, torch.randn(1, 300, 6, generator=generator)


def test_a_law_that_is_linear_in_direction_and_log_size_is_found_and_told_of_other_states() -> None:
    guide, others = fitted()
    ratio = (
        told(
            guide,
            (
                "up",
                "gate",
            ),
            others,
        )
        / lawful(others)[0]
    )
    # ridge pulls towards the mean: a tenth of the way
    assert float(ratio.min()) > 0.5
    assert float(ratio.max()) < 2
    known = torch.corrcoef(torch.stack([told(guide, ("down",), others).log(), lawful(others)[0].log()]))[0, 1]
    assert float(known) > 0.99


@pytest.mark.parametrize("factor", [1e-6, 1e4])
def test_gradients_so_many_times_larger_make_weights_that_much_larger(factor: float) -> None:
    (guide, others), (scaled, _) = fitted(), fitted(factor)
    torch.testing.assert_close(
        told(scaled, ("up",), others), factor * told(guide, ("up",), others), rtol=1e-4, atol=0.0
    )


def test_tokens_that_are_not_finite_are_left_out_of_the_fit_and_count_as_average_ones() -> None:
    (guide, others), (spoiled, _) = fitted(), fitted(spoil=True)
    torch.testing.assert_close(told(spoiled, ("up",), others), told(guide, ("up",), others), rtol=0.02, atol=0.0)
    others[0, 7] = float("inf")
    weights = told(guide, ("up",), others)
    rest = torch.arange(300) != 7
    assert bool((weights > 0).all())
    torch.testing.assert_close(weights[7], weights[rest].mean())


def test_no_token_counts_more_or_less_than_any_that_was_seen() -> None:
    guide, others = fitted()
    far = told(guide, ("up",), torch.cat([others * 1e12, others * 1e-12], 1)).double().log()
    assert bool((far <= guide.highest[guide.linears.index("up")] + 1e-5).all())
    assert bool((far >= guide.lowest[guide.linears.index("up")] - 1e-5).all())


def test_linears_that_read_one_tensor_count_by_all_their_rows() -> None:
    state = torch.randn(1, 50, 6, generator=torch.Generator().manual_seed(2))
    guide = fit_guide(ROWS, [state], [{"up": torch.full((50,), 9.0), "idle": torch.full((50,), 1.0)}])
    assert guide is not None
    assert guide.weights([("gate", "down")], state) == [None]
    torch.testing.assert_close(told(guide, ("up", "gate"), state), torch.full((50,), 3.0))  # gate: not quantized, say
    torch.testing.assert_close(told(guide.only({"idle"}), ("up", "idle"), state), torch.ones(50))
    torch.testing.assert_close(
        told(
            guide,
            (
                "up",
                "idle",
            ),
            state,
        ),
        torch.full((50,), math.sqrt((8 * 9 + 2 * 1) / 10)),
    )


def test_without_usable_tokens_or_linears_there_is_no_guide() -> None:
    state = torch.full((1, 4, 6), float("nan"))
    assert fit_guide(ROWS, [state], [{"up": torch.ones(4)}]) is None
    assert fit_guide(ROWS, [torch.ones(1, 4, 6)] * 2, [{"up": torch.ones(4)}, {}]) is None


@pytest.mark.parametrize("windows", [1, 2, 8])
def test_what_does_not_tell_of_other_tokens_is_not_believed(windows: int) -> None:
    """Gradients that have nothing to do with the states, and more features than tokens."""
    generator = torch.Generator().manual_seed(4)
    states = [torch.randn(1, 12, 64, generator=generator) for _ in range(windows)]
    squares = [
        {"up": torch.randn(12, generator=generator).exp(), "down": torch.randn(12, generator=generator).exp()}
        for _ in states
    ]
    guide = fit_guide(ROWS, states, squares)
    assert guide is not None
    for name in ("up", "down"):
        weights = told(guide, (name,), torch.cat(states, 1))
        spread = torch.cat([one[name] for one in squares]).log().std() / 2
        assert float(weights.log().std()) < 0.2 * float(spread)


@pytest.mark.parametrize("tokens", [30, 90])
def test_few_tokens_and_many_have_the_same_regression(tokens: int) -> None:
    z, y = (torch.randn(tokens, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (50, 3))
    for ridge, found in zip(RIDGES, _ridge(z, y), strict=True):
        wanted = torch.linalg.solve(z.t() @ z + ridge * tokens * torch.eye(50, dtype=torch.float64), z.t() @ y)
        torch.testing.assert_close(found, wanted)


def test_gradients_that_are_zero_but_for_rounding_do_not_bend_the_law() -> None:
    """As those of a first token's queries, whose states are all alike: short windows have many of them."""
    generator = torch.Generator().manual_seed(5)
    states = [torch.randn(1, 40, 6, generator=generator) for _ in range(12)]
    for state in states:
        state[0, 0] = torch.tensor([9.0, 0, 0, 0, 0, 0])
    squares = [{"up": lawful(state[0]).square()} for state in states]
    plain = fit_guide(ROWS, states, squares)
    for one in squares:
        one["up"][0] = 1e-22 * float(one["up"].mean())
    zeros = fit_guide(ROWS, states, squares)
    others = torch.randn(1, 300, 6, generator=generator)
    assert plain is not None
    assert zeros is not None
    assert float((zeros.highest - zeros.lowest).exp()) < 2e4  # not 1e11
    first = told(zeros, ("up",), states[0])
    assert float(first[0]) < 0.3 * float(first[1:].median())
    law = torch.corrcoef(torch.stack([told(zeros, ("up",), others).log(), lawful(others)[0].log()]))[0, 1]
    assert float(law) > 0.8


def test_the_memory_of_the_fit_is_foretold() -> None:
    hidden, tokens = 1200, 2400
    states = [torch.randn(1, tokens // 4, hidden) for _ in range(4)]
    squares = [{"up": torch.rand(tokens // 4), "down": torch.rand(tokens // 4)} for _ in states]
    foretold = bytes_to_fit(hidden, 2, tokens)

    def peak() -> int:
        taken: list[int] = []
        with peak_taken(taken):
            fit_guide(ROWS, states, squares)
        return taken[0]

    most = 1.05 * foretold + (8 << 20)
    assert 0.5 * foretold < least_of_three(peak, most) < most


def test_statistics_are_weighted_where_the_guide_knows_all_linears_that_read_them() -> None:
    torch.manual_seed(3)
    block, call = Gated(), BlockArguments((), {})
    states = [torch.randn(2, 5, 6) for _ in range(2)]
    seen = torch.randn(1, 400, 6)
    guide = fit_guide(ROWS, [seen], [{"up": lawful(seen[0]), "gate": lawful(seen[0]).square()}])
    assert guide is not None
    read, inner = observe(block, states, call, [("up", "gate"), ("down",)], guide=guide)
    x = torch.cat(states).reshape(-1, 6)
    w = told(
        guide,
        ("up", "gate"),
        x,
    )
    assert float(w.std()) > 0
    torch.testing.assert_close(read.result(), ((x * w[:, None]).t() @ x / w.sum()).double(), rtol=1e-4, atol=1e-5)
    assert inner.mass is None


def test_a_guide_is_the_same_after_it_was_stored() -> None:
    guide, others = fitted()
    again = Guide.restore(guide.linears, guide.outputs, guide.to_store())
    assert torch.equal(
        told(
            again,
            (
                "up",
                "down",
            ),
            others,
        ),
        told(
            guide,
            (
                "up",
                "down",
            ),
            others,
        ),
    )


def test_what_was_measured_is_the_same_when_it_is_read_and_none_where_it_is_damaged(tmp_path: Path) -> None:
    guide, others = fitted()
    kept = Measured([[0.5, 0.25]], [torch.ones(6)], [guide, None])
    assert kept_measured(tmp_path) is None
    keep_measured(tmp_path, kept)
    again = kept_measured(tmp_path)
    assert again is not None
    assert again.guides is not None
    assert again.guides[1] is None
    assert again.guides[0] is not None
    assert torch.equal(told(again.guides[0], ("up",), others), told(guide, ("up",), others))
    data = (tmp_path / NUMBERS).read_bytes()
    for damaged in (data[:-9], data[:-1] + bytes([data[-1] ^ 1])):
        (tmp_path / NUMBERS).write_bytes(damaged)
        assert kept_measured(tmp_path) is None
    (tmp_path / NUMBERS).unlink()
    assert kept_measured(tmp_path) is None
    keep_measured(tmp_path, Measured([], [torch.ones(6)]))
    alone = kept_measured(tmp_path)
    assert alone is not None
    assert alone.guides is None
