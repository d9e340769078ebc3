"""Perplexity: how surprised a model is by a text. Logits exist for one small chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import NumericsError
from quantkit.evaluate.windows import EvaluationWindows

# Gemma's logits of 24 windows of 1024 are 25 GB in float32. A chunk of 64 MB is 64 tokens of Gemma's vocabulary and 341
# of SmolLM2's: wide enough for the matmul to run at full speed.
CHUNK_BYTES = 64 * 2**20

OnProgress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``."""


class LanguageModel(Protocol):
    """What is evaluated: a trunk that gives hidden states and a head that turns them into logits."""

    @property
    def config(self) -> Any: ...

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Final hidden states, after the last norm: int64 ``[batch, tokens]`` -> ``[batch, tokens, hidden]``."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits, soft cap included: ``[batch, tokens, hidden]`` -> ``[batch, tokens, vocab]``."""


def chunk_tokens(vocab: int) -> int:
    """Return the number of tokens whose float32 logits fit in CHUNK_BYTES, at least one."""
    return max(1, CHUNK_BYTES // (4 * vocab))


def chunks(total: int, vocab: int) -> Iterator[slice]:
    """Yield slices that cover ``range(total)``, each with at most CHUNK_BYTES of float32 logits."""
    step = chunk_tokens(vocab)
    for start in range(0, total, step):
        raise_if_interrupted()
        yield slice(start, min(start + step, total))


def logit_columns(model: LanguageModel, hidden: Tensor) -> int:
    """Count the columns of the model's logits, by one token's hidden state.

    A padded head has more columns than the tokenizer has tokens.
    """
    return model.head(hidden[None, :1]).shape[-1]


def scored_hidden(model: LanguageModel, windows: EvaluationWindows, window: int) -> Tensor:
    """Run one window; return the hidden states behind its scored logits, ``[scored, hidden]``."""
    raise_if_interrupted()
    hidden = model.hidden(windows.ids[window : window + 1])
    return hidden[0, windows.first : -1]


def log_probs(model: LanguageModel, hidden: Tensor) -> Tensor:
    """Return log-softmax over the vocabulary, float32 ``[tokens, vocab]``, of hidden states ``[tokens, hidden]``."""
    return torch.log_softmax(model.head(hidden[None])[0].float(), dim=-1)


def chosen(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats of each target: float64 ``[tokens]`` on the host."""
    targets = targets.to(log_probabilities.device)
    return -log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double().cpu()


@torch.inference_mode()
def token_losses(model: LanguageModel, windows: EvaluationWindows, progress: OnProgress | None = None) -> Tensor:
    """Return the negative log-likelihood of each scored token in nats: float64 ``[windows, scored]``.

    Raises NumericsError when a loss is not finite.
    """
    losses = torch.empty(windows.count, windows.scored, dtype=torch.float64)
    for window in range(windows.count):
        hidden, targets = scored_hidden(model, windows, window), windows.targets(window)
        for part in chunks(windows.scored, logit_columns(model, hidden)):
            losses[window, part] = chosen(log_probs(model, hidden[part]), targets[part])
        check_finite(losses[window], window, "the model")
        if progress is not None:
            progress("evaluating", window + 1, windows.count)
    return losses


def check_finite(losses: Tensor, window: int, who: str) -> None:
    """Raise NumericsError, with the remedy, when a loss of this window is not finite."""
    bad = int((~torch.isfinite(losses)).sum())
    if bad:
        raise NumericsError(
            f"{bad} of {losses.numel()} tokens of window {window} have a loss that is not finite: {who} overflows or"
            " holds NaN weights. Evaluate with --dtype float32; if it stays, convert again and read the per-layer"
            " report, or evaluate the source itself."
        )


def mean_and_stderr(per_token: Tensor) -> tuple[float, float | None]:
    """Return the mean over all tokens, and the standard error of the mean estimated from the window means.

    per_token: float64 ``[windows, scored]``. The estimator is ``std(window means, n - 1) / sqrt(n)``: tokens inside a
    window depend on each other, windows hardly do. With a single window there is no estimate: None.
    """
    means = per_token.double().mean(dim=1)
    if means.numel() < 2:
        return float(means.mean()), None
    return float(means.mean()), float(means.std(unbiased=True)) / math.sqrt(means.numel())


def perplexity_of(losses: Tensor) -> tuple[float, float | None]:
    """Return ``exp(mean loss)`` and its standard error ``perplexity * stderr(mean loss)`` (first order)."""
    mean, stderr = mean_and_stderr(losses)
    perplexity = math.exp(mean) if mean < 700 else math.inf  # exp(710) overflows a float64
    return perplexity, None if stderr is None else perplexity * stderr
