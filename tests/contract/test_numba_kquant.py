"""The compiled search for ggml's block formats gives what torch's gives, bit for bit, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.kquant import kquant
from quantkit.core import compiled
from quantkit.core.blocks import KINDS, BlockCodes, block_kind

pytest.importorskip("numba")
from quantkit.runtime.kernels.numba import kquant as kernels

FIELDS = ("codes", "d", "scales", "dmin", "minima")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weights() -> Tensor:
    """Rows of any size: of zeros, of one sign, tiny, with outliers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 512, generator=generator) * torch.rand(37, 1, generator=generator)
    weight[3] = 0
    weight[5, :64].abs_()
    weight[6, 64:256].abs_().neg_()
    weight[7] *= 1e-6
    weight[9, ::50] *= 30
    weight[11, 16:32] = 0.25
    return weight


def importance(kind: str) -> Tensor | None:
    return None if kind == "none" else torch.rand(512, generator=torch.Generator().manual_seed(1)).square()


def same(one: BlockCodes, other: BlockCodes) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in FIELDS]
    return all(a is b or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
@pytest.mark.parametrize("weighed", ["none", "inputs"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_codes_scales_and_minima_are_those_of_torch(
    kind: str, weighed: str, quick: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kquant(weights(), block_kind(kind), importance(weighed), quick=quick)
    monkeypatch.setattr(compiled, "_offered", {})
    assert same(found, kquant(weights(), block_kind(kind), importance(weighed), quick=quick))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_NL"])
def test_compiled_code_is_what_a_search_on_a_cpu_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare torch with itself."""

    def stop(*args: object) -> None:
        raise RuntimeError("called")

    monkeypatch.setattr(kernels, "search", stop)
    with pytest.raises(RuntimeError, match="called"):
        kquant(weights(), block_kind(kind))


@pytest.mark.parametrize("kind", ["Q4_0", "Q3_K", "Q4_K"])
def test_a_row_has_the_same_codes_alone_and_among_others(kind: str) -> None:
    weight = weights()
    together = kquant(weight, block_kind(kind))
    for row in (0, 9, 36):
        assert same(kquant(weight[row : row + 1], block_kind(kind)), together.rows(slice(row, row + 1)))
