"""Ctrl-C and SIGTERM: remembered when their exception is swallowed, held back while something is tidied up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from quantkit.core.interrupt import Interrupted, interruptible, raise_if_interrupted, undisturbed, was_interrupted


class Swallows:
    """What runs in a ``__del__`` cannot raise: Python prints the exception and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_swallowed_in_a_destructor_is_raised_by_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []

    @interruptible()
    def job() -> None:
        for step in range(3):
            raise_if_interrupted()
            steps.append(step)
            if step == 1:
                Swallows()

    with pytest.raises(Interrupted):
        job()
    assert steps == [0, 1]
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not was_interrupted()
    raise_if_interrupted()  # the next call has nothing to do with it


def test_an_interrupt_swallowed_after_the_last_step_is_raised_at_the_end() -> None:
    with pytest.raises(Interrupted), interruptible():
        Swallows()


def test_an_interrupt_that_a_library_turns_into_another_error_stays_one() -> None:
    @interruptible()
    def job() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("the interpreter said no") from None

    with pytest.raises(Interrupted) as caught:
        job()
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_second_interrupt_raises_at_once_again() -> None:
    reached = []

    @interruptible()
    def job() -> None:
        Swallows()
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")

    with pytest.raises(Interrupted):
        job()
    assert reached == ["after the first"]


def test_another_error_is_left_as_it_is() -> None:
    with pytest.raises(ValueError, match="its own"), interruptible():
        raise ValueError("its own")


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append("theirs"))
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        raise_if_interrupted()
    assert came == ["theirs"]


def test_outside_the_main_thread_nothing_changes() -> None:
    seen = []

    def work() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_the_handler_of_sigterm_is_left_alone_in_a_library_call() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interruptible():
        assert signal.getsignal(signal.SIGTERM) is before


def test_nobody_asks_while_something_is_tidied_up() -> None:
    done = []

    @interruptible()
    def job() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            with undisturbed():
                raise_if_interrupted()
                done.append("tidied up")

    with pytest.raises(Interrupted):
        job()
    assert done == ["tidied up"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_until_everything_is_tidied_up(number: signal.Signals) -> None:
    done, wait = [], threading.Event()
    before = signal.signal(number, lambda *_: done.append("interrupted"))
    try:
        other = threading.Thread(target=wait.wait)
        other.start()
        with undisturbed():
            os.kill(os.getpid(), number)  # to the process: the system picks the thread
            done.append("tidied up")
    finally:
        signal.signal(number, before)
        wait.set()
        other.join()
    assert done == ["tidied up", "interrupted"]


SWALLOWED = """
import signal, sys
import quantkit.evaluate.perplexity as stage
import quantkit.core.interrupt
class Swallows:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))
ask = stage.raise_if_interrupted
def asked():
    Swallows()
    ask()
    sys.exit("went on")
import quantkit.cli.main as program
import click
program.COMMANDS["swallow"] = "Meet an interrupt in a destructor."
program.Commands.get_command = lambda self, ctx, name: click.Command("swallow", callback=asked)
sys.argv = ["quantkit", "swallow"]
program.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_ends_with_130_though_the_interrupt_was_swallowed(number: signal.Signals) -> None:
    code = SWALLOWED.replace("int(sys.argv[1])", str(int(number)))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr.strip() == "Error: Interrupted."
