"""Prompts as users give them, checked once: text, chat messages, or a list of either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.long_texts import PIECE
from quantkit.checkpoint.tokenizer import token_ids
from quantkit.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
DEPTH = 32  # levels of lists and objects in a message
LARGEST = 2**63  # of a whole number in a message


def as_batch(prompt: Any) -> tuple[list[str | list[dict[str, Any]]], bool]:
    """Return the prompts as a list, and whether a single one was given.

    prompt: text, chat messages (``[{"role": "user", "content": "..."}]``), or a list of either.

    Raises RequestError naming the place of anything else.
    """
    if isinstance(prompt, str):
        return [checked(prompt, "the prompt")], True
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise RequestError(f"the prompt is {_kind(prompt)}. Give text, a list of chat messages, or a list of either.")
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return [checked(items, "the prompt")], True
    return [checked(item, f"prompt {number}") for number, item in enumerate(items, 1)], False


def checked(prompt: Any, where: str) -> str | list[dict[str, Any]]:
    """Return one prompt: the text itself, or messages in dicts of their own, of JSON values.

    prompt: text or chat messages.
    where: which one, as an error begins.

    Raises RequestError for anything else, and for half of a surrogate pair, which no tokenizer reads.
    """
    if isinstance(prompt, str):
        return _text(prompt, where)
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise RequestError(f"{where} is {_kind(prompt)}. Give text, or a list of chat messages.")
    if not prompt:
        raise RequestError(f"{where} has no messages. Give one at least.")
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where}: message {number} is {_kind(message)}. Give messages like"
                ' {"role": "user", "content": "..."}.'
            )
    return [_value(message, f"{where}: message {number}", 0) for number, message in enumerate(prompt, 1)]


def prompt_ids(tokenizer: Any, text: str, *, special: bool, context: int | None) -> list[int]:
    """Return the token ids of a prompt.

    special: with the tokens that the model puts around a text. context: tokens that the model can attend to, None
    without a limit.

    Raises RequestError for a text of a length that cannot fit the context; of a short one it is for the caller to say.
    """
    if len(text) <= PIECE or context is None:
        return token_ids(tokenizer, text, special=special)
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if len(text) > context * longest:
        raise RequestError(
            f"the prompt has {len(text):,} characters: more than the model's context of {context} tokens can hold, of"
            f" at most {longest} characters each. Shorten the prompt."
        )
    ids = token_ids(tokenizer, text, special=special, most=context + 1)
    if len(ids) > context:
        raise RequestError(f"the prompt has more tokens than the model's context of {context}. Shorten the prompt.")
    return ids


def _value(value: Any, where: str, depth: int) -> Any:
    """Return a JSON value of plain types."""
    if isinstance(value, str):
        return _text(value, where)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and abs(value) < LARGEST:
        return value
    if depth == DEPTH:
        raise RequestError(f"{where} is nested more than {DEPTH} levels deep. Give flat messages.")
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise RequestError(f"{where} has a field named {repr(name)[:40]}; names of fields are text.")
        return {_text(name, where): _value(item, f"{where}, {name[:40]!r}", depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} is {_kind(value)}. Give text, or values that JSON has.")


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where}: character {error.start} (\\u{ord(text[error.start]):04x}) is half of a surrogate pair, no text."
            " Give text that UTF-8 can hold."
        ) from error
    return str(text)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return "a number" if isinstance(value, (int, float)) else f"of type {type(value).__name__}"


def check_ids(input_ids: Tensor, rows: int) -> None:
    """Raise RequestError for ids that are no tokens; torch would fail on some, and take -1 for the last one.

    input_ids: int64 ``[batch, tokens]``. rows: of the embedding.
    """
    whole = isinstance(input_ids, Tensor) and input_ids.dtype in (torch.int64, torch.int32)
    if not whole or input_ids.dim() != 2 or not input_ids.numel():
        found = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids)
        raise RequestError(f"input_ids: expected a tensor of int64 [batch, tokens], found {found}.")
    low, high = (int(end) for end in input_ids.aminmax())
    if low < 0 or high >= rows:
        raise RequestError(
            f"input_ids run from {low} to {high}; the model has tokens 0 to {rows - 1}. Use the ids of its tokenizer."
        )
