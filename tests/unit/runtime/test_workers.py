"""Threads that share a job; compiled code that outlived its sources."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import QuantkitWarning, RequestError
from quantkit.runtime.kernels.cpu_layouts import PlanarWeight, linear_numba
from quantkit.runtime.kernels.numba import threads


def test_without_the_extra_the_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: False)
    threads.compiled.cache_clear()
    try:
        with pytest.raises(RequestError, match=r"quantkit\[cpu\]"):
            threads.compiled("worker_loop")
    finally:
        threads.compiled.cache_clear()


def test_cached_code_of_other_sources_is_deleted_once(tmp_path: Path) -> None:
    kernels = SimpleNamespace(
        __file__=threads.__file__.replace("threads.py", "worker_loop.py"),
        finish=SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path))),
    )
    other, old, fresh = (tmp_path / name for name in ("mine.step.nbi", "gemv.step-1.nbi", "gemv.step-2.nbc"))
    other.touch()
    old.touch()
    threads.drop_stale_code(kernels)
    assert (other.exists(), old.exists()) == (True, False)
    fresh.touch()
    threads.drop_stale_code(kernels)
    assert fresh.exists()
    (tmp_path / "quantkit-kernels.sha256").write_text("of other sources")
    threads.drop_stale_code(kernels)
    assert not fresh.exists()


@pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")
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


class _Interrupted:
    """The compiled functions, with a Ctrl-C after (or before) one of them."""

    def __init__(self, kernels: Any, name: str, after: bool) -> None:
        self.kernels, self.name, self.after = kernels, name, after

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == self.name and not self.after:
                raise KeyboardInterrupt
            found = getattr(self.kernels, name)(*args)
            if name == self.name:
                raise KeyboardInterrupt
            return found

        return call


@pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["post", "finish"])
@pytest.mark.parametrize("asleep", [False, True])
def test_an_interrupt_leaves_no_worker_at_the_job_and_the_next_one_runs(name: str, after: bool, asleep: bool) -> None:
    own = threads.WorkerPool()
    kernels = own.kernels
    job = np.zeros(64, dtype=np.int64)
    try:
        own.run(job, 3)
        if asleep:
            time.sleep(0.05)
        own.kernels = _Interrupted(kernels, name, after)
        with pytest.raises(KeyboardInterrupt):
            own.run(job, 3)
        assert kernels.idle(own.control)
        own.kernels = kernels
        for _ in range(50):
            own.run(job, 3)
    finally:
        own.kernels = kernels
        workers = list(own._threads)
        own.close()
    assert len(workers) == 2
    assert not any(thread.is_alive() for thread in workers)


@pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")
def test_ctrl_c_between_posting_a_job_and_finishing_it_waits_for_the_job() -> None:
    """The workers wait for the caller's share at a barrier: without it they would do so for ever."""
    own = threads.WorkerPool()
    kernels, done = own.kernels, []

    class Signalled:
        def post(self, *given: Any) -> Any:
            found = kernels.post(*given)
            signal.raise_signal(signal.SIGINT)
            return found

        def finish(self, *given: Any) -> None:
            kernels.finish(*given)
            done.append(True)

        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

    try:
        own.kernels = Signalled()
        with pytest.raises(KeyboardInterrupt):
            own.run(np.zeros(64, dtype=np.int64), 3)
        assert done == [True]
    finally:
        own.kernels = kernels
        own.close()


@pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")
def test_a_numba_that_is_told_to_compile_nothing_is_said_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    threads.available.cache_clear()
    try:
        with pytest.warns(QuantkitWarning, match="NUMBA_DISABLE_JIT"):
            assert not threads.available()
    finally:
        threads.available.cache_clear()


@pytest.mark.skipif(not threads.available(), reason="numba is not installed (extra [cpu])")
def test_a_numba_that_does_not_import_is_said_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError("Numba needs NumPy 2.3 or less")

    monkeypatch.setattr(threads.importlib, "import_module", refuse)
    threads.available.cache_clear()
    try:
        with pytest.warns(QuantkitWarning, match="NumPy 2.3 or less"):
            assert not threads.available()
    finally:
        threads.available.cache_clear()


@pytest.mark.parametrize(
    ("policy", "numbers", "inside"),
    [("PASSIVE", threads.FEW_NUMBERS, 1), ("PASSIVE", threads.FEW_NUMBERS + 1, 2), ("", threads.FEW_NUMBERS + 1, 1)],
    ids=["asleep, small", "asleep, large", "spinning"],
)
def test_torch_wakes_no_thread_for_small_operations_nor_one_that_spins(
    policy: str, numbers: int, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads.without_openmp(numbers):
            assert torch.get_num_threads() == inside
            assert threads.threads() == 2  # our own
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
