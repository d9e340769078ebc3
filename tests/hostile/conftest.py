"""The tiny model and the command line of the integration tests, for inputs that somebody made to do harm; limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hostile.limits import Limited
from integration.conftest import calibration_text, quantkit, states_after_each_block, tiny_model, tiny_original

__all__ = ["calibration_text", "limited", "quantkit", "states_after_each_block", "tiny_model", "tiny_original"]


@pytest.fixture(scope="session")
def limited() -> Iterator[Limited]:
    """Calls ``module:function`` in a child with limits on time and memory."""
    child = Limited("torch", "transformers", "quantkit.checkpoint.texts")
    yield child
    child.close()
