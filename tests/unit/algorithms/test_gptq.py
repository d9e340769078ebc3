"""GPTQ against rounding, against enumeration, and on ill-behaved Hessians."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkit.algorithms import gptq as gptq_module
from quantkit.algorithms.gptq import GPTQOptions, gptq, proxy_loss
from quantkit.algorithms.rtn import rtn
from quantkit.core import affine
from quantkit.core.scheme import Scheme


def problem(rows: int, cols: int, seed: int, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=g) @ (torch.eye(cols) + 0.3 * torch.randn(cols, cols, generator=g))
    return torch.randn(rows, cols, generator=g), (x.t() @ x).double() / tokens


@settings(max_examples=25, deadline=None)
@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([None, 16, 24, 64]),
    symmetric=st.booleans(),
    scales=st.sampled_from(["search", "minmax"]),
    seed=st.integers(0, 99),
)
def test_the_loop_alone_beats_rounding_when_inputs_are_correlated_and_refining_loses_nothing_of_it(
    bits: int, group: int | None, symmetric: bool, scales: str, seed: int
) -> None:
    """Without sweeps no row is exchanged for a rounded one: a loop that does harm would show.

    It takes a half to two thirds of rounding's loss on such problems.
    """
    w, h = problem(24, 64, seed)
    scheme = Scheme(bits, group, symmetric)
    loop, refined = (gptq(w, h, scheme, GPTQOptions(scales=scales, sweeps=n)).quantized for n in (0, 2))
    rounded = rtn(w, scheme, scales, h.diagonal()).quantized  # type: ignore[arg-type]
    losses = [proxy_loss(w, found.dequantize(), h)[0] for found in (rounded, loop, refined)]
    assert losses[1] < 0.8 * losses[0]
    assert losses[2] <= losses[1] * 1.0001


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([3, 4, 8]),
    group=st.sampled_from([None, 16]),
    symmetric=st.booleans(),
    channels=st.sampled_from([0, 3]),
    outliers=st.sampled_from([0.0, 0.03]),
    seed=st.integers(0, 999),
)
@example(bits=3, group=None, symmetric=True, channels=0, outliers=0.03, seed=3)
def test_no_row_is_worse_than_rounding_when_channels_dominate_or_weights_lie_outside(
    bits: int, group: int | None, symmetric: bool, channels: int, outliers: float, seed: int
) -> None:
    """Fewer tokens than channels; a few channels fifty times as large as the others, a few weights eight times."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 32, generator=g)
    x[:, torch.randperm(32, generator=g)[:channels]] *= 50
    w, h = torch.randn(16, 32, generator=g), (x.t() @ x).double() / 24
    w[torch.rand(w.shape, generator=g) < outliers] *= 8
    scheme = Scheme(bits, group, symmetric)
    solved = gptq(w, h, scheme).quantized.dequantize()
    rounded = rtn(w, scheme, GPTQOptions().scales, h.diagonal()).quantized.dequantize()
    losses = [((w - found).double() @ h * (w - found)).sum(1) for found in (solved, rounded)]
    assert bool((losses[0] <= losses[1] * 1.001 + 1e-9).all())


def test_gptq_rounds_to_nearest_when_inputs_are_uncorrelated() -> None:
    w, _ = problem(8, 32, 0)
    scheme = Scheme(4, 16, symmetric=False)
    h = torch.diag(torch.linspace(1, 2, 32).double())
    q = gptq(w, h, scheme, GPTQOptions(sweeps=0)).quantized
    assert torch.equal(q.codes, affine.quantize(w, q.scales, q.zeros, scheme))


def test_gptq_stays_close_to_the_best_of_all_roundings() -> None:
    """Oracle: every choice of codes for one row of four inputs at 2 bits, scales fixed."""
    ratios = []
    for seed in range(30):
        w, h = problem(1, 4, seed, tokens=50)
        scheme = Scheme(2, None, symmetric=False)
        q = gptq(w, h, scheme, GPTQOptions(scales="minmax", damping=1e-6)).quantized
        step, zero = q.scales.float(), q.zeros.float()  # type: ignore[union-attr]
        every = torch.tensor(list(itertools.product(range(4), repeat=4)))
        delta = (w - (every - zero) * step).double()
        best = float(((delta @ h) * delta).sum(1).min())
        loss = proxy_loss(w, q.dequantize(), h)[0]
        rounded = proxy_loss(w, rtn(w, scheme, "minmax").quantized.dequantize(), h)[0]
        assert loss >= best * (1 - 1e-6)
        ratios.append((loss / best, rounded / best))
    found, plain = (sum(r[i] for r in ratios) / len(ratios) for i in (0, 1))
    assert found < 1.25
    assert found < plain


def test_error_of_a_column_is_propagated_once() -> None:
    """Textbook recursion, column by column with explicit inverses: after each column the rest moves by the exact
    least-squares compensation. The blocked solver must give the same codes."""
    w, h = problem(5, 12, 7)
    scheme = Scheme(3, 4, symmetric=False)
    options = GPTQOptions(scales="minmax", act_order=False, damping=0.01, block=3, sweeps=0)
    scales, zeros = affine.minmax_params(w, scheme)
    assert zeros is not None
    step, offset = affine.expand_groups(scales.float(), 12, scheme), affine.expand_groups(zeros.float(), 12, scheme)
    rest, damped = w.double().clone(), h + torch.eye(12).double() * 0.01 * h.diagonal().mean()
    expected = torch.empty(5, 12)
    for j in range(12):
        expected[:, j] = torch.round(rest[:, j].float() / step[:, j] + offset[:, j]).clamp(0, 7)
        error = rest[:, j] - ((expected[:, j] - offset[:, j]) * step[:, j]).double()
        if j < 11:  # minimise over the remaining columns: delta_rest = error * H[j, rest] H[rest, rest]^-1
            move = torch.linalg.solve(damped[j + 1 :, j + 1 :], damped[j + 1 :, j])
            rest[:, j + 1 :] += error[:, None] * move[None]
    assert torch.equal(gptq(w, h, scheme, options).quantized.codes, expected.to(torch.uint8))


def test_stacked_siblings_are_solved_as_if_alone() -> None:
    w, h = problem(20, 48, 1)
    scheme = Scheme(4, 16, symmetric=False)
    whole = gptq(w, h, scheme).quantized
    parts = [gptq(part, h, scheme).quantized for part in w.split([5, 15])]
    assert torch.equal(whole.codes, torch.cat([p.codes for p in parts]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scales", ["search", "minmax"])
@pytest.mark.parametrize("seed", range(3))
def test_permuting_outputs_permutes_codes_scales_and_zeros(symmetric: bool, scales: str, seed: int) -> None:
    w, h = problem(16, 40, seed)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
    scheme, options = Scheme(4, 32, symmetric), GPTQOptions(scales=scales)  # type: ignore[arg-type]
    mine, other = (gptq(one, h, scheme, options).quantized for one in (w[order], w))
    assert torch.equal(mine.codes, other.codes[order])
    assert torch.equal(mine.scales, other.scales[order])
    assert symmetric or torch.equal(mine.zeros, other.zeros[order])  # type: ignore[arg-type, index]


def test_inputs_are_not_modified() -> None:
    w, h = problem(6, 20, 3)
    w0, h0 = w.clone(), h.clone()
    gptq(w, h, Scheme(4, 8))
    assert torch.equal(w, w0)
    assert torch.equal(h, h0)


def test_dead_inputs_are_rounded_and_disturb_nothing() -> None:
    w, h = problem(6, 24, 4)
    h[[3, 9]] = 0
    h[:, [3, 9]] = 0
    scheme = Scheme(4, 8, symmetric=False)
    solution = gptq(w, h, scheme)
    q = solution.quantized
    assert solution.fallback is None
    assert torch.equal(q.codes[:, [3, 9]], affine.quantize(w, q.scales, q.zeros, scheme)[:, [3, 9]])


def test_all_inputs_dead_is_plain_rounding() -> None:
    w, _ = problem(6, 24, 5)
    scheme = Scheme(4, 8, symmetric=False)
    q = gptq(w, torch.zeros(24, 24), scheme, GPTQOptions(sweeps=0)).quantized
    assert torch.equal(q.codes, affine.quantize(w, q.scales, q.zeros, scheme))
    refined, plain = gptq(w, torch.zeros(24, 24), scheme).quantized, rtn(w, scheme, "search").quantized
    assert float((refined.dequantize() - w).norm()) <= float((plain.dequantize() - w).norm())


def test_damping_escalates_until_the_hessian_factorises() -> None:
    w, h = problem(4, 10, 6)
    h = h - torch.eye(10).double() * (torch.linalg.eigvalsh(h)[0] + 0.03 * h.diagonal().mean())  # slightly indefinite
    solution = gptq(w, h, Scheme(4, 10))
    assert solution.fallback is None
    assert solution.damping in GPTQOptions().escalation


def test_a_hopeless_hessian_falls_back_to_rounding_and_says_so() -> None:
    w, _ = problem(4, 10, 6)
    h = torch.full((10, 10), 5.0).double() - 4 * torch.eye(10).double()
    h[0, 1] = h[1, 0] = 100.0
    solution = gptq(w, h, Scheme(4, 5))
    assert solution.fallback is not None
    assert "could not be factorised" in solution.fallback
    assert solution.quantized.equal(rtn(w, Scheme(4, 5), "search", h.diagonal()).quantized)


@pytest.mark.parametrize("block", [1, 7, 32, 500])
def test_block_size_changes_speed_only(block: int) -> None:
    w, h = problem(6, 70, 8)
    scheme = Scheme(4, 16, symmetric=False)
    a = gptq(w, h, scheme, GPTQOptions(block=block)).quantized
    b = gptq(w, h, scheme).quantized
    assert (a.codes != b.codes).float().mean() < 0.01  # a tie may fall either way in float32


def test_scale_of_a_group_is_chosen_for_the_weights_as_they_stand_when_it_is_reached() -> None:
    """The second of two groups must find a range that fits what the first group's errors left of it.

    The range that its own weights had does not.
    """
    w, h = problem(64, 32, 8)
    scheme = Scheme(2, 16, symmetric=False)
    options = GPTQOptions(sweeps=0, act_order=False)
    q = gptq(w, h, scheme, options).quantized
    damped = h + torch.eye(32).double() * options.damping * h.diagonal().mean()
    error = w[:, :16].double() - q.dequantize()[:, :16].double()
    moved = w[:, 16:].double() + error @ torch.linalg.solve(damped[16:, 16:], damped[16:, :16]).t()
    own = Scheme(2, None, symmetric=False)
    cost = torch.linalg.cholesky(torch.linalg.inv(damped[16:, 16:]), upper=True).diagonal() ** -2
    scale, zero = affine.searched_params(moved.float(), own, cost.float(), steps=12)
    assert zero is not None
    assert q.zeros is not None
    assert torch.equal(q.zeros[:, 1:], zero)
    torch.testing.assert_close(q.scales[:, 1:], scale, rtol=2e-3, atol=0)
    assert not torch.equal(q.scales[:, 1:], affine.searched_params(w[:, 16:], own, cost.float(), steps=12)[0])


def paired(rows: int, cols: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, the original model's inputs and those of the quantized one, ``[tokens, cols]``.

    Some of a direction is lost.
    """
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(600, cols, generator=g) @ (torch.eye(cols) + 0.3 * torch.randn(cols, cols, generator=g))
    x = y + 0.15 * torch.randn(600, cols, generator=g) - 0.2 * y.mean(1, keepdim=True)
    return torch.randn(rows, cols, generator=g), y.double(), x.double()


def test_with_the_original_inputs_outputs_come_closer_to_the_original_model() -> None:
    for seed in range(5):
        w, y, x = paired(24, 48, seed)
        h, cross = x.t() @ x / len(x), (y - x).t() @ x / len(x)
        lost = []
        for pull in (0.0, 0.25, 1.0):
            q = gptq(w, h, Scheme(4, 16, symmetric=False), GPTQOptions(pull=pull), cross=cross).quantized
            lost.append(float((y @ w.double().t() - x @ q.dequantize().double().t()).norm()))
        assert lost[1] < 0.98 * lost[0]
        assert lost[2] < 0.95 * lost[0]


def test_equal_inputs_leave_the_targets_alone() -> None:
    w, h = problem(8, 32, 1)
    scheme = Scheme(4, 16)
    assert gptq(w, h, scheme, cross=torch.zeros_like(h)).quantized.equal(gptq(w, h, scheme).quantized)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("pull", [1.0, 0.5])
def test_the_target_for_exact_weights_is_the_least_squares_solution(act_order: bool, pull: float) -> None:
    """Oracle: the exact weights that reproduce the original's outputs W y from the inputs x as well as any.

    Found from x and y themselves.
    """
    w, y, x = paired(7, 24, 0)
    best = torch.linalg.lstsq(x, y @ w.double().t()).solution.t()
    h, cross = x.t() @ x / len(x), (y - x).t() @ x / len(x)
    order = gptq_module._order(h.diagonal(), Scheme(4, 8), act_order)
    options = GPTQOptions(damping=1e-12)
    upper, _ = gptq_module.factorise(h, torch.zeros(24, dtype=torch.bool), h.diagonal(), order, options)
    assert upper is not None
    found = gptq_module._towards(w, cross, upper, order, pull)
    assert found.dtype == torch.float32
    assert float((best - w).abs().mean()) > 0.02  # what would stay if nothing was moved
    torch.testing.assert_close(found.double(), w + pull * (best - w), rtol=0, atol=2e-6)


def test_with_the_original_inputs_the_result_stays_close_to_the_best_of_all_roundings() -> None:
    """Oracle: every choice of codes for two rows of four inputs at 2 bits, scales as they were found.

    What counts is ``|W y - Q x|²``.
    """
    every = torch.tensor(list(itertools.product(range(4), repeat=4)))
    over_best, lost = [], {True: 0.0, False: 0.0}
    for seed in range(25):
        w, y, x = paired(2, 4, seed)
        wanted = (y @ w.double().t()).t()
        h, cross = x.t() @ x / len(x), (y - x).t() @ x / len(x)
        for known in (True, False):
            options = GPTQOptions(scales="minmax", damping=1e-6, pull=1.0)
            q = gptq(w, h, Scheme(2, None, symmetric=False), options, cross=cross if known else None).quantized
            error = float((wanted - q.dequantize().double() @ x.t()).square().sum() / wanted.square().sum())
            lost[known] += error / 25
            if known:
                tried = (every - q.zeros.double()[:, None]) * q.scales.double()[:, None] @ x.t()
                best = float((wanted[:, None] - tried).square().sum(-1).amin(1).sum() / wanted.square().sum())
                assert error >= best * (1 - 1e-9)
                over_best.append(error / best)
    assert sum(over_best) / 25 < 1.05
    assert lost[True] < 0.9 * lost[False]


def test_the_loss_by_a_few_inputs_is_that_by_their_hessian() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, root = torch.randn(30, 64, generator=generator), torch.randn(20, 64, generator=generator)
    rounded = weight + 0.1 * torch.randn(30, 64, generator=generator)
    by_hessian = proxy_loss(weight, rounded, root.t() @ root)
    assert proxy_loss(weight, rounded, None, root) == pytest.approx(by_hessian, rel=1e-5)


@pytest.mark.parametrize("width", [40, 700])
def test_the_factor_is_that_of_the_damped_inverse_with_columns_in_their_order(width: int) -> None:
    """700 columns are inverted in halves."""
    _, h = problem(1, width, 3, tokens=2 * width)
    alive = torch.zeros(width, dtype=torch.bool)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(1))
    upper = gptq_module._permuted_factor(h, alive, h.diagonal(), 0.01, order)
    assert upper is not None
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    assert torch.equal(upper, upper.triu())
    assert torch.allclose(upper.t() @ upper @ damped[order][:, order], torch.eye(width, dtype=torch.float64), atol=1e-8)


@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_a_solution_tells_the_loss_of_every_row(outliers: float) -> None:
    """Rows that were exchanged for simple rounding among them; of a target that was moved nothing is told."""
    w, h = problem(64, 64, 7, tokens=40)
    w[torch.rand(w.shape, generator=torch.Generator().manual_seed(2)) < outliers] *= 8
    scheme = Scheme(3, None, symmetric=True)
    found = gptq(w, h, scheme)
    assert found.losses is not None
    error = w.double() - found.quantized.dequantize().double()
    assert torch.allclose(found.losses.double(), ((error @ h) * error).sum(1), rtol=1e-3)
    assert gptq(w, h, scheme, cross=torch.zeros_like(h)).losses is None
    assert gptq(w, h, scheme, GPTQOptions(sweeps=0)).losses is None
