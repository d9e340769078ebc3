"""Planted facts: where they and their questions stand, and what a model's answers are made of."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from quantkit.errors import RequestError, SourceError
from quantkit.evaluate.kv_cache.planted_facts import (
    DEPTHS,
    Answer,
    PlantedText,
    answer_log_probs,
    measure_planted,
    plant,
)

TEXT = list(range(1000, 4000))


class Letters:
    """A tokenizer: one token a character, below 1000."""

    def __call__(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def spoken(ids):
    return "".join(chr(i) if i < 1000 else "_" for i in ids.tolist())


def test_every_question_is_answered_by_the_fact_that_was_planted_at_its_depth():
    (text, *_) = planted = plant(Letters(), TEXT, seq_len=1024, bos_id=7)
    assert len(planted) == 4
    assert text.ids[0] == 7
    assert all(len(one.ids) == 1024 for one in planted)
    words = spoken(text.ids)
    for answer, depth in zip(text.answers, DEPTHS, strict=True):
        assert answer.depth == depth
        code = words[answer.start : answer.stop]
        assert code[0] == " "
        assert code[1:].isdecimal()
        name = words[: answer.start].rpartition("The code of the ")[2].removesuffix(" is")
        fact = f" The code of the {name} is{code}."
        assert words.count(fact) == 2, "stated once, and once in the answer"
        before = [i for i in text.ids[: words.index(fact)].tolist() if i >= 1000]
        room = (text.ids >= 1000).sum().item()
        assert len(before) == int(depth * room)


def test_texts_differ_and_a_seed_gives_the_same_ones_again():
    one, again = (plant(Letters(), TEXT, seq_len=1024, seed=3) for _ in range(2))
    assert all(torch.equal(a.ids, b.ids) and a.answers == b.answers for a, b in zip(one, again, strict=True))
    assert len({tuple(text.ids.tolist()) for text in one}) == 4
    assert not torch.equal(one[0].ids, plant(Letters(), TEXT, seq_len=1024, seed=4)[0].ids)
    kept = [i for text in one for i in text.ids.tolist() if i >= 1000]
    assert kept == TEXT[: len(kept)], "each text has its own stretch of the words given"


def test_no_room_and_too_little_text_are_told_with_what_helps():
    with pytest.raises(RequestError, match=r"Raise --seq-len to (\d+)") as error:
        plant(Letters(), TEXT, seq_len=500)
    enough = int(str(error.value).split("--seq-len to ")[1].split()[0])
    assert plant(Letters(), TEXT, seq_len=enough)
    with pytest.raises(RequestError):
        plant(Letters(), TEXT, seq_len=enough - 1)
    with pytest.raises(SourceError, match="take a longer text"):
        plant(Letters(), TEXT[:1000], seq_len=1024)


class Sure:
    """Gives the right next token a probability of its own at each place of a text."""

    config = SimpleNamespace()

    def __init__(self, text: PlantedText, probability: dict[int, float], vocabulary: int = 6) -> None:
        self.logits = torch.zeros(len(text.ids), vocabulary)
        for place, p in probability.items():
            self.logits[place - 1] = math.log((1 - p) / (vocabulary - 1))
            self.logits[place - 1, text.ids[place]] = math.log(p)

    def hidden(self, input_ids):
        return self.logits[None]

    def head(self, hidden):
        return hidden


def test_an_answers_log_probability_is_the_sum_over_its_tokens():
    text = PlantedText(torch.tensor([0, 1, 2, 3, 4, 5]), (Answer(0.5, 2, 4), Answer(0.9, 5, 6)))
    found, right = answer_log_probs(Sure(text, {2: 0.9, 3: 0.5, 5: 0.1}), text)
    assert found.tolist() == pytest.approx([math.log(0.45), math.log(0.1)], rel=1e-5)
    assert right.tolist() == [True, False]


def test_the_difference_is_paired_fact_by_fact():
    text = PlantedText(torch.tensor([0, 1, 2, 3, 4, 5]), (Answer(0.1, 1, 2), Answer(0.8, 4, 5)))
    exact, worse = Sure(text, {1: 0.8, 4: 0.9}), Sure(text, {1: 0.4, 4: 0.1})
    found = measure_planted(exact, worse, [text, text])
    assert (found.facts, found.texts, found.context) == (4, 2, 6)
    near, far = math.log(0.1 / 0.9), math.log(0.4 / 0.8)
    assert found.difference == pytest.approx((near + far) / 2, rel=1e-5)
    assert found.difference == pytest.approx(found.log_prob - found.log_prob_16_bit)
    spread = torch.tensor([near, far, near, far]).std().item() / 2
    assert found.difference_stderr == pytest.approx(spread, rel=1e-4)
    assert (found.answered_16_bit, found.answered) == (1.0, 0.5)
    assert [one["depth"] for one in found.by_depth] == [0.1, 0.8]
    assert [one["difference"] for one in found.by_depth] == pytest.approx([far, near], rel=1e-5)
    assert [one["difference_stderr"] for one in found.by_depth] == pytest.approx([0, 0], abs=1e-6)
