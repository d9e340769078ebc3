"""One text, one list of token ids: the same for every model that is compared."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from quantkit.checkpoint.tokenizer import token_ids
from quantkit.errors import RequestError, SourceError


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of the whole text as one string, without special tokens. Raises SourceError if there are none."""
    ids = token_ids(tokenizer, text)
    if not ids:
        raise SourceError("The text is empty: it has no tokens. Give a longer text.")
    return ids


def bos_id(tokenizer: Any) -> int:
    """Return the id of BOS. Raises SourceError for a tokenizer that has none."""
    if tokenizer.bos_token_id is None:
        raise SourceError(
            "The model wants BOS first, and its tokenizer names no bos_token. Add it to tokenizer_config.json."
        )
    return int(tokenizer.bos_token_id)


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the sha256 of the vocabulary, token by token with ids.

    The ids of the text have a hash of their own: ``EvaluationWindows.digest``.
    """
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def check_same_tokens(one: Any, other: Any, text: str, one_name: str, other_name: str) -> None:
    """Raise RequestError, saying where they part, when two tokenizers do not give a text identical ids."""
    remedy = "A comparison needs identical token ids; name the original that this model was converted from."
    first, second = text_ids(one, text), text_ids(other, text)
    if first != second:
        at = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
        )
        raise RequestError(
            f"The tokenizers of {one_name} and {other_name} differ: {len(first)} and {len(second)} tokens for the text,"
            f" parting at token {at}. {remedy}"
        )
    if one.bos_token_id != other.bos_token_id:
        raise RequestError(
            f"The tokenizers of {one_name} and {other_name} have BOS {one.bos_token_id} and {other.bos_token_id}."
            f" {remedy}"
        )
    if one.get_vocab() != other.get_vocab():
        apart = set(one.get_vocab().items()) ^ set(other.get_vocab().items())
        raise RequestError(f"The vocabularies of {one_name} and {other_name} differ in {len(apart)} entries. {remedy}")
