"""From logits to a token: pure functions on float32 logits ``[vocab]`` (or ``[..., vocab]``).

Order, as in transformers: repetition penalty, temperature, top-k, top-p, min-p. A token that is ruled out gets
``-inf``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RequestError

SMALLEST = 5e-324  # the least float above 0
LARGEST = 1.7976931348623157e308  # the largest float
MOST_TOKENS = 2**31 - 1  # beyond any context and any vocabulary
MOST_SEED = 2**64 - 1  # what torch's generators take
MOST_PENALTY = 1e6  # beyond it a logit overflows, and what is drawn means nothing
PENALTIES = "above 0 (0.000001 to 1000000); 1 is off"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate; validated once.

    max_tokens: new tokens at most.
    temperature: 0 takes the most likely token (greedy).
    top_k: keep the k most likely (0: all).
    top_p: keep the smallest set whose probability reaches p.
    min_p: drop tokens below this fraction of the most likely one.
    repetition_penalty: above 1 makes tokens of the prompt and the answer less likely (arXiv 1909.05858).
    seed: each prompt has a random generator of its own with this seed.
    stop: strings that end the answer; not part of it.
    stop_tokens: the same for token ids.
    ignore_eos: go on past the model's end token.
    chat: use the chat template on a plain string prompt.
    deterministic: the same prompt and options get the same tokens alone and in any batch (both with this option, on one
        machine, with one number of threads). Without it they mostly do, in bfloat16 less often than in float32: a
        matrix product rounds differently for another number of rows, and where two tokens are almost equally likely the
        last bit decides. The cost is the speed of a batch: each prompt is read alone, and each token computed alone,
        except where the compiled decode step of a CPU runs (float32), which takes 8 sequences. All of a batch get it if
        one asks.

    Raises RequestError naming the option and its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    chat: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _items("stop", stop, "non-empty strings"))
        object.__setattr__(self, "stop_tokens", _items("stop_tokens", self.stop_tokens, "token ids, 0 or more"))
        _whole("max_tokens", self.max_tokens, 1, MOST_TOKENS, "at least 1")
        _whole("top_k", self.top_k, 0, MOST_TOKENS, "0 (off) or the number of tokens to keep")
        _whole("seed", self.seed, 0, MOST_SEED, "0 or more, below 2**64")
        _number("temperature", self.temperature, 0.0, LARGEST, "0 (greedy) or more")
        _number("top_p", self.top_p, SMALLEST, 1.0, "above 0, at most 1 (off)")
        _number("min_p", self.min_p, 0.0, 1.0, "0 (off) to 1")
        _number("repetition_penalty", self.repetition_penalty, 1 / MOST_PENALTY, MOST_PENALTY, PENALTIES)
        for text in self.stop:
            if not isinstance(text, str) or not text or any("\ud800" <= letter <= "\udfff" for letter in text):
                raise RequestError(f"stop={_shown(text)}: stop strings are non-empty strings that UTF-8 holds.")
        for token in self.stop_tokens:
            _whole("stop_tokens", token, 0, MOST_TOKENS, "token ids, 0 or more")
        for name in ("ignore_eos", "chat", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={_shown(getattr(self, name))}: expected True or False.")


def check_options(options: Sequence[Any], vocabulary: int) -> None:
    """Check the options of a batch against the model that they are for.

    options: one per prompt.
    vocabulary: token ids that the model has.

    Raises RequestError for anything but ``GenerationOptions``, and for a stop token that the model does not have.
    """
    for given in options:
        if not isinstance(given, GenerationOptions):
            raise RequestError(f"options: {_shown(given)}. Give GenerationOptions, one for all or one per prompt.")
        for token in given.stop_tokens:
            if token >= vocabulary:
                raise RequestError(f"stop_tokens: {token} is no token of this model, which has {vocabulary}.")


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name}={_shown(value)}: expected a list of {expected}.")
    return tuple(value)


def _whole(name: str, value: object, least: int, most: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{name}={_shown(value)}: expected {expected}.")


def _number(name: str, value: object, low: float, high: float, expected: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(f"{name}={_shown(value)}: expected {expected}.")


def _shown(value: object) -> str:
    """Write a value as an error shows it: the beginning, and no number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    words = repr(value)
    return words if len(words) <= 100 else f"{words[:100]}..."


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of the token ids in ``seen`` by ``penalty``."""
    if penalty == 1.0 or not seen.numel():
        return logits
    chosen = logits[seen]
    return logits.index_copy(-1, seen, torch.where(chosen > 0, chosen / penalty, chosen * penalty))


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Rule out all but the k largest; exactly k stay, also among equals."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    best = logits.topk(k, dim=-1)
    return torch.full_like(logits, -math.inf).scatter(-1, best.indices, best.values)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Rule out all but the smallest set of most likely tokens whose probability is at least ``p``; one at least."""
    if p >= 1.0:
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what the more likely ones already cover
    ruled_out = before >= p
    ruled_out[..., 0] = False
    return logits.masked_fill(torch.zeros_like(ruled_out).scatter(-1, order, ruled_out), -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Rule out tokens whose probability is below ``p`` times the largest one."""
    if p == 0.0:
        return logits
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


def probabilities(logits: Tensor, options: GenerationOptions) -> Tensor:
    """Return the distribution to draw from, float32 ``[..., vocab]``; the penalty is applied before.

    logits: ``[..., vocab]``.
    options: with ``temperature > 0``.
    """
    # Shifted first and divided in float64: a tiny temperature would otherwise give inf - inf.
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    scaled = (shifted / options.temperature).float()
    kept = keep_min_p(keep_top_p(keep_top_k(scaled, options.top_k), options.top_p), options.min_p)
    return kept.softmax(-1)


def draw(probability: Tensor, uniform: float) -> int:
    """Return the token at a quantile of a distribution: the same on every device.

    probability: ``[vocab]``.
    uniform: the quantile, 0 <= u < 1.
    """
    cumulative = probability.double().cumsum(-1)
    index = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    return min(index, probability.shape[-1] - 1)


class Sampler:
    """Chooses the tokens of one request; owns its random generator and the ids it has seen."""

    def __init__(self, options: GenerationOptions, prompt: list[int]) -> None:
        self.options = options
        self._generator = torch.Generator().manual_seed(options.seed)
        self._seen = set(prompt)

    @property
    def seen(self) -> frozenset[int]:
        """Token ids of the prompt, and those chosen here."""
        return frozenset(self._seen)

    def uniforms(self, count: int) -> Tensor:
        """Draw the random numbers for the next ``count`` tokens, float64 ``[count]``; none where nothing is drawn."""
        drawn = count if self.options.temperature > 0 else 0
        return torch.rand(drawn, generator=self._generator, dtype=torch.float64)

    def __call__(self, logits: Tensor) -> int:
        """Return the next token id from logits ``[vocab]``."""
        logits = logits.float()
        if self.options.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._seen), dtype=torch.int64, device=logits.device)
            logits = penalize_repetition(logits, seen, self.options.repetition_penalty)
        if self.options.temperature == 0.0:
            # numpy's runs in this thread: torch's wakes its own, which then wait in the way of the kernels' threads
            token = int(logits.numpy().argmax()) if logits.device.type == "cpu" else int(logits.argmax(-1))
        else:
            uniform = float(torch.rand((), generator=self._generator, dtype=torch.float64))
            token = draw(probabilities(logits, self.options), uniform)
        self._seen.add(token)
        return token
