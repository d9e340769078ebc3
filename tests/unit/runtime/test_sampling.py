"""Sampling functions keep exactly the sets they promise; options are checked once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import RequestError
from quantkit.runtime.generate.sampling import (
    GenerationOptions,
    Sampler,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize_repetition,
    probabilities,
)


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits).nonzero().flatten().tolist()


def logits_of(*probability: float) -> torch.Tensor:
    return torch.tensor(probability).log()


def test_top_k_keeps_exactly_k_also_among_equals() -> None:
    assert kept(keep_top_k(logits_of(0.1, 0.4, 0.2, 0.3), 2)) == [1, 3]
    assert len(kept(keep_top_k(torch.zeros(10), 3))) == 3
    assert len(kept(keep_top_k(torch.zeros(10), 0))) == 10
    assert len(kept(keep_top_k(torch.zeros(10), 99))) == 10


@pytest.mark.parametrize(
    ("p", "expected"), [(0.3, [1]), (0.45, [1, 3]), (0.71, [1, 2, 3]), (1.0, [0, 1, 2, 3]), (1e-9, [1])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, expected: list[int]) -> None:
    assert kept(keep_top_p(logits_of(0.1, 0.4, 0.2, 0.3), p)) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_top_p_is_minimal(values: list[float], p: float) -> None:
    logits = torch.tensor(values)
    stay = kept(keep_top_p(logits, p))
    mass = logits.softmax(-1)
    assert float(mass[stay].sum()) >= p - 1e-5
    assert float(mass[stay].sum() - mass[stay].min()) < p + 1e-5  # one fewer would not do
    assert float(mass[stay].min()) >= max([0.0] + [float(mass[i]) for i in range(len(values)) if i not in stay]) - 1e-7


def test_min_p_is_relative_to_the_best() -> None:
    assert kept(keep_min_p(logits_of(0.5, 0.3, 0.15, 0.05), 0.25)) == [0, 1, 2]
    assert kept(keep_min_p(logits_of(0.5, 0.5), 1.0)) == [0, 1]


def test_the_penalty_lowers_seen_tokens_of_either_sign_once() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0])
    assert penalize_repetition(logits, torch.tensor([0, 1]), 2.0).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]
    sampler = Sampler(GenerationOptions(repetition_penalty=2.0), [0, 0, 0])
    assert sampler(torch.tensor([2.0, 1.1, 1.4])) == 2
    assert sampler(torch.tensor([2.0, 1.1, 1.4])) == 1  # what was generated counts as seen


def test_draw_follows_the_distribution_and_never_takes_what_is_ruled_out() -> None:
    probability = torch.tensor([0.0, 0.25, 0.0, 0.75])
    assert draw(probability, 0.0) == 1
    assert draw(probability, 0.2499) == 1
    assert draw(probability, 0.2501) == 3
    assert draw(probability, 1 - 1e-16) == 3
    counts = torch.bincount(torch.tensor([draw(probability, u / 1000) for u in range(1000)]), minlength=4)
    assert counts.tolist() == [0, 250, 0, 750]


def test_temperature_sharpens_and_the_smallest_is_greedy() -> None:
    logits = torch.tensor([1.0, 2.0, 0.5])
    assert float(probabilities(logits, GenerationOptions(temperature=0.5)).max()) > float(logits.softmax(-1).max())
    assert probabilities(logits, GenerationOptions(temperature=1e-300)).tolist() == [0.0, 1.0, 0.0]


def test_the_same_seed_gives_the_same_tokens() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))

    def run(seed: int) -> list[int]:
        sampler = Sampler(GenerationOptions(temperature=2.0, seed=seed), [1])
        return [sampler(logits) for _ in range(20)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    greedy = Sampler(GenerationOptions(), [1])
    assert greedy(logits) == int(logits.argmax())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", math.inf), ("temperature", "hot"), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01),
        ("min_p", -0.1), ("min_p", 2), ("seed", -1), ("repetition_penalty", 0), ("stop", ("",)), ("stop_tokens", (-1,)),
        ("seed", True),
    ],
)  # fmt: skip
def test_an_option_outside_its_range_is_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        GenerationOptions(**{name: value})  # type: ignore[arg-type]
