"""One text, one list of token ids: the same for every model that is compared."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.checkpoint.tokenizer import long_text_ids
from quantkit.errors import RequestError, SourceError


def text_ids(tokenizer: Any, text: str, most: int | None = None) -> NDArray[np.int32]:
    """Return the ids of the whole text as one string, without special tokens: int32 ``[tokens]``.

    most: only the first of them, for a comparison or windows that need no more.

    Raises SourceError if there are none.
    """
    ids = long_text_ids(tokenizer, text, most)
    if not len(ids):
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


def check_same_tokens(
    first: NDArray[np.int32], second: NDArray[np.int32], one: Any, other: Any, names: tuple[str, str]
) -> None:
    """Raise RequestError, saying where they part, when two tokenizers do not give a text identical ids.

    first, second: what tokenizer ``one`` and ``other`` make of it, int32 ``[tokens]``. names: of both models.
    """
    one_name, other_name = names
    remedy = "A comparison needs identical token ids; name the original that this model was converted from."
    if not np.array_equal(first, second):
        shared = min(len(first), len(second))
        apart = np.flatnonzero(first[:shared] != second[:shared])
        at = int(apart[0]) if len(apart) else shared
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
        entries = set(one.get_vocab().items()) ^ set(other.get_vocab().items())
        raise RequestError(
            f"The vocabularies of {one_name} and {other_name} differ in {len(entries)} entries. {remedy}"
        )
