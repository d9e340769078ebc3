"""Losses and divergences of models whose distributions are known in closed form."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from quantkit.errors import NumericsError, RequestError
from quantkit.evaluate import divergence, perplexity
from quantkit.evaluate.divergence import compare, quantile, record_baseline
from quantkit.evaluate.perplexity import mean_and_stderr, perplexity_of, token_losses
from quantkit.evaluate.windows import make_windows

VOCAB = 11


class TableModel:
    """Next-token logits are a row of a table, chosen by the current token."""

    config = SimpleNamespace()

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def hidden(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(input_ids, self.table.shape[0]).float()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table


def some_windows(count: int = 5, seq_len: int = 16, seed: int = 0, **options):
    ids = torch.randint(0, VOCAB, (count * seq_len,), generator=torch.Generator().manual_seed(seed))
    return make_windows(ids.tolist(), protocol=options.pop("protocol", "gptq"), seq_len=seq_len, **options)


def random_model(seed: int, sharpness: float = 2.0) -> TableModel:
    return TableModel(sharpness * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)))


def compared(model, original, windows):
    return compare(model, record_baseline(original, windows, "original"))


def test_a_uniform_model_has_the_vocabulary_size_as_perplexity():
    value, stderr = perplexity_of(token_losses(TableModel(torch.zeros(VOCAB, VOCAB)), some_windows()))
    assert value == pytest.approx(VOCAB, rel=1e-6)
    assert stderr == pytest.approx(0, abs=1e-6)


def test_losses_are_those_of_the_softmax_by_hand_at_the_scored_positions():
    model, windows = random_model(1), some_windows(protocol="llama.cpp")
    losses = token_losses(model, windows)
    probabilities = torch.softmax(model.table.double(), dim=-1)
    ids = windows.ids
    by_hand = [
        [-math.log(probabilities[ids[w, t - 1], ids[w, t]]) for t in range(windows.first + 1, windows.seq_len)]
        for w in range(windows.count)
    ]
    torch.testing.assert_close(losses, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_divergence_of_a_model_from_itself_is_exactly_zero():
    result = compared(random_model(2), random_model(2), some_windows())
    assert result.kl.abs().max() == 0
    assert result.same_top.all()
    assert torch.equal(result.losses, result.baseline_losses)
    assert result.summary()["delta_ln_ppl"] == 0


def test_divergence_is_the_sum_over_the_vocabulary_by_hand():
    original, model, windows = random_model(3), random_model(4), some_windows()
    p, q = (torch.softmax(m.table.double(), -1) for m in (original, model))
    expected = (p * (p.log() - q.log())).sum(-1)[windows.ids[:, :-1]]
    result = compared(model, original, windows)
    torch.testing.assert_close(result.kl, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(result.same_top, (p.argmax(-1) == q.argmax(-1))[windows.ids[:, :-1]])


def test_divergence_of_two_known_distributions():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL(p||q) = ln(2 / sqrt(3)); the other way round it is another number."""
    p, q = (TableModel(torch.tensor(row).log().repeat(2, 1)) for row in ([0.5, 0.5], [0.25, 0.75]))
    windows = make_windows([0, 1] * 8, protocol="gptq", seq_len=8)
    assert compared(q, p, windows).summary()["kl_mean"] == pytest.approx(math.log(2 / math.sqrt(3)), rel=1e-6)
    reverse = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert compared(p, q, windows).summary()["kl_mean"] == pytest.approx(reverse, rel=1e-6)


def test_discretised_gaussians_have_the_divergence_of_gaussians():
    """KL(N(a,s) || N(b,s)) = (a - b)^2 / (2 s^2), on a grid fine and wide enough."""
    grid = torch.linspace(-12, 12, 2401, dtype=torch.float64)

    def gaussian(mean):
        return TableModel((-((grid - mean) ** 2) / 2).float().repeat(grid.numel(), 1))

    windows = make_windows(range(1200, 1208), protocol="gptq", seq_len=8)
    mean = compared(gaussian(0.5), gaussian(0.0), windows).summary()["kl_mean"]
    assert mean == pytest.approx(0.125, rel=1e-4)


def test_the_chunk_size_does_not_matter(monkeypatch):
    original, model, windows = random_model(5), random_model(6), some_windows()
    whole = compared(model, original, windows)
    monkeypatch.setattr(perplexity, "CHUNK_BYTES", 3 * 4 * VOCAB)
    assert perplexity.chunk_tokens(VOCAB) == 3
    pieces = compared(model, original, windows)
    torch.testing.assert_close(pieces.kl, whole.kl, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(token_losses(model, windows), whole.losses, rtol=1e-6, atol=1e-7)


def test_no_more_logits_at_once_than_a_chunk_holds(monkeypatch):
    monkeypatch.setattr(perplexity, "CHUNK_BYTES", 5 * 4 * VOCAB)
    seen = []
    model = random_model(7)
    plain = model.head
    model.head = lambda hidden: seen.append(hidden.shape[1]) or plain(hidden)
    token_losses(model, some_windows(count=2))
    assert max(seen) == 5


def test_the_order_of_windows_changes_no_figure():
    original, model = random_model(8), random_model(9)
    windows = some_windows()
    turned = make_windows(windows.ids.flip(0).flatten().tolist(), protocol="gptq", seq_len=windows.seq_len)
    assert compared(model, original, turned).summary() == pytest.approx(compared(model, original, windows).summary())


def test_states_kept_in_a_file_give_the_same_figures(monkeypatch):
    original, model, windows = random_model(10), random_model(11), some_windows()
    expected = compared(model, original, windows).summary()
    monkeypatch.setattr(divergence, "STATES_IN_MEMORY", 0)
    assert compared(model, original, windows).summary() == expected


def test_the_original_is_released_before_the_model_runs():
    order = []
    windows = some_windows(count=1)
    baseline = record_baseline(random_model(1), windows, "original", release=lambda: order.append("released"))
    model = random_model(2)
    plain = model.hidden
    model.hidden = lambda ids: order.append("model") or plain(ids)
    compare(model, baseline)
    assert order == ["released", "model"]


def test_standard_error_is_that_of_the_window_means():
    per_token = torch.tensor([[1.0, 3.0], [2.0, 4.0], [5.0, 9.0]])
    mean, stderr = mean_and_stderr(per_token)
    assert mean == pytest.approx(4.0)
    assert stderr == pytest.approx(math.sqrt(((2 - 4) ** 2 + (3 - 4) ** 2 + (7 - 4) ** 2) / 2 / 3))
    assert mean_and_stderr(per_token[:1]) == (2.0, None)


def test_paired_difference_is_far_better_known_than_two_single_perplexities():
    original = random_model(12)
    nudged = TableModel(original.table + 0.01 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(13)))
    result = compared(nudged, original, some_windows(count=12))
    _, single = mean_and_stderr(result.losses)
    assert result.summary()["delta_ln_ppl_stderr"] < single / 10


def test_quantile_is_exact_for_many_values():
    assert quantile(torch.arange(101.0), 0.99) == pytest.approx(99.0)
    assert quantile(torch.tensor([3.0]), 0.99) == 3.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_with_the_remedy(bad):
    table = random_model(14).table.clone()
    table[:, 3] = bad
    with pytest.raises(NumericsError, match="--dtype float32"):
        token_losses(TableModel(table), some_windows())
    with pytest.raises(NumericsError, match="the model overflows"):
        compared(TableModel(table), random_model(14), some_windows())


def test_models_with_different_vocabularies_are_refused():
    wider = TableModel(torch.zeros(VOCAB, VOCAB + 1))
    with pytest.raises(RequestError, match="11 logits per token and the model 12"):
        compared(wider, random_model(15), some_windows())
