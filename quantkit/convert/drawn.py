"""Random tokens for methods that read no text (``algorithms.DRAWN``): how large each channel gets hardly depends on what is said."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from quantkit.calibrate.data import Windows
from quantkit.checkpoint.tokenizer import wants_bos
from quantkit.convert.selftext import first_tokens

NAME = "random tokens"
TOKENS = 512


def draw(tokenizer: Any, vocab_size: int, limit: int | None, seed: int) -> Windows:
    """One window of TOKENS ordinary tokens, or of as many as the model's context ``limit`` allows. The same seed, the same tokens.

    Raises SourceError if the tokenizer has no ordinary token.
    """
    length = min(TOKENS, limit or TOKENS)
    ids = first_tokens(tokenizer, vocab_size, length, seed)[None]
    bos = wants_bos(tokenizer)
    if bos:
        ids[:, 0] = tokenizer.bos_token_id
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    return Windows(ids.to(torch.int64), NAME, digest, bos, seed)
