"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


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
