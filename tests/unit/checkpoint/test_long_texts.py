"""A long text is tokenized in pieces: the ids are those of the whole."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.checkpoint import long_texts, tokenizer
from quantkit.checkpoint.tokenizer import ENGLISH, ROUND_TRIP_TEXT, long_text_ids, token_ids
from quantkit.errors import RequestError, SourceError
from quantkit.runtime.generate import prompts

GPT2 = ("<s>", "</s>", "<unk>")


def trained(model: Any, trainer: type, normalizer: Any = None, splitter: Any = None, **options: Any) -> Tokenizer:
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    words = [ENGLISH, ROUND_TRIP_TEXT, "aaaaaaaa" * 8, "    " * 8, "1234567890" * 8] * 4
    options.setdefault("special_tokens", list(GPT2))
    made.train_from_iterator(words, trainer(vocab_size=600, show_progress=False, **options))
    return made


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = trained(models.BPE(), trainers.BpeTrainer, None, splitter, initial_alphabet=alphabet)
    made.decoder = decoders.ByteLevel()
    return made


def one_word() -> Tokenizer:
    """As Llama 2: to the merges the whole text is one word."""
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    split = normalizers.Replace(" ", "▁")  # merges learned of words, not of whole texts
    made = trained(
        models.BPE(unk_token="<unk>"), trainers.BpeTrainer, split, pre_tokenizers.Split("▁", "merged_with_next")
    )
    made.pre_tokenizer = None
    made.normalizer = marks
    return made


def unigram() -> Tokenizer:
    """As T5 and XLM-R."""
    return trained(
        models.Unigram(), trainers.UnigramTrainer, normalizers.NFKC(), pre_tokenizers.Metaspace(), unk_token="<unk>"
    )


def word_pieces() -> Tokenizer:
    """As BERT."""
    return trained(
        models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )  # fmt: skip


KINDS = [byte_level, one_word, unigram, word_pieces]


def wrapped(made: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def mixed(seed: int) -> str:
    """Words, code, digits, several scripts, runs of one letter, and special tokens, in any order."""
    random = Random(seed)
    words = [*ROUND_TRIP_TEXT.split(" "), *ENGLISH.split(), "12345", "</s>", "a" * 50, "    ", "\n\n", "é", "\u0301"]
    return "".join(random.choice(words) + random.choice([" ", " ", "", "\n"]) for _ in range(6_000))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (long_texts, tokenizer, prompts):
        monkeypatch.setattr(module, "PIECE", 3_000)
    monkeypatch.setattr(long_texts, "OVERLAPS", (300, 1_000))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_ids_of_the_whole(kind: Any) -> None:
    loaded = wrapped(kind())
    for seed in range(3):
        text = mixed(seed)
        whole = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert len(text) > 5 * 3_000
        assert long_text_ids(loaded, text).tolist() == whole
        assert token_ids(loaded, text) == whole
        for most in (1, 700, len(whole) - 1, len(whole) + 1):
            assert long_text_ids(loaded, text, most).tolist() == whole[:most]


@pytest.mark.parametrize("text", ["a" * 20_000, "7" * 20_000, " " * 20_000, "\n" * 20_000, "😀" * 7_000, "ab" * 9_000])
def test_a_text_of_one_letter_is_cut_where_its_tokens_are(text: str) -> None:
    loaded = wrapped(byte_level())
    assert long_text_ids(loaded, text).tolist() == loaded(text, add_special_tokens=False, verbose=False)["input_ids"]


def test_a_text_that_cannot_be_cut_is_refused() -> None:
    """Where a mark stands before each text, all later tokens of one letter repeated begin elsewhere."""
    merges = [("▁", "a"), ("a", "a"), ("aa", "aa")]
    words = ["<unk>", "<s>", "</s>", "▁", "a", *("".join(merge) for merge in merges)]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>"))
    made.normalizer = normalizers.Prepend("▁")
    with pytest.raises(SourceError, match=r"cut in two.*at most 3,000 characters"):
        long_text_ids(wrapped(made), "a" * 20_001)


def test_special_tokens_stand_around_a_long_text() -> None:
    from tokenizers.processors import TemplateProcessing

    made = byte_level()
    ids = [("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>"))]
    made.post_processor = TemplateProcessing(single="<s> $A </s>", pair=None, special_tokens=ids)
    loaded, text = wrapped(made), mixed(0)
    assert token_ids(loaded, text, special=True) == loaded(text, verbose=False)["input_ids"]
    assert token_ids(loaded, text, special=True)[0] == ids[0][1]


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    loaded = wrapped(byte_level())
    longest = max(map(len, loaded.get_vocab()))
    text = mixed(1)[:20_000]
    count = len(token_ids(loaded, text))

    def ids(given: str, context: int | None) -> int:
        return len(prompts.prompt_ids(loaded, given, special=False, context=context))

    assert ids(text, None) == ids(text, count) == count
    with pytest.raises(RequestError, match=rf"context of {count - 1}\. Shorten the prompt"):
        ids(text, count - 1)
    with pytest.raises(RequestError, match=f"20,000 characters.*context of 64 tokens.*at most {longest} characters"):
        ids(text, 64)
    with pytest.raises(RequestError, match="16,000,000 characters"):
        prompts.prompt_ids(SimpleNamespace(get_vocab=lambda: {"ab": 0}), "a" * 16_000_000, special=True, context=99)
    assert ids("a b" * 900, 64) > 64  # a short one is tokenized, and its tokens are named by who counts the answer's
