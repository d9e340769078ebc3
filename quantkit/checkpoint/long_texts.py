"""Long texts: tokenized in pieces, which bounds memory, with the token ids of the whole.

The tokenizers library keeps 400 bytes and more for every token until a text is done: 8 MB of digits, a token each, took
3.4 GB in one piece.

Pieces overlap. A piece's first tokens may be others than those of the whole text, which had letters before them, and
so may its last ones; farther in, they are the same, since a token is decided by the letters near it. So one piece goes
over into the next in the middle of what both hold, and only where both agree there token by token, over thousands of
letters. Where they do not, more is read twice, and at last the text is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import SourceError

MOST_TOKENS = 1 << 21  # that calibration or evaluation uses; more, of digits say, would take more than seconds
PIECE = 1 << 18  # characters; of four tokens each, a piece takes half a gigabyte
OVERLAPS = (1 << 12, 1 << 14, 1 << 16)  # characters that two pieces share
WORD_TOKENS = 256  # looked through for the beginning of a word


class Encoding(Protocol):
    """What the tokenizers library returns of a text: ids, and of each token its word and its characters."""

    @property
    def ids(self) -> list[int]: ...
    def token_to_chars(self, token_index: int) -> tuple[int, int] | None: ...
    def token_to_word(self, token_index: int) -> int | None: ...


Encode = Callable[[str], Encoding]


class _Piece:
    """A stretch of the text, tokenized. Characters are counted from the beginning of the text."""

    def __init__(self, encode: Encode, text: str, begin: int) -> None:
        self.begin, self.end = begin, min(begin + PIECE, len(text))
        self._encoding = encode(text[begin : self.end])
        self.ids = np.array(self._encoding.ids, dtype=np.int32)

    def start(self, token: int) -> int:
        """Return where a token begins."""
        span = self._encoding.token_to_chars(token)
        return self.begin + (0 if span is None else span[0])

    def at_or_before(self, place: int) -> int:
        """Return the last token that begins no later than a place, if possible one that begins a word."""
        token = self._first_from(place + 1) - 1
        word = self._encoding.token_to_word
        for earlier in range(token, max(1, token - WORD_TOKENS), -1):
            if word(earlier) != word(earlier - 1):
                return earlier
        return max(token, 0)

    def between(self, low: int, high: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the first token that begins in ``[low, high)``; and of all that do, where, and the id."""
        first = self._first_from(low)
        found = []
        for token in range(first, len(self.ids)):
            if (start := self.start(token)) >= high:
                break
            found.append((start, int(self.ids[token])))
        return first, found

    def _first_from(self, place: int) -> int:
        """Return the first token that begins at a place or later."""
        low, high = 0, len(self.ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.start(middle) < place else (low, middle)
        return low


def ids_in_pieces(encode: Encode, text: str, most: int | None = None) -> NDArray[np.int32]:
    """Tokenize a text of any length piece by piece.

    encode: tokenizes a text of at most PIECE characters, without special tokens. most: of the tokens, only the first
    of them; the rest of the text is not read. None reads all.

    Returns the ids that ``encode`` would give for the whole text: int32 ``[tokens]``. Raises SourceError where two
    pieces do not agree on what they share.
    """
    piece, first, parts, count = _Piece(encode, text, 0), 0, list[NDArray[np.int32]](), 0
    while piece.end < len(text) and (most is None or count < most):
        following, until, then = _following(encode, text, piece)
        parts.append(piece.ids[first:until])
        count += len(parts[-1])
        piece, first = following, then
    if piece.end == len(text):
        parts.append(piece.ids[first:])
    return np.concatenate(parts)[:most]


def _following(encode: Encode, text: str, piece: _Piece) -> tuple[_Piece, int, int]:
    """Return the next piece, up to which token this one counts, and from which token the next one does."""
    for overlap in OVERLAPS:
        begin = piece.start(piece.at_or_before(piece.end - overlap))
        if begin <= piece.begin:
            break
        following = _Piece(encode, text, begin)
        quarter = (piece.end - begin) // 4
        until, one = piece.between(begin + quarter, piece.end - quarter)
        then, other = following.between(begin + quarter, piece.end - quarter)
        if one and one == other:
            return following, until, then
    raise SourceError(
        f"The text has no place near character {piece.end:,} at which it can be cut in two without changing its tokens,"
        f" and all of it at once is too much for a tokenizer. Give a text of at most {PIECE:,} characters, or one of"
        " words and lines."
    )
