"""Threads that share a job; compiled code that outlived its sources."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime import workers
from quantkit.runtime.kernels.cpu_packed import PlanarWeight, linear_numba


def test_without_the_extra_the_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "available", lambda: False)
    workers.compiled.cache_clear()
    try:
        with pytest.raises(RequestError, match=r"quantkit\[cpu\]"):
            workers.compiled("pool")
    finally:
        workers.compiled.cache_clear()


def test_cached_code_of_other_sources_is_deleted_once(tmp_path: Path) -> None:
    kernels = SimpleNamespace(
        __file__=workers.__file__.replace("workers.py", "kernels/cpu_numba_pool.py"),
        finish=SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path))),
    )
    other, old, fresh = (tmp_path / name for name in ("mine.step.nbi", "cpu_numba.step-1.nbi", "cpu_numba.step-2.nbc"))
    other.touch()
    old.touch()
    workers.drop_stale_code(kernels)
    assert (other.exists(), old.exists()) == (True, False)
    fresh.touch()
    workers.drop_stale_code(kernels)
    assert fresh.exists()
    (tmp_path / "cpu_numba.sha256").write_text("of other sources")
    workers.drop_stale_code(kernels)
    assert not fresh.exists()


@pytest.mark.skipif(not workers.available(), reason="numba is not installed (extra [cpu])")
def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=generator)
    scheme = Scheme(4, 32, False)
    scales, zeros = affine.minmax_params(weight, scheme)
    packed = PlanarWeight(QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme))
    inputs = [torch.randn(2, 128, generator=generator) for _ in range(4)]
    expected = [linear_numba(x, packed, None) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        torch.set_num_threads(2)  # of this thread
        if any(not torch.equal(linear_numba(inputs[index], packed, None), expected[index]) for _ in range(200)):
            wrong.append(index)

    before = torch.get_num_threads()
    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    torch.set_num_threads(before)
    assert not wrong
