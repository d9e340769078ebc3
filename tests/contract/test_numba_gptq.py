"""The compiled column loops of a CPU give what those in ``algorithms`` give, bit for bit, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quantkit.algorithms.gptq import Loops, gptq, round_columns
from quantkit.algorithms.refine import descend_columns
from quantkit.convert.plan.column_loops import column_loops
from quantkit.core.scheme import Scheme
from quantkit.runtime.kernels.numba import threads as worker_threads

pytest.importorskip("numba")
from quantkit.runtime.kernels.numba import gptq as kernels

SHAPES = [(1, 1), (48, 40), (128, 64), (37, 700), (96, 1101)]  # columns, rows: parts of a tile, several shares


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(kernels, "SHARE", 1 << 17)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grid(columns: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of which some clamp, and zeros."""
    return numbers(columns, rows, seed=1).abs() * 0.1 + 0.02, (numbers(columns, rows, seed=2) * 3 + 7).round().clamp(
        0, 15
    )


def moments(columns: int, rows: int) -> torch.Tensor:
    x = numbers(3 * columns + 8, columns, seed=3) @ numbers(columns, columns, seed=4)
    return x.t() @ x / len(x) + torch.eye(columns)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rounding_a_block_of_columns(shape: tuple[int, int], transposed: bool, threads: int) -> None:
    rest, (step, offset) = numbers(*shape, seed=0), grid(*shape)
    upper = torch.linalg.cholesky(torch.linalg.inv(moments(*shape)), upper=True)
    wide = torch.cat([upper, upper], dim=1)  # a block of a wider factor
    wide = wide.t().contiguous().t() if transposed else wide
    here, there = rest.clone(), rest.clone()
    expected = round_columns(here, wide[:, : shape[0]], step, offset, 15)
    found = kernels.round_columns(there, wide[:, : shape[0]], step, offset, 15)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(here, there)
    assert shape[1] < 40 or {0, 15} < set(found[0].flatten().tolist())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_descending_a_block_of_columns(shape: tuple[int, int], threads: int) -> None:
    target, (step, offset), own = numbers(*shape, seed=0), grid(*shape), moments(*shape)
    found = (numbers(*shape, seed=5) * 4 + 8).round().clamp(0, 15)
    results = []
    for loop in (descend_columns, kernels.descend_columns):
        codes = found.clone()
        error = target - (codes - offset) * step
        loop(target, error, codes, step, offset, own, own @ error, 15)
        results.append((codes, error))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], found)


@pytest.mark.parametrize("scheme", [Scheme(4, 64, False), Scheme(3, None, True), Scheme(8, 128, False)], ids=str)
def test_a_whole_matrix_gets_the_same_codes_and_scales(scheme: Scheme) -> None:
    weight, hessian = numbers(300, 200, seed=0), moments(200, 300)
    calls = []

    def counted(name: str) -> Any:
        def loop(*args: Any) -> Any:
            calls.append(name)
            return getattr(kernels, name)(*args)

        return loop

    compiled = Loops(counted("round_columns"), counted("descend_columns"))
    assert gptq(weight, hessian, scheme, loops=compiled).quantized.equal(gptq(weight, hessian, scheme).quantized)
    assert {"round_columns", "descend_columns"} == set(calls)


def test_what_a_job_runs_is_compiled_before_its_memory_is_foretold() -> None:
    loops = column_loops(torch.device("cpu"))
    known = [len(kernel.signatures) for kernel in (kernels._round, kernels._descend)]
    for scheme in (Scheme(4, 64, False), Scheme(4, None, True)):
        gptq(numbers(80, 128, seed=0), moments(128, 80).double(), scheme, loops=loops)
    assert [len(kernel.signatures) for kernel in (kernels._round, kernels._descend)] == known == [1, 1]


def test_a_numba_that_does_not_work_leaves_the_loops_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_threads, "available", lambda: False)
    assert column_loops(torch.device("cpu")) == Loops()
