"""Threads that do one job together, started once: waking them costs less than a microsecond while they are busy.

A worker that has just done a job looks for the next one for a while before it sleeps, without the interpreter's lock,
so the matrices of a decoder layer follow each other without system calls. The caller does a share itself. What a job
is, is the compiled code's business.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import importlib.util
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.core.interrupt import undisturbed
from quantkit.errors import QuantkitWarning, RequestError
from quantkit.runtime.kernels.crew import Crew

MOST = 64  # threads
PATIENCE = 20_000  # empty looks before a worker sleeps: about a millisecond
_pool: WorkerPool | None = None
_held, _readers = 0, 0  # torch's threads while it has but one, and for how many users (``one_thread_each``)
FEW_CORES = 4  # up to which our threads and OpenMP's get into each other's way
FEW_NUMBERS = 1 << 17  # of an operation: waking a second thread costs more than it brings (docs/cpu.md)
_guard = threading.Lock()
_crew = Crew()  # of the model that decoded last


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the extra ``[cpu]`` is installed and works here. Compiles nothing.

    numba refuses NumPy releases that it does not know yet. Warns where it is installed and of no use.
    """
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        numba = importlib.import_module("numba")
    except Exception as error:
        # ImportError for NumPy's version, OSError for llvmlite's library, and whatever comes next
        warnings.warn(
            f"numba is installed but cannot be imported ({error}): torch's own kernels are used. Reinstall"
            " quantkit[cpu].",
            QuantkitWarning,
            stacklevel=2,
        )
        return False
    if numba.config.DISABLE_JIT:
        warnings.warn(
            "numba compiles nothing (NUMBA_DISABLE_JIT is set): torch's own kernels are used. Unset it for the compiled"
            " ones.",
            QuantkitWarning,
            stacklevel=2,
        )
        return False
    return True


@lru_cache(maxsize=8)
def compiled(part: str = "gemv") -> Any:
    """A module of compiled kernels of this folder: "gemv", "step", "step_fields", "worker_loop" or "gptq".

    Raises RequestError without the extra ``[cpu]``.
    """
    if not available():
        raise RequestError("these CPU kernels need numba. Install quantkit[cpu], or leave the kernel to quantkit.")
    return importlib.import_module(f"quantkit.runtime.kernels.numba.{part}")


def drop_stale_code(kernels: Any) -> None:
    """Delete cached code of other sources.

    numba judges a cached function by the file it stands in, but it holds what it calls too: after an update of one file
    the others' cache would run old kernels on new jobs.
    """
    place = kernels.finish.stats.cache_path
    if place is None:  # nothing is writable, nothing is cached
        return
    folder, here = Path(place), Path(kernels.__file__).parent
    sources = sorted(here.glob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    marker = folder / "quantkit-kernels.sha256"
    if marker.exists() and marker.read_text(encoding="ascii") == digest:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        for stale in folder.glob(f"{source.stem}.*.nb[ic]"):
            stale.unlink(missing_ok=True)
    marker.write_text(digest, encoding="ascii")


class WorkerPool:
    """Worker threads and the control block that they look at; grows up to ``MOST`` threads."""

    def __init__(self) -> None:
        self.kernels = compiled("worker_loop")
        drop_stale_code(self.kernels)
        self.process = os.getpid()
        memory = np.zeros(64 * (MOST + 8), dtype=np.uint8)
        self._memory = memory
        self.control = int(memory.ctypes.data + (-memory.ctypes.data) % 64)  # fields on cache lines of their own
        self._lock = threading.Lock()
        self._nothing = np.zeros(8, dtype=np.int64)  # a job of no known kind
        # compiled here: not in every thread, nor between posting a job and finishing it
        self.kernels.post(self.control, self._nothing.ctypes.data, 1)
        self.kernels.finish(self.control, 1)
        self.kernels.work(self.control, 0, self.kernels.number(self.control), 0)
        self._wake: list[threading.Semaphore] = [threading.Semaphore(0)]  # none for the caller
        self._threads: list[threading.Thread] = []
        self._closing = False

    def run(self, job: np.ndarray[Any, np.dtype[np.int64]], parts: int) -> None:
        """Do a job (int64 fields) in ``parts`` threads, the caller's included.

        Ctrl-C waits until it is done, for milliseconds: between posting and finishing the workers would wait for the
        caller's share at a barrier, for ever.
        """
        parts = min(parts, MOST)
        with self._lock, undisturbed():
            while len(self._wake) < parts:
                self._start(len(self._wake))
            try:
                asleep = self.kernels.post(self.control, job.ctypes.data, parts)
                if asleep:
                    for part in range(1, parts):
                        if asleep >> part & 1:
                            self._wake[part].release()
                self.kernels.finish(self.control, parts)
            except BaseException:  # the workers hold addresses that the caller is about to free
                self._wait_until_idle()
                raise

    def _wait_until_idle(self) -> None:
        """Wait until no worker is at the last job, whatever of it was done.

        One that is woken for nothing goes back to sleep.
        """
        for wake in self._wake[1:]:
            wake.release()
        while not self.kernels.idle(self.control):
            time.sleep(1e-4)

    def _start(self, part: int) -> None:
        wake = threading.Semaphore(0)
        number = self.kernels.number(self.control)
        thread = threading.Thread(target=self._serve, args=(part, wake, number), name=f"quantkit-{part}", daemon=True)
        thread.start()
        self._wake.append(wake)  # once it is there: jobs count on every one in this list
        self._threads.append(thread)

    def _serve(self, part: int, wake: threading.Semaphore, seen: int) -> None:
        while not self._closing:
            seen = self.kernels.work(self.control, part, seen, PATIENCE)
            wake.acquire()

    def close(self) -> None:
        """End the workers, before the interpreter frees what they look at. The next job starts others."""
        if self.process != os.getpid():  # a forked child has none of the parent's threads
            return
        with self._lock:
            self._closing = True
            for wake in self._wake[1:]:
                wake.release()
            for thread in self._threads:
                thread.join()
            self._wake, self._threads, self._closing = self._wake[:1], [], False


def pool() -> WorkerPool:
    """This process's worker pool; a forked child gets its own."""
    global _pool
    with _guard:
        if _pool is None or _pool.process != os.getpid():
            _pool = WorkerPool()
            atexit.register(_pool.close)
        return _pool


def threads() -> int:
    """The number of threads of a job: as many as torch uses, or used before ``one_thread_each``."""
    return min(_held or torch.get_num_threads(), MOST)


def follow(crew: Crew) -> None:
    """Let ``beside_step`` tell the number of threads that this crew decodes in."""
    global _crew
    _crew = crew


def beside_step() -> int:
    """The number of threads for work beside a decode step, as its head: the step's, if it ran just now."""
    return _crew.now(threads())


@contextmanager
def without_openmp(numbers: int) -> Iterator[None]:
    """Let torch's own operations run in one thread inside, where OpenMP's threads would spin on our threads' cores.

    They sleep if OMP_WAIT_POLICY said so when torch was imported, which ``import quantkit`` sees to if it comes first;
    then this is only for operations that are too small to wake one. With many cores there is room for both. torch's
    number of threads is the process's: of prompts that are read at the same time, the last one sets it back.

    numbers: that an operation has, about.
    """
    asleep = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    if (asleep and numbers > FEW_NUMBERS) or not 1 < (_held or torch.get_num_threads()) <= FEW_CORES:
        yield
        return
    with one_thread_each():
        yield


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let each of torch's operations run in the thread that asks for it: for work that has threads of its own.

    Whoever is the last to leave gives torch its number of threads back.
    """
    global _held, _readers
    try:
        with _guard:
            _readers += 1
            if _readers == 1:
                _held = torch.get_num_threads()
                torch.set_num_threads(1)
        yield
    finally:
        with _guard:
            _readers -= 1
            if _readers == 0 and _held:
                torch.set_num_threads(_held)
                _held = 0
