"""The tokenizer in a GGUF file's metadata: from a Hugging Face tokenizer, or as another GGUF file has it.

llama.cpp cuts text into words by rules that it knows by name (``tokenizer.ggml.pre``); here the name follows from the
patterns in the tokenizer itself. A tokenizer whose rule has no name here is refused, for a wrong rule is not seen until
the model stumbles. What was written is read again before the conversion is done (``check_same_ids``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.checkpoint.gguf_files.out_config import Field
from quantkit.checkpoint.gguf_files.vocabulary import (
    BYTE,
    CONTROL,
    GPT4O_WORDS,
    LLAMA3_WORDS,
    NORMAL,
    QWEN2_WORDS,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    padding,
)  # fmt: skip
from quantkit.errors import UnsupportedModel

TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns by which words are cut, and llama.cpp's name for the rule.
WORDS = {LLAMA3_WORDS: "llama-bpe", QWEN2_WORDS: "qwen2", TEKKEN_WORDS: "tekken", GPT4O_WORDS: "gpt-4o"}
GPT2, DIGITS_FIRST = "gpt-2", "smollm"
SPECIAL = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
NO_SCORE = -1000.0  # of tokens that no merge makes


def copied_vocabulary(metadata: Mapping[str, Any]) -> dict[str, Field]:
    """Return the tokenizer fields of an opened GGUF file, with the types that writers give them."""
    fields: dict[str, Field] = {}
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, bool):
            fields[key] = ("BOOL", value)
        elif isinstance(value, int):
            fields[key] = ("UINT32", value % (1 << 32))
        elif isinstance(value, float):
            fields[key] = ("FLOAT32", value)
        else:
            fields[key] = ("STRING" if isinstance(value, str) else "ARRAY", value)
    return {key: value for key, value in fields.items() if value[1] not in ("", [])}


def vocabulary_fields(tokenizer: Any, rows: int) -> dict[str, Field]:
    """Return the fields of a tokenizer of transformers.

    tokenizer: with a ``tokenizers`` backend. rows: of the embedding; the vocabulary is filled up to so many.

    Raises UnsupportedModel for a kind of tokenizer, or a rule for words, that has no name here.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModel("the tokenizer is no fast one: save it as tokenizer.json first, then convert.")
    data = json.loads(backend.to_str())
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise UnsupportedModel(f"a {model['type']} tokenizer is not written as GGUF (BPE is). Use another --format.")
    tokens, kinds = _tokens(data, rows)
    fields: dict[str, Field] = {}
    if model.get("byte_fallback"):
        fields |= {"tokenizer.ggml.model": ("STRING", "llama"), "tokenizer.ggml.pre": ("STRING", "default")}
        fields["tokenizer.ggml.scores"] = ("ARRAY", _scores(model, tokens))
        kinds = _marked_bytes(tokens, kinds, model.get("unk_token"))
        fields["tokenizer.ggml.add_space_prefix"] = ("BOOL", _prefix(data))
    else:
        fields |= {"tokenizer.ggml.model": ("STRING", "gpt2"), "tokenizer.ggml.pre": ("STRING", word_rule(data))}
        fields["tokenizer.ggml.merges"] = ("ARRAY", [" ".join(pair) for pair in _merges(model)])
    fields["tokenizer.ggml.tokens"] = ("ARRAY", tokens)
    fields["tokenizer.ggml.token_type"] = ("ARRAY", kinds)
    return fields | _special(tokenizer, len(tokens))


def word_rule(data: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the rule that cuts text into words.

    data: of a tokenizer.json.

    Raises UnsupportedModel for a rule that has no name here.
    """
    steps = _steps(data.get("pre_tokenizer"))
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    digits = any(step["type"] == "Digits" and step.get("individual_digits") for step in steps)
    by_gpt2 = any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps)
    if len(patterns) == 1 and patterns[0] in WORDS and not digits and not by_gpt2:
        return WORDS[patterns[0]]
    if not patterns and by_gpt2 and all(step["type"] in ("Digits", "ByteLevel") for step in steps):
        return DIGITS_FIRST if digits else GPT2
    shown = ", ".join(step["type"] for step in steps) or "none"
    raise UnsupportedModel(
        f"the tokenizer's rule for words ({shown}{': ' + str(patterns[0])[:60] if patterns else ''}) has no name in"
        " GGUF that is known here. Convert the GGUF file of llama.cpp's own converter instead, or use another --format."
    )


def _steps(entry: Any) -> list[dict[str, Any]]:
    """Return the pre-tokenizers of a sequence, or the one."""
    if not entry:
        return []
    return [dict(step) for step in entry["pretokenizers"]] if entry["type"] == "Sequence" else [dict(entry)]


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return [(str(left), str(right)) for left, right in pairs]


def _tokens(data: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return every token by its id, and of what kind it is; holes are filled with unused tokens."""
    by_id = {index: token for token, index in data["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for added in data.get("added_tokens") or []:
        if added["id"] >= rows:
            continue  # no row of the embedding: such tokens (Gemma's for images) are left out, as llama.cpp does
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    size = max(rows, max(by_id) + 1)
    if size > rows:
        raise UnsupportedModel(
            f"the tokenizer has ids up to {size - 1}, but the model {rows} embeddings: it belongs to another model."
        )
    tokens = [by_id.get(index, padding(index)) for index in range(size)]
    return tokens, [kinds.get(index, UNUSED) for index in range(size)]


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return scores by which SentencePiece's rule (best score first) merges in the order of the list of merges."""
    rank: dict[str, int] = {}
    for index, (left, right) in enumerate(_merges(model)):
        rank.setdefault(left + right, index)
    return [-float(rank[token]) if token in rank else NO_SCORE for token in tokens]


def _marked_bytes(tokens: list[str], kinds: list[int], unknown: str | None) -> list[int]:
    """Mark the tokens of single bytes, and the unknown one."""
    marked = []
    for token, kind in zip(tokens, kinds, strict=True):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kind = BYTE
        elif token == unknown:
            kind = UNKNOWN
        marked.append(kind)
    return marked


def _prefix(data: Mapping[str, Any]) -> bool:
    """Tell whether a space is put in front of a text."""
    normalizers = data.get("normalizer") or {}
    steps = normalizers.get("normalizers", [normalizers])
    first = any(step.get("type") == "Prepend" and step.get("prepend") == SPACE for step in steps)
    marks = [step for step in _steps(data.get("pre_tokenizer")) if step["type"] == "Metaspace"]
    return first or any(step.get("prepend_scheme", "always") in ("always", "first") for step in marks)


def _special(tokenizer: Any, size: int) -> dict[str, Field]:
    """Return the ids of special tokens, what is added around a text, and the chat template."""
    fields: dict[str, Field] = {}
    for attribute, role in SPECIAL.items():
        index = getattr(tokenizer, attribute, None)
        if index is not None and 0 <= index < size:
            fields[f"tokenizer.ggml.{role}_token_id"] = ("UINT32", index)
    ids = tokenizer("a")["input_ids"]
    bos, eos = (getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos"))
    fields["tokenizer.ggml.add_bos_token"] = ("BOOL", bos is not None and ids[:1] == [bos])
    fields["tokenizer.ggml.add_eos_token"] = ("BOOL", eos is not None and len(ids) > 1 and ids[-1:] == [eos])
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        fields["tokenizer.chat_template"] = ("STRING", template)
    return fields


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file."""
    from quantkit.checkpoint.gguf_files.header import read_header

    return read_header(path).metadata
