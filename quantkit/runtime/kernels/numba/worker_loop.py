"""The loop of the worker threads (``threads.py``): look for a job, do a share of it, sleep when none comes."""

from __future__ import annotations

import numpy as np
from numba import carray

from quantkit.runtime.kernels.numba.gemm import JOB_GEMM, gemm
from quantkit.runtime.kernels.numba.gemv import (
    ASLEEP,
    DONE,
    JOB,
    JOB_AT,
    JOB_FLOATS,
    JOB_LINEAR,
    SEQUENCE,
    YIELD_AFTER,
    floats,
    jit,
    linear,
    sched_yield,
)  # fmt: skip
from quantkit.runtime.kernels.numba.ir import atomic_add, atomic_load, atomic_swap, relax, table
from quantkit.runtime.kernels.numba.step import step
from quantkit.runtime.kernels.numba.step_fields import JOB_STEP

LONGEST = 1 << 30  # fields of a job: numba wants a number


@jit
def execute(control, part, parts):
    """Do this part's share of the job."""
    job = carray(table(atomic_load(control + JOB_AT)), (LONGEST,))
    if job[JOB] == JOB_LINEAR:
        linear(job, part, parts)
    elif job[JOB] == JOB_FLOATS:
        floats(job, part, parts)
    elif job[JOB] == JOB_GEMM:
        gemm(job, control, part, parts)
    elif job[JOB] == JOB_STEP:
        step(job, control, part, parts)


@jit
def work(control, part, seen, patience):
    """Run a worker: do its share of every job that is posted after number ``seen``.

    After ``patience`` empty looks mark itself asleep and return the number of the last one. SEQUENCE holds
    ``number * 256 + parts``.
    """
    looks = 0
    while True:
        now = atomic_load(control + SEQUENCE)
        if now != seen:
            seen, looks = now, 0
            if part < now & 255:
                execute(control, part, now & 255)
                atomic_add(control + DONE, 1)
            continue
        looks += 1
        relax()
        if looks > patience:
            atomic_swap(control + ASLEEP + 64 * part, 1)
            if atomic_load(control + SEQUENCE) == seen or atomic_swap(control + ASLEEP + 64 * part, 0) == 0:
                return seen  # whoever posts next sees the mark, or has seen it already and wakes us
            looks = 0


@jit
def post(control, job, parts):
    """Announce the job at address ``job``; return a bit for each worker that must be woken."""
    atomic_swap(control + DONE, 0)
    atomic_swap(control + JOB_AT, job)
    number = atomic_load(control + SEQUENCE) >> 8
    atomic_swap(control + SEQUENCE, ((number + 1) << 8) | parts)
    asleep = 0
    for part in range(1, parts):
        if atomic_swap(control + ASLEEP + 64 * part, 0) == 1:
            asleep |= 1 << part
    return asleep


@jit
def finish(control, parts):
    """Do the caller's share, then wait for the others."""
    execute(control, np.int64(0), parts)  # a literal would be a type of its own, and all of it compiled twice
    looks = 0
    while atomic_load(control + DONE) != parts - 1:
        looks += 1
        relax()
        if looks > YIELD_AFTER:
            sched_yield()


@jit
def idle(control):
    """Whether every worker is through with the last job: what ``finish`` waits for, asked after an interrupt."""
    return atomic_load(control + DONE) >= (atomic_load(control + SEQUENCE) & 255) - 1


@jit
def number(control):
    """The job number that a new worker starts at: it must not do a job that was posted before it was there."""
    return atomic_load(control + SEQUENCE)
