"""The tiny model and the command line of the integration tests, for inputs that somebody made to do harm."""

from __future__ import annotations

from integration.conftest import calibration_text, quantkit, states_after_each_block, tiny_model, tiny_original

__all__ = ["calibration_text", "quantkit", "states_after_each_block", "tiny_model", "tiny_original"]
