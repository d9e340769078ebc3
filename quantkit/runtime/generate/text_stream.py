"""From token ids to text, piece by piece: nothing is shown that a later token could change or a stop string swallow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # tokens of the prompt decoded along: decoders that strip a leading space do it there, not in the answer
_INCOMPLETE = "\ufffd"  # what a decoder gives for the first bytes of a longer character


class TextStream:
    """Text of one answer. ``push`` returns text that is safe to show; ``stopped`` is True after a stop string.

    ``text`` is the whole answer so far, without a stop string and all that follows it. Held back: bytes of an
    unfinished character, and an ending that could be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._prefix, self._read = 0, len(self._ids)
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return text that this token makes certain; often empty, never to be taken back."""
        self._ids.append(token)
        return self._show(self._decode(final=False))

    def finish(self) -> str:
        """Return the text that was held back, when no token follows."""
        if self.stopped:
            return ""
        rest = self._show(self._decode(final=True)) + ("" if self.stopped else self._held)
        if not self.stopped:
            self.text += self._held
        self._held = ""
        return rest

    def _decode(self, final: bool) -> str:
        before = self._text(self._ids[self._prefix : self._read])
        now = self._text(self._ids[self._prefix :])
        if len(now) <= len(before) or (now.endswith(_INCOMPLETE) and not final):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _show(self, piece: str) -> str:
        held = self._held + piece
        hits = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if hits:
            self.stopped = True
            held, self._held = held[: min(hits)], ""
        else:
            keep = max((_overlap(held, stop) for stop in self._stop), default=0)
            held, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += held
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop`` without being all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
