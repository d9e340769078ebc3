"""Tokenizers: rebuilt from GGUF id for id, proved by a round trip, written for transformers 4 and 5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quantkit.checkpoint.gguf_files import vocabulary
from quantkit.checkpoint.gguf_files.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    merges_from_scores,
    rebuild,
)
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.texts import load_text
from quantkit.checkpoint.tokenizer import ROUND_TRIP_TEXT, check_round_trip, load_tokenizer, wants_bos, write_tokenizer
from quantkit.errors import RequestError, SourceError, UnsupportedModel

Metadata = dict[str, Any]
SENTENCES = "In 1984, don't count to 12345:\n\n1 one\n\n2  two\n\tprint(x[0])  # 100%\r\n naïve 中文 <a> </s>x"


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return load_text("builtin", split="calibration").text[:300_000].split("\n\n")


def train(corpus: list[str], pre: Any, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE tokenizer of 2,000 tokens, as a model maker would train it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|end|>", "<|start|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> Metadata:
    """What llama.cpp's converter writes for it."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if t.startswith("<|") else NORMAL for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m['content'] }}{% endfor %}",
    }


def words(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
ORIGINALS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": words(vocabulary.LLAMA3_WORDS),
    "qwen2": words(vocabulary.QWEN2_WORDS),
    "gpt-4o": words(vocabulary.GPT4O_WORDS),
}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_vocabulary_gives_the_originals_ids(pre: str, corpus: list[str]) -> None:
    original = train(corpus, ORIGINALS[pre], normalizers.NFC() if pre == "qwen2" else None)
    rebuilt = rebuild(byte_level_metadata(original, pre), Path("x.gguf"))
    for text in (SENTENCES, ROUND_TRIP_TEXT, *corpus[-20:]):
        assert rebuilt.tokenizer.encode(text).ids == original.encode(text).ids
    assert rebuilt.special == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert rebuilt.add_bos is False


def test_rows_without_a_token_are_none(corpus: list[str]) -> None:
    """Embeddings have more rows than tokens (Qwen's); llama.cpp's converter names those, the original does not."""
    original = train(corpus, GPT2)
    metadata = byte_level_metadata(original, "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{size}]", f"[PAD{size + 1}]", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, NORMAL, UNUSED]
    metadata["tokenizer.ggml.padding_token_id"] = size
    rebuilt = rebuild(metadata, Path("x.gguf"))
    more = {f"[PAD{size + 1}]": size + 1, "[PAD1]": size + 2}  # tokens that are called so, or of another row
    assert rebuilt.tokenizer.get_vocab() == {**original.get_vocab(), **more}
    assert "pad_token" not in rebuilt.special


def test_digit_rule_matters(corpus: list[str]) -> None:
    joined = "\n\n".join(corpus)  # so that a blank line becomes a token
    metadata = byte_level_metadata(train([joined], ORIGINALS["smollm"]), "smollm")
    right = rebuild(metadata, Path("x.gguf")).tokenizer.encode("a\n\n1").tokens
    wrong = rebuild(metadata | {"tokenizer.ggml.pre": "gpt-2"}, Path("x.gguf")).tokenizer.encode("a\n\n1").tokens
    assert (right, wrong) == (["a", "ĊĊ", "1"], ["a", "Ċ", "Ċ", "1"])


def sentencepiece(corpus: list[str], prefix: bool) -> tuple[Tokenizer, Metadata]:
    """A SentencePiece-like BPE with byte fallback, and its GGUF metadata: scores instead of merges."""
    mark = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark]) if prefix else mark
    # Real vocabularies hold no piece across words; training without this would fill ours with phrases.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    special = ["<unk>", "<s>", "</s>", "<turn>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab, rank = model["vocab"], {}
    for i, merge in enumerate(model["merges"]):
        rank.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ")), i)
    tokens = sorted(vocab, key=vocab.get)
    kinds = [CONTROL if i < 4 else BYTE if i < 260 else NORMAL for i in range(len(tokens))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(rank.get(token, 10_000)) for token in tokens],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return tokenizer, metadata


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_are_recovered_from_scores(prefix: bool, corpus: list[str]) -> None:
    original, metadata = sentencepiece(corpus, prefix)
    rebuilt = rebuild(metadata, Path("x.gguf"))
    plain = " ".join(corpus[-30:])
    assert rebuilt.tokenizer.encode(plain, add_special_tokens=False).ids == original.encode(plain).ids
    assert rebuilt.add_bos is True  # what llama.cpp does for a file that does not say
    assert rebuilt.tokenizer.encode("word").ids[0] == 1
    for text in (ROUND_TRIP_TEXT, SENTENCES.replace("</s>", "")):
        ids = rebuilt.tokenizer.encode(text, add_special_tokens=False).ids
        assert rebuilt.tokenizer.decode(ids) == text


def test_user_defined_tokens_are_matched_whole_and_stay_visible(corpus: list[str]) -> None:
    _, metadata = sentencepiece(corpus, False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "\n\n", "  "]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], USER_DEFINED, USER_DEFINED]
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], -1000.0, -1000.0]
    tokenizer = rebuild(metadata, Path("x.gguf")).tokenizer
    ids = tokenizer.encode("a\n\nb  c<turn>", add_special_tokens=False).ids
    assert {tokenizer.token_to_id("\n\n"), tokenizer.token_to_id("  "), 3} <= set(ids)
    assert tokenizer.decode(ids) == "a\n\nb  c"  # the control token is special, the others are text


def test_splits_of_one_piece_keep_vocabulary_order() -> None:
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc"], [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    merges = merges_from_scores(tokens, scores, [NORMAL] * 6)
    assert merges == [("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, UnsupportedModel, r"pre-tokenizer 'tekken'.*these are: .*smollm"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModel, "tokenizer kind 'bert'"),
        ({"tokenizer.ggml.merges": []}, SourceError, "without merges"),
        ({"tokenizer.ggml.tokens": []}, SourceError, "carries no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, SourceError, "without scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(
    change: Metadata, error: type[Exception], message: str, corpus: list[str]
) -> None:
    metadata = byte_level_metadata(train(corpus, GPT2), "gpt-2")
    with pytest.raises(error, match=message):
        rebuild(metadata | change, Path("x.gguf"))


@pytest.fixture
def gguf_model(write_gguf: Callable[..., Path], llama_metadata: Metadata, corpus: list[str]) -> Path:
    """A GGUF file with a byte-level tokenizer and one tensor."""
    metadata = llama_metadata | byte_level_metadata(train(corpus, ORIGINALS["smollm"]), "smollm")
    del metadata["general.architecture"]  # the writer writes it
    return write_gguf("llama", metadata, {"token_embd.weight": (np.zeros((2000, 64)), "F16")})


def test_lost_merges_are_found_by_the_round_trip(gguf_model: Path) -> None:
    tokenizer = load_tokenizer(gguf_model)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["merges"] = []
    broken = type(tokenizer)(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|end|>")
    with pytest.raises(SourceError, match=r"where: its tokenizer needs 103 tokens for 103 letters.*merges are lost"):
        check_round_trip(broken, "where")
    state["decoder"] = None
    broken = type(tokenizer)(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|end|>")
    with pytest.raises(SourceError, match="does not reproduce text"):
        check_round_trip(broken, "where")


def test_written_gguf_tokenizer_loads_again_with_template(gguf_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = load_tokenizer(gguf_model)
    assert set(write_tokenizer(open_source(gguf_model), out)) >= {"tokenizer.json", "tokenizer_config.json"}
    after = load_tokenizer(out)
    assert after(SENTENCES)["input_ids"] == before(SENTENCES)["input_ids"]
    chat = [{"role": "user", "content": "hello"}]
    assert after.apply_chat_template(chat, tokenize=False) == "<|start|>hello"
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # version 4 knows no TokenizersBackend
    assert config["model_max_length"] == 512
    assert config["chat_template"]
    assert "backend" not in config


def folder_with_tokenizer(path: Path, tokenizer: Tokenizer, config: Metadata) -> Any:
    """A Hugging Face folder as an open source, of which write_tokenizer needs only the path."""
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return type("Folder", (), {"path": path})()


def test_folder_is_copied_and_only_its_config_repaired(corpus: list[str], tmp_path: Path) -> None:
    tokenizer = train(corpus, GPT2)
    config = {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "extra_special_tokens": ["<|x|>"],
        "eos_token": "<|end|>",
    }
    source = folder_with_tokenizer(tmp_path / "model", tokenizer, config)
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "model" / "evil.pkl").write_bytes(b"never copied")
    out = tmp_path / "out"
    out.mkdir()
    written = write_tokenizer(source, out)
    assert sorted(written) == sorted(p.name for p in out.iterdir())
    assert "evil.pkl" not in written
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()
    repaired = json.loads((out / "tokenizer_config.json").read_text())
    assert repaired == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "additional_special_tokens": ["<|x|>"],
        "chat_template": "{{ messages[0]['content'] }}",
    }
    assert load_tokenizer(out)(SENTENCES)["input_ids"] == tokenizer.encode(SENTENCES).ids


def test_known_class_name_is_kept(corpus: list[str], tmp_path: Path) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>"}
    source = folder_with_tokenizer(tmp_path / "model", train(corpus, GPT2), config)
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(source, out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == config


def test_wants_bos_asks_the_tokenizer_itself(corpus: list[str], gguf_model: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    assert wants_bos(load_tokenizer(gguf_model)) is False
    _, metadata = sentencepiece(corpus, False)
    rebuilt = rebuild(metadata, Path("x.gguf"))
    assert wants_bos(PreTrainedTokenizerFast(tokenizer_object=rebuilt.tokenizer, **rebuilt.special)) is True
    bare = rebuild(metadata | {"tokenizer.ggml.add_bos_token": False}, Path("x.gguf"))
    assert wants_bos(PreTrainedTokenizerFast(tokenizer_object=bare.tokenizer, **bare.special)) is False
    assert wants_bos(PreTrainedTokenizerFast(tokenizer_object=bare.tokenizer)) is False
    # A Gemma tokenizer that lost its rule still wants BOS.
    bare.tokenizer.add_special_tokens([AddedToken("<bos>"), AddedToken("<start_of_turn>")])
    assert wants_bos(PreTrainedTokenizerFast(tokenizer_object=bare.tokenizer, bos_token="<bos>")) is True


def test_folder_without_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no tokenizer .*Copy the tokenizer files"):
        load_tokenizer(tmp_path)
    with pytest.raises(RequestError, match="no such folder"):
        load_tokenizer(tmp_path / "nothing")


def test_damaged_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(SourceError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.real
def test_real_models_round_trip_and_need_few_tokens(smollm2: Path, gemma3: Path) -> None:
    text = load_text("wikipedia-sample", split="evaluation").text
    for folder, count, bos in ((smollm2, 154621, False), (gemma3, 147986, True)):
        tokenizer = load_tokenizer(folder)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        assert len(ids) == count
        assert tokenizer.decode(ids) == text
        assert wants_bos(tokenizer) is bos
