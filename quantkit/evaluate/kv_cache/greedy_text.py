"""Greedy text with a quantized cache beside greedy text with the 16-bit one: how far do they stay the same?

The same weights continue the same prompts. Once one token differs the texts part for good, so what counts is the share
before the first difference. (Agreement token by token on a given text is ``top1_agreement``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.evaluate.perplexity import OnProgress, mean_and_stderr

if TYPE_CHECKING:
    from quantkit.evaluate.windows import EvaluationWindows
    from quantkit.runtime.model import Model

PROMPTS = 8


@dataclass(frozen=True, slots=True)
class GreedyAgreement:
    """How long greedy text stays the same with either cache.

    tokens: written after each of ``prompts`` prompts of ``prompt_tokens`` tokens.
    share: of them that are equal until the first difference, mean over prompts; share_stderr: its standard error.
    identical: share of prompts without a difference.
    first_difference: tokens before it, prompt by prompt (``tokens`` where there is none).
    """

    prompts: int
    prompt_tokens: int
    tokens: int
    share: float
    share_stderr: float | None
    identical: float
    first_difference: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)


def measure_greedy(
    exact: Model, model: Model, windows: EvaluationWindows, tokens: int, progress: OnProgress | None = None
) -> GreedyAgreement:
    """Continue the beginnings of at most 8 windows by ``tokens`` tokens, so that prompt and answer fill a window."""
    prompt = windows.seq_len - tokens
    rows = windows.ids[:PROMPTS, :prompt].tolist()
    equal = []
    for index, row in enumerate(rows):
        equal.append(common(continued(exact, row, tokens), continued(model, row, tokens)))
        if progress is not None:
            progress("greedy text", index + 1, len(rows))
    shares: Tensor = torch.tensor(equal, dtype=torch.float64)[:, None] / tokens
    share, stderr = mean_and_stderr(shares)
    same = sum(count == tokens for count in equal) / len(equal)
    return GreedyAgreement(len(rows), prompt, tokens, share, stderr, same, equal)


def check_greedy(tokens: int, seq_len: int) -> None:
    """Raise RequestError where ``tokens`` leaves no room for a prompt in a window."""
    if not 1 <= tokens < seq_len:
        raise RequestError(
            f"--greedy {tokens}: prompt and answer share a window of {seq_len} tokens; give 1 to {seq_len - 1}."
        )


def continued(model: Model, prompt: Sequence[int], tokens: int) -> list[int]:
    """Continue a prompt greedily, past end tokens, by the loop that ``quantkit generate`` runs."""
    from quantkit.runtime.generate.loop import run
    from quantkit.runtime.generate.sampling import GenerationOptions

    options = GenerationOptions(max_tokens=tokens, ignore_eos=True)
    pieces = run(model, [prompt], [options], end_tokens=(), context=model.context)
    return next(piece.done.tokens for piece in pieces if piece.done is not None)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens are equal from the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
