"""Work that does not depend on what comes before it, done beside the caller's, results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def ahead(work: Callable[[T], R], items: Iterable[T], threads: int = 2) -> Iterator[R]:
    """Yield ``work(item)`` for each item in order, the next ones begun in other threads meanwhile.

    work: mostly waits, or computes where Python's lock is free: reading, hashing, torch. items: what it is given.
    threads: how many results are in the making, or wait to be taken. With 0, and in a process that torch has one thread
    in, nothing runs beside.

    Raises what ``work`` raised, in its turn; what is under way ends before that, what has not begun never does.
    """
    if not threads or torch.get_num_threads() == 1:
        yield from map(work, items)
        return
    waiting = deque[Future[R]]()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ahead")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
