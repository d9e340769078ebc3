"""Small problems solved in step have the bits they have alone."""

from __future__ import annotations

import pytest
import torch

from quantkit.algorithms.gptq import GPTQOptions, gptq, gptq_steps
from quantkit.algorithms.rtn import rtn, rtn_steps
from quantkit.algorithms.together import together
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError

SCHEMES = [Scheme(bits=4, group_size=32, symmetric=False), Scheme(bits=3, group_size=48, symmetric=True)]


def weights(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16 + 8 * (i % 3), 80, generator=generator) for i in range(count)]


def moments(seed: int) -> torch.Tensor:
    x = torch.randn(200, 80, generator=torch.Generator().manual_seed(seed)).double()
    return x.t() @ x / 200


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gptq_in_step_gives_what_it_gives_alone(scheme: Scheme) -> None:
    """Groups are visited in another order in each problem, and the last one is shorter."""
    problems = [(w, moments(i)) for i, w in enumerate(weights(7))]
    alone = [gptq(w, h, scheme) for w, h in problems]
    found = together([gptq_steps(w, h, scheme) for w, h in problems])
    assert all(a.quantized.equal(b.quantized) and a.damping == b.damping for a, b in zip(alone, found, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_different_solvers_may_be_mixed(scheme: Scheme) -> None:
    first, second, third = weights(3)
    importance = torch.rand(80, generator=torch.Generator().manual_seed(1))
    options = GPTQOptions(scales="minmax", sweeps=0)
    found = together([
        rtn_steps(first, scheme, "search", importance), rtn_steps(second, scheme, "search"),
        rtn_steps(third, scheme), gptq_steps(first, moments(4), scheme, options),
    ])  # fmt: skip
    alone = [rtn(first, scheme, "search", importance), rtn(second, scheme, "search"), rtn(third, scheme),
             gptq(first, moments(4), scheme, options)]  # fmt: skip
    assert all(a.quantized.equal(b.quantized) for a, b in zip(alone, found, strict=True))


def test_the_solver_whose_search_fails_is_told() -> None:
    told = []

    def named(weight: torch.Tensor, name: str):
        try:
            return (yield from rtn_steps(weight, SCHEMES[0], "search"))
        except NumericsError as error:
            told.append(name)
            raise NumericsError(f"{name}: {error}") from error

    good, bad, other = weights(3)
    with pytest.raises(NumericsError, match="bad: a scale of"):
        together([named(good, "good"), named(bad * 1e7, "bad"), named(other, "other")])
    assert told == ["bad"]
