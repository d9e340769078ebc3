"""Facts planted in a long text and asked for at its end: does a quantized cache still find what it holds?

Each text carries one fact at each depth and ends with a question for each, in shuffled order::

    ... text ... The code of the green otter is 48213. ... text ... What is the code of the green otter? It is 48213.

The log-probability of the digits is compared, fact by fact, between the 16-bit cache and the quantized one: the same
weights, the same tokens. Passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300, section 4.2) with the probability
in place of a yes or no, which tells caches apart that all answer right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import RequestError, SourceError
from quantkit.evaluate.perplexity import LanguageModel, OnProgress, chosen, log_probs, mean_and_stderr

TEXTS = 4
DEPTHS = (0.05, 0.25, 0.45, 0.65, 0.85)
LEAST_TEXT = 256  # tokens of text around the facts: less than that stays at 16 bits anyway
COLOURS = ("green", "yellow", "black", "white", "purple", "orange", "silver", "golden")
ANIMALS = ("otter", "falcon", "badger", "turtle", "rabbit", "dolphin", "spider", "lizard")


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a fact's answer stands at the end of a text.

    Tokens ``start .. stop - 1``. depth: share of the text before the fact.
    """

    depth: float
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlantedText:
    """A text with facts planted in it. ids: int64 ``[tokens]``. answers: one for each fact, by depth."""

    ids: Tensor
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class PlantedFacts:
    """How well facts are answered with either cache.

    log_prob, log_prob_16_bit: log-probability of all tokens of an answer, in nats, mean over facts. difference:
    quantized cache minus 16-bit cache, paired; difference_stderr: over facts. answered, answered_16_bit: share of facts
    whose every token is the most likely one. by_depth: the same for the facts of each depth.
    """

    facts: int
    texts: int
    context: int
    log_prob_16_bit: float
    log_prob: float
    difference: float
    difference_stderr: float | None
    answered_16_bit: float
    answered: float
    by_depth: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every field."""
        return asdict(self)


def plant(
    tokenizer: Any,
    text_ids: Sequence[int] | NDArray[np.int32],
    *,
    seq_len: int,
    bos_id: int | None = None,
    texts: int = TEXTS,
    depths: Sequence[float] = DEPTHS,
    seed: int = 0,
) -> list[PlantedText]:
    """Make texts of ``seq_len`` tokens (BOS counted), each of other tokens of ``text_ids`` and with other facts.

    Raises RequestError where ``seq_len`` leaves no room, SourceError for a text that is too short.
    """
    chance = random.Random(seed)
    planted, at = [], 0
    for _ in range(texts):
        names = chance.sample([(colour, animal) for colour in COLOURS for animal in ANIMALS], len(depths))
        facts = [_fact(tokenizer, *name, chance.randrange(10_000, 100_000)) for name in names]
        room = seq_len - (bos_id is not None) - sum(len(part) for fact in facts for part in fact.parts)
        if room < LEAST_TEXT:
            raise RequestError(
                f"--planted-fact: windows of {seq_len} tokens leave {room} for text around {len(depths)} facts and"
                f" their questions; at least {LEAST_TEXT} are needed. Raise --seq-len to {seq_len - room + LEAST_TEXT}"
                " or more."
            )
        if at + room > len(text_ids):
            raise SourceError(
                f"--planted-fact: {texts} texts of {seq_len} tokens need more than the {len(text_ids)} tokens of the"
                " text. Lower --seq-len, or take a longer text."
            )
        order = chance.sample(range(len(depths)), len(depths))
        planted.append(_assemble([int(token) for token in text_ids[at : at + room]], facts, depths, order, bos_id))
        at += room
    return planted


@dataclass(frozen=True, slots=True)
class _Fact:
    """Token ids of one fact: its statement, the question, the answer and what ends the sentence."""

    statement: list[int]
    question: list[int]
    answer: list[int]
    end: list[int]

    @property
    def parts(self) -> tuple[list[int], ...]:
        return self.statement, self.question, self.answer, self.end


def _fact(tokenizer: Any, colour: str, animal: str, code: int) -> _Fact:
    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    stated, answer, end = ids(f" The code of the {colour} {animal} is"), ids(f" {code}"), ids(".")
    question = ids(f" What is the code of the {colour} {animal}? The code of the {colour} {animal} is")
    return _Fact(stated + answer + end, question, answer, end)


def _assemble(
    text: Sequence[int], facts: Sequence[_Fact], depths: Sequence[float], order: Sequence[int], bos_id: int | None
) -> PlantedText:
    """Put the facts into the text at their depths, and the questions, in this order, behind it."""
    ids = [] if bos_id is None else [bos_id]
    before = 0
    for fact, depth in zip(facts, depths, strict=True):
        cut = int(depth * len(text))
        ids += [*text[before:cut], *fact.statement]
        before = cut
    ids += text[before:]
    answers = {}
    for which in order:
        fact = facts[which]
        ids += fact.question
        answers[which] = Answer(depths[which], len(ids), len(ids) + len(fact.answer))
        ids += [*fact.answer, *fact.end]
    return PlantedText(torch.tensor(ids, dtype=torch.int64), tuple(answers[i] for i in range(len(facts))))


@torch.inference_mode()
def answer_log_probs(model: LanguageModel, text: PlantedText) -> tuple[Tensor, Tensor]:
    """Ask a model for every fact of a text.

    Returns the log-probability of each answer in nats, float64 ``[facts]``, and whether each of its tokens is the most
    likely one, bool ``[facts]``.
    """
    hidden = model.hidden(text.ids[None])[0]
    total, right = [], []
    for answer in text.answers:
        targets = text.ids[answer.start : answer.stop]
        predicted = log_probs(model, hidden[answer.start - 1 : answer.stop - 1])
        total.append(-chosen(predicted, targets).sum())
        right.append(bool((predicted.argmax(-1).cpu() == targets).all()))
    return torch.stack(total), torch.tensor(right)


def measure_planted(
    exact: LanguageModel, model: LanguageModel, texts: Sequence[PlantedText], progress: OnProgress | None = None
) -> PlantedFacts:
    """Ask for every fact of every text with both caches.

    exact: with its 16-bit cache. model: the same weights with the quantized one.
    """
    rows = []
    for index, text in enumerate(texts):
        rows.append((*answer_log_probs(exact, text), *answer_log_probs(model, text)))
        if progress is not None:
            progress("planted facts", index + 1, len(texts))
    columns = [torch.stack(column).double() for column in zip(*rows, strict=True)]
    depths = [answer.depth for answer in texts[0].answers]
    each = [{"depth": depth, **_figures(*(column[:, i] for column in columns))} for i, depth in enumerate(depths)]
    overall = _figures(*columns)
    return PlantedFacts(columns[0].numel(), len(texts), len(texts[0].ids), by_depth=each, **overall)


def _figures(exact: Tensor, exact_right: Tensor, quantized: Tensor, quantized_right: Tensor) -> dict[str, Any]:
    difference, stderr = mean_and_stderr((quantized - exact).reshape(-1, 1))
    return {
        "log_prob_16_bit": float(exact.mean()),
        "log_prob": float(quantized.mean()),
        "difference": difference,
        "difference_stderr": stderr,
        "answered_16_bit": float(exact_right.mean()),
        "answered": float(quantized_right.mean()),
    }
