"""The compiled search for scales gives what torch's gives, bit for bit, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantkit.algorithms.hqq import hqq
from quantkit.core import affine, compiled
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError

pytest.importorskip("numba")
from quantkit.runtime.kernels.numba import ranges

SCHEMES = [
    Scheme(bits, group, symmetric, dtype)
    for bits in (2, 4, 8)
    for group in (32, 96, 128)
    for symmetric in (True, False)
    for dtype in ("float16", "bfloat16")
]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def weights() -> Tensor:
    """Rows of any size; one of zeros, one whose group has one sign, one below the smallest scale."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(150, 384, generator=generator) * torch.rand(150, 1, generator=generator)
    weight[3] = 0
    weight[5, :64].abs_()
    weight[7] *= 1e-6
    weight[9, ::50] *= 30
    return weight


def importance(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"inputs": (384,), "rows": (150, 384)}
    return None if kind == "none" else torch.rand(shapes[kind], generator=generator)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_offered", {})


@pytest.mark.parametrize("kind", ["none", "inputs", "rows"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_searched_scales_and_zeros_are_those_of_torch(
    scheme: Scheme, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales, zeros = affine.searched_params(weights(), scheme, importance(kind), steps=9)
    by_torch(monkeypatch)
    expected, wanted = affine.searched_params(weights(), scheme, importance(kind), steps=9)
    assert torch.equal(scales, expected)
    assert scheme.symmetric or torch.equal(zeros, wanted)


@pytest.mark.parametrize("kind", ["none", "inputs"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_half_quadratic_codes_are_those_of_torch(
    scheme: Scheme, kind: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hqq(weights(), scheme, "search", importance(kind)).quantized
    by_torch(monkeypatch)
    assert found.equal(hqq(weights(), scheme, "search", importance(kind)).quantized)


def test_compiled_code_is_what_a_search_on_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would compare torch with itself."""
    called = []
    monkeypatch.setattr(ranges, "search", lambda *args, **kind: called.append(args) or (torch.ones(4, 2),) * 2)
    affine.searched_params(torch.randn(4, 64), Scheme(4, 32, False))
    assert called


@pytest.mark.parametrize("group", [100, None, 768])
def test_groups_that_do_not_divide_a_row_or_fit_no_cache_are_left_to_torch(group: int | None) -> None:
    scheme = Scheme(4, group, False)
    assert not ranges.takes(scheme.width(1536), 1536) or 1536 % scheme.width(1536)
    scales, _ = affine.searched_params(torch.randn(3, 1536), scheme, steps=3)
    assert scales.shape == (3, scheme.groups(1536))


@pytest.mark.parametrize("search", [affine.searched_params, hqq])
def test_a_scale_that_overflows_is_refused_by_both(search: object, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 64)
    weight[5, 3] = 1e7
    for _ in range(2):
        with pytest.raises(NumericsError, match="overflows float16"):
            search(weight, Scheme(4, 32, False))  # type: ignore[operator]
        by_torch(monkeypatch)


def test_a_row_has_the_same_scales_alone_and_among_others() -> None:
    weight, scheme = weights(), Scheme(4, 32, False)
    scales, zeros = affine.searched_params(weight, scheme, steps=5)
    assert zeros is not None
    for row in (0, 63, 64, 149):
        alone, zero = affine.searched_params(weight[row : row + 1], scheme, steps=5)
        assert torch.equal(alone[0], scales[row])
        assert torch.equal(zero[0], zeros[row])


def test_a_matrix_without_rows_has_no_scales() -> None:
    scales, zeros = affine.searched_params(torch.zeros(0, 64), Scheme(4, 32, False))
    assert scales.shape == (0, 2)
    assert zeros is not None
    assert zeros.shape == (0, 2)
