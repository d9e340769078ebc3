"""Rebuild a tokenizer from a GGUF file's vocabulary, with the ``tokenizers`` library.

Two kinds exist in the architectures we read. *Byte-level BPE* (``tokenizer.ggml.model`` = gpt2): merges are stored, and
``tokenizer.ggml.pre`` names the rule that cuts text into words first. *SentencePiece BPE* (llama): no merges are
stored, only scores; a pair may merge when the joined piece is in the vocabulary, best score first, which is what
llama.cpp and SentencePiece do at run time. Whether the result is right is not assumed: see
``tokenizer.check_round_trip``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.foreign_files.fields import Whole, check_field, shown
from quantkit.errors import SourceError, UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"

# The word patterns of the models' own tokenizer.json files.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN_WORDS = {"llama3": LLAMA3_WORDS, "qwen2": QWEN2_WORDS, "gpt4o": GPT4O_WORDS}
# tokenizer.ggml.pre -> how words are cut. A file without the key, or with "default", is from before the key existed,
# when every byte-level vocabulary was cut by GPT-2's rule.
PRE_TOKENIZERS = {
    "gpt-2": "gpt2", "gpt2": "gpt2", "default": "gpt2", "smollm": "digits", "llama-bpe": "llama3", "llama3": "llama3",
    "llama-v3": "llama3", "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2", "gpt-4o": "gpt4o",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A ``tokenizers.Tokenizer`` and what transformers wants to know beside it."""

    tokenizer: Any
    # bos_token, eos_token, ... -> token
    special: dict[str, str]
    chat_template: str | None
    add_bos: bool
    context_length: int | None


def rebuild(metadata: dict[str, Any], path: Path) -> Rebuilt:
    """Rebuild the tokenizer that a GGUF file describes.

    Raises UnsupportedModel for a kind or pre-tokenizer that is not in the tables, SourceError for missing metadata.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if not tokens or not kind:
        raise SourceError(
            f"{path}: the file carries no tokenizer. Use a GGUF file with one, or the Hugging Face folder."
        )
    if len(set(tokens)) != len(tokens):
        raise SourceError(f"{path}: the vocabulary lists a token twice. The file is damaged; download it again.")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is not None and len(kinds) != len(tokens):
        raise SourceError(
            f"{path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens. Download it again."
        )
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, path)
    else:
        raise UnsupportedModel(
            f"{path}: tokenizer kind {kind!r} is not read from GGUF (gpt2 and llama are). Use the Hugging Face folder."
        )
    _add_marked_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))
    special = _special(metadata, tokens)
    # llama.cpp adds BOS to a SentencePiece vocabulary that does not say otherwise.
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")) and "bos_token" in special
    _add_ends(tokenizer, special, add_bos, bool(metadata.get("tokenizer.ggml.add_eos_token", False)))
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return Rebuilt(tokenizer, special, metadata.get("tokenizer.chat_template"), add_bos, context)


def padding(index: int) -> str:
    """Return what writers of GGUF files call a row of the embedding that stands for no token."""
    return f"[PAD{index}]"


def _ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens. Rows that the original's tokenizer did not have are none, as there."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    each = enumerate(zip(tokens, kinds, strict=True))
    return {token: index for index, (token, kind) in each if kind != UNUSED or token != padding(index)}


def _byte_level(metadata: dict[str, Any], path: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{path}: pre-tokenizer {name!r} is not read from GGUF; these are: {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Use the model's Hugging Face folder instead."
        )
    stored = metadata.get("tokenizer.ggml.merges")
    if not stored:
        raise SourceError(f"{path}: a gpt2 vocabulary without merges; every word would fall apart into letters.")
    rule = PRE_TOKENIZERS[name]
    vocab = _ids(metadata)
    merges = [_merge(merge, vocab, path) for merge in stored]
    # Llama 3 takes a word that is in the vocabulary as it is, even where the merges would not lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama3"))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if rule in OWN_WORDS:
        words = Regex(OWN_WORDS[rule])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(words, behavior="isolated", invert=False), bytes_only]
        )
    else:
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if rule == "digits" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, gpt2]) if digits else gpt2
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merge(text: str, vocab: Mapping[str, int], path: Path) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise SourceError(
            f"{path}: tokenizer.ggml.merges holds {shown(text)}, whose parts or whole are not in the vocabulary. The"
            " file is damaged; download it again."
        )
    return left, right


def _sentencepiece(metadata: dict[str, Any], path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if scores is None or kinds is None or not len(tokens) == len(scores) == len(kinds):
        raise SourceError(
            f"{path}: a llama vocabulary without scores and token types for every token; download it again."
        )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is not None:
        check_field(str(path), "tokenizer.ggml.unknown_token_id", unknown, Whole(0, len(tokens) - 1))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_ids(metadata),
            merges=merges_from_scores(tokens, scores, kinds),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=tokens[unknown] if unknown is not None else None,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_mark = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_mark]) if prefix else to_mark
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the merges that a SentencePiece vocabulary implies.

    Every split of a normal token into two tokens, best score first.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, str, str]] = []
    for index, token in enumerate(tokens):
        if kinds[index] == NORMAL:
            splits = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in vocab and token[k:] in vocab]
            splits.sort(key=lambda s: (vocab[s[0]], vocab[s[1]]))
            merges += [(scores[index], a, b) for a, b in splits]
    merges.sort(key=lambda merge: merge[0], reverse=True)
    return [(a, b) for _, a, b in merges]


def _add_marked_tokens(tokenizer: Any, tokens: list[str], kinds: list[int] | None) -> None:
    """Mark control tokens as special, and user-defined ones to be matched whole in the text.

    User-defined tokens stay visible when decoding.
    """
    from tokenizers import AddedToken

    if kinds is None:
        return
    # In one call each: every call builds the matcher anew, and Gemma marks thousands.
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    marked = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in marked])


def _special(metadata: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    named = {role: tokens[index] for role, index in ids.items() if index is not None and 0 <= index < len(tokens)}
    known = _ids(metadata)
    return {role: token for role, token in named.items() if token in known}


def _add_ends(tokenizer: Any, special: dict[str, str], bos: bool, eos: bool) -> None:
    """Put BOS and EOS around encoded text where the file says so."""
    from tokenizers import processors

    first = [special["bos_token"]] if bos else []
    last = [special["eos_token"]] if eos and "eos_token" in special else []
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1", *(f"{t}:1" for t in last)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)],
        )
