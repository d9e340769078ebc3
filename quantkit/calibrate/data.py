"""Cut calibration text into token windows: fixed seed, packed to full windows, hashed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.long_texts import MOST_TOKENS
from quantkit.checkpoint.texts import load_text
from quantkit.checkpoint.tokenizer import check_vocabulary, long_text_ids, wants_bos
from quantkit.errors import RequestError


@dataclass(frozen=True)
class CalibrationWindows:
    """Calibration tokens: int64 [samples, seq_len], and where they come from.

    whole: False if the text goes on beyond what was read; the windows were drawn from, and the hash is, what was read.
    """

    ids: Tensor
    name: str
    text_sha256: str
    bos: bool
    seed: int
    whole: bool = True

    def words(self) -> str:
        """Say how many and how long, for people."""
        count, length = self.ids.shape
        return f"{count} window{'s' if count > 1 else ''} of {length} tokens"

    def digest(self) -> str:
        """Compute the sha256 of the token ids: same windows, same statistics."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def load_windows(
    name: str, tokenizer: Any, *, samples: int, seq_len: int, seed: int, vocab_size: int, after: int = 0
) -> CalibrationWindows:
    """Tokenize the text once, cut it into consecutive full windows, draw ``samples`` of them.

    Models whose tokenizer starts with BOS get BOS as first token of each window.

    after: windows of the same draw that come first: none of those is among the result.

    Raises RequestError if the text is too short, or if the tokenizer yields ids that the model has no embedding for (a
    wrong tokenizer).
    """
    text = load_text(name, split="calibration")
    ids = torch.from_numpy(long_text_ids(tokenizer, text.text, MOST_TOKENS))  # int32: of a long text, few are drawn
    bos = wants_bos(tokenizer)
    room = seq_len - int(bos)
    count = len(ids) // room
    if after and count < after + samples:
        raise RequestError(
            f"--calibration {name}: {len(ids)} tokens make {count} windows of {seq_len}, but --samples {after} and"
            f" --distil {samples} more are asked for. Use a longer text, fewer of them, or a shorter --seq-len."
        )
    if count < samples:
        raise RequestError(
            f"--calibration {name}: {len(ids)} tokens make {count} windows of {seq_len}, but --samples {samples} are"
            f" asked for. Use a longer text, --samples {count}, or a shorter --seq-len."
            if count
            else f"--calibration {name}: {len(ids)} tokens are fewer than one window of {seq_len}. Use a longer text."
        )
    check_vocabulary([int(ids.max())], {"vocab_size": vocab_size}, "calibration")
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[after : after + samples].sort().values
    windows = ids[: count * room].reshape(count, room)[chosen].to(torch.int64)
    if bos:
        windows = torch.cat([torch.full((samples, 1), tokenizer.bos_token_id, dtype=torch.int64), windows], dim=1)
    return CalibrationWindows(windows, text.name, text.sha256, bos, seed, text.whole and len(ids) < MOST_TOKENS)
