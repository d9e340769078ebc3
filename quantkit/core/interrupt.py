"""Ctrl-C and SIGTERM, which always end a job: a signal is remembered until some step of the job has heard of it.

Python's own handler raises KeyboardInterrupt wherever the main thread happens to be. That is quick, but not sure:
inside a ``__del__``, a callback of C code or a library's ``except:`` the exception is printed or dropped, and the job
runs on. So our handler raises at once *and* remembers the signal, and every step of every long loop (a block, a batch,
a tuning step, a tensor, a token) calls ``raise_if_interrupted``. A second Ctrl-C raises at once again.

``handle_signals`` is for a process that is ours (the command line): from then on, until it ends. ``interruptible`` is
for functions that others call from their program: SIGINT alone, in the main thread, for the duration of the call, and
only in place of Python's default handler; elsewhere nothing changes. (SIGTERM then ends the process at once, as it
always does; a work folder survives that.)
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM came."""


_came: list[int] = []  # signals since the job began
_tidying = 0  # ``undisturbed`` blocks that are under way in the main thread


def raise_if_interrupted() -> None:
    """Raise Interrupted if a signal has come, also one whose exception was swallowed. Any thread may ask."""
    if _came and not _tidying:
        raise Interrupted


def was_interrupted() -> bool:
    """Whether a signal has come, whatever became of its exception."""
    return bool(_came)


def handle_signals() -> None:
    """Let SIGINT and SIGTERM interrupt this process from now on. For a main program, in the main thread."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _but_for_interrupts


def ignore_signals() -> None:
    """Let SIGINT and SIGTERM do nothing from now on: the process is about to end, and says so."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C surely end what runs inside. Also a decorator, but not of generators: they pause between steps.

    Does nothing outside the main thread, nor where a program has its own handler of SIGINT. Raises Interrupted at the
    end if a signal came whose exception was swallowed.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    hook = sys.unraisablehook
    try:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _but_for_interrupts
        yield
        raise_if_interrupted()
    except Exception as error:
        # an interrupt that arrives inside a library's compiled code may come out as any other exception
        if was_interrupted():
            raise Interrupted from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = hook
        _came.clear()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the end: for tidying up, which is quick and must be whole.

    They are recorded by handlers rather than masked: the system hands a masked signal to another thread of the process,
    and Python runs its handler in the main thread all the same. Other threads are not interrupted by Python's handlers.
    """
    global _tidying
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not None:  # one that was not installed from Python could not be put back
                before[number] = signal.signal(number, lambda number, _: late.append(number))
        _tidying += 1
        try:
            yield
        finally:
            _tidying -= 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in dict.fromkeys(late):
            signal.raise_signal(held)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    raise Interrupted


def _but_for_interrupts(unraisable: Any) -> None:
    """Say nothing of an interrupt that nobody could catch: the next step will hear of it."""
    if not issubclass(unraisable.exc_type, Interrupted):
        sys.__unraisablehook__(unraisable)
