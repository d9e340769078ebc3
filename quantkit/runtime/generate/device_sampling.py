"""Choose tokens on the device, for a batch whose sequences each have options of their own.

No value comes back to the host. The arithmetic and its order are those of ``sampling.Sampler``, on the same random
numbers (a request's own generator on the host gives them beforehand), so a seed gives the token that the host would
have chosen from the same logits. Among equal logits at the border of top-k the choice may differ: here those with
smaller ids stay, ``torch.topk`` promises no order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.runtime.generate.sampling import GenerationOptions


@dataclass(frozen=True)
class SamplingMode:
    """What the sampling of a batch involves.

    draws: some temperature is above 0.
    ranks: top-k or top-p is used.
    penalizes: a repetition penalty is used.
    """

    draws: bool = False
    ranks: bool = False
    penalizes: bool = False

    @classmethod
    def of(cls, options: Sequence[GenerationOptions]) -> SamplingMode:
        """Return the mode that covers the options of all sequences."""
        drawn = [option for option in options if option.temperature > 0]
        ranks = any(option.top_k or option.top_p < 1 for option in drawn)
        return cls(bool(drawn), ranks, any(option.repetition_penalty != 1 for option in options))


class DeviceSampler:
    """Options of a number of sequences as tensors on a device.

    Sequences beyond those that are set take the most likely token.

    seen: bool ``[sequences, vocab]``, tokens of prompt and answer, once ``penalizes`` was asked for.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((sequences, 1), value, dtype=dtype, device=device)

        self.drawn = column(0, torch.bool)
        self.temperature = column(1.0, torch.float64)
        self.top_k = column(0, torch.int64)
        self.top_p = column(1.0, torch.float32)
        self.least = column(-math.inf, torch.float32)
        self.penalty = column(1.0, torch.float32)
        self.seen: Tensor | None = None

    def fill(self, options: Sequence[GenerationOptions]) -> None:
        """Set the first sequences; the others become greedy."""
        for name, values, other in (
            ("drawn", [option.temperature > 0 for option in options], 0),
            ("temperature", [option.temperature or 1.0 for option in options], 1.0),
            ("top_k", [option.top_k for option in options], 0),
            ("top_p", [option.top_p for option in options], 1.0),
            ("least", [math.log(option.min_p) if option.min_p else -math.inf for option in options], -math.inf),
            ("penalty", [option.repetition_penalty for option in options], 1.0),
        ):
            tensor: Tensor = getattr(self, name)
            whole = [*values, *[other] * (len(tensor) - len(options))]
            tensor.copy_(torch.tensor(whole, dtype=torch.float64)[:, None])

    def remember(self, sequences: Sequence[Sequence[int]], vocab: int) -> None:
        """Set the tokens that the first sequences have seen.

        sequences: token ids of prompt and answer of each.
        vocab: entries of a row of logits.
        """
        if self.seen is None:
            self.seen = torch.zeros(len(self.drawn), vocab, dtype=torch.bool, device=self.drawn.device)
        seen = torch.zeros(self.seen.shape, dtype=torch.bool)
        for row, tokens in enumerate(sequences):
            seen[row, torch.tensor(sorted(set(tokens)), dtype=torch.int64)] = True
        self.seen.copy_(seen)

    def choose(self, logits: Tensor, uniform: Tensor, mode: SamplingMode) -> Tensor:
        """Choose tokens int64 ``[sequences]``.

        logits: ``[sequences, vocab]``.
        uniform: float64 ``[sequences]``, used where a sequence draws.
        mode: what the sampling of the batch involves.
        """
        logits = logits.float()
        if mode.penalizes and self.seen is not None:
            punished = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
            logits = torch.where(self.seen & (self.penalty != 1), punished, logits)
        tokens = logits.argmax(-1)
        if mode.draws:
            tokens = torch.where(self.drawn[:, 0], self._draw(logits, uniform, mode), tokens)
        if mode.penalizes and self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        return tokens

    def _draw(self, logits: Tensor, uniform: Tensor, mode: SamplingMode) -> Tensor:
        shifted = logits.double() - logits.double().amax(-1, keepdim=True)
        scaled = (shifted / self.temperature).float()
        if mode.ranks:
            scaled = self._ranked(scaled)
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + self.least, -math.inf)
        cumulative = scaled.softmax(-1).double().cumsum(-1)
        target = cumulative[:, -1:] * uniform[:, None]
        index = torch.searchsorted(cumulative, target, right=True)[:, 0]
        return index.clamp(max=logits.shape[-1] - 1)

    def _ranked(self, logits: Tensor) -> Tensor:
        """Return ``keep_top_p(keep_top_k(logits))`` of every row."""
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[-1], device=logits.device)
        out = (rank >= self.top_k) & (self.top_k > 0)
        ranked = ranked.masked_fill(out, -math.inf)
        probabilities = ranked.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        out |= (before >= self.top_p) & (self.top_p < 1) & (rank > 0)
        return logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -math.inf)
