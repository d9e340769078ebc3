"""Bands of positions: which tokens fall into which, and that together they are the whole."""

from __future__ import annotations

import math

import pytest
import torch

from quantkit.evaluate.by_position import by_position, edges
from quantkit.evaluate.divergence import Comparison


def test_bands_begin_at_0_256_1k_and_double_as_far_as_the_window_goes():
    assert list(edges(200)) == [(0, 200)]
    assert list(edges(8192)) == [(0, 256), (256, 1024), (1024, 2048), (2048, 4096), (4096, 8192)]
    assert list(edges(4095))[-1] == (2048, 4095)


def test_a_loss_that_grows_with_position_shows_in_its_band():
    losses = torch.ones(2, 2047, dtype=torch.float64)
    losses[:, 1024:] = 2.0
    found = by_position(losses, first=0)
    assert [(band.start, band.stop) for band in found] == [(0, 256), (256, 1024), (1024, 2047)]
    assert [band.perplexity for band in found] == pytest.approx([math.e, math.e, math.e**2])
    assert sum(band.scored_tokens for band in found) == losses.numel()
    assert all(band.kl_mean is None for band in found)


def test_positions_that_the_protocol_does_not_score_have_no_band():
    """llama.cpp scores the second half of its windows."""
    found = by_position(torch.ones(3, 767, dtype=torch.float64), first=768)
    assert [(band.start, band.stop, band.scored_tokens) for band in found] == [(256, 1024, 768), (1024, 1535, 1533)]


def test_each_band_compares_its_own_tokens_with_the_baseline():
    shape, first = (4, 511), 0
    comparison = Comparison(
        baseline_losses=torch.zeros(shape, dtype=torch.float64),
        losses=torch.zeros(shape, dtype=torch.float64),
        kl=torch.zeros(shape, dtype=torch.float64),
        same_top=torch.ones(shape, dtype=torch.bool),
    )
    comparison.losses[:, 256:] = 0.5
    comparison.kl[:, 256:] = torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None]
    comparison.same_top[1, 256:] = False
    near, far = by_position(comparison.losses, first, comparison)
    assert (near.kl_mean, near.delta_ln_ppl, near.top1_agreement) == (0.0, 0.0, 1.0)
    assert far.kl_mean == pytest.approx(0.25)
    assert far.delta_ln_ppl == pytest.approx(0.5)
    assert far.top1_agreement == pytest.approx(0.75)
    assert far.kl_stderr == pytest.approx(torch.tensor([0.1, 0.2, 0.3, 0.4]).std().item() / 2)
