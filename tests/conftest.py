"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantkit.core import interrupt


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A test that runs the program in this process leaves its signal handlers; the next test shall not meet them.

    An interrupt that nobody cleared would be raised by the next test that asks: the test that left it fails instead.
    """
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    hook = sys.unraisablehook
    for number, handler in own.items():  # before, too: a fixture of a module may have run the program
        signal.signal(number, handler)
    yield
    for number, handler in own.items():
        signal.signal(number, handler)
    sys.unraisablehook = hook
    left = interrupt.was_interrupted()
    interrupt._came.clear()
    assert not left, "an interrupt was left behind"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The cached GGUF model of ``quantkit fetch smollm2-135m``; skips the test if it cannot be had."""
    return _fetched("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The cached GGUF model of ``quantkit fetch gemma3-270m``; skips the test if it cannot be had."""
    return _fetched("gemma3-270m")


@pytest.fixture(scope="session")
def wikipedia() -> Path:
    """The cached folder of ``quantkit fetch wikipedia-sample``; skips the test if it cannot be had."""
    return _fetched("wikipedia-sample")


def _fetched(name: str) -> Path:
    from quantkit.checkpoint.fetch import fetch
    from quantkit.errors import QuantkitError

    try:
        return fetch(name)
    except QuantkitError as error:
        pytest.skip(f"{name} is not in the cache and cannot be downloaded: {error}")
