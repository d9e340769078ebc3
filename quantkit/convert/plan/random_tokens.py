"""Random tokens in place of a calibration text, for methods that read none (``algorithms.DRAWN``).

They measure how large each channel gets, which hardly depends on the text.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from quantkit.calibrate.data import CalibrationWindows
from quantkit.checkpoint.tokenizer import wants_bos
from quantkit.convert.plan.self_calibration import first_tokens

NAME = "random tokens"
TOKENS = 512


def draw(tokenizer: Any, vocab_size: int, limit: int | None, seed: int) -> CalibrationWindows:
    """Draw one window of TOKENS ordinary tokens, or of as many as the model's context ``limit`` allows.

    The same seed gives the same tokens: int64 ``[1, tokens]``, BOS first where the model wants one.

    Raises SourceError if the tokenizer has no ordinary token.
    """
    length = min(TOKENS, limit or TOKENS)
    ids = first_tokens(tokenizer, vocab_size, length, seed)[None]
    bos = wants_bos(tokenizer)
    if bos:
        ids[:, 0] = tokenizer.bos_token_id
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return CalibrationWindows(ids.to(torch.int64), NAME, digest, bos, seed)


# prompt of the smoke test where there is no calibration text
FALLBACK = "The first time that"


def fallback(tokenizer: Any) -> list[int]:
    """Return the tokens of FALLBACK."""
    return [int(token) for token in tokenizer(FALLBACK)["input_ids"]]
