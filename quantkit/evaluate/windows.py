"""One text as windows of token ids: the two protocols by name.

``gptq``       consecutive windows that do not overlap; every token but the first of each window is scored. With BOS a
               window is BOS and ``seq_len - 1`` text tokens. The protocol of the papers since GPTQ (arXiv 2210.17323).
``llama.cpp``  the windows of llama.cpp's ``perplexity`` program: BOS and the text form one stream, cut every
               ``seq_len`` (512) tokens; the first token of each window is then *replaced* by BOS, and only the second
               half is scored: the tokens after position ``seq_len // 2``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.errors import RequestError, SourceError

DEFAULT_SEQ_LEN = {"gptq": 1024, "llama.cpp": 512}


@dataclass(frozen=True, slots=True)
class EvaluationWindows:
    """Token ids ready to evaluate.

    ids: int64 ``[windows, seq_len]``. first: logits at positions ``first .. seq_len - 2`` are scored, each against the
    token that follows. stride: text tokens (of the stream, in ``llama.cpp``) from one window's start to the next one's.
    """

    ids: Tensor
    first: int
    protocol: str
    bos: bool
    stride: int

    @property
    def count(self) -> int:
        """Number of windows."""
        return self.ids.shape[0]

    @property
    def seq_len(self) -> int:
        """Tokens per window, BOS counted."""
        return self.ids.shape[1]

    @property
    def scored(self) -> int:
        """Scored tokens per window."""
        return self.seq_len - 1 - self.first

    def targets(self, window: int) -> Tensor:
        """Return the scored tokens of one window: int64 ``[scored]``."""
        return self.ids[window, self.first + 1 :]

    def digest(self) -> str:
        """Return the sha256 of shape and ids (little-endian int32, row by row).

        Two runs that share it saw the same windows.
        """
        digest = hashlib.sha256(f"{self.count}x{self.seq_len}".encode())
        digest.update(self.ids.to(torch.int32).numpy().astype("<i4").tobytes())
        return digest.hexdigest()


def make_windows(
    text_ids: Sequence[int] | NDArray[np.int32],
    *,
    protocol: str,
    seq_len: int | None = None,
    bos_id: int | None = None,
    tokens: int | None = None,
) -> EvaluationWindows:
    """Cut the ids of one text (without special tokens) into windows.

    bos_id: the id that opens each window, or None for a model that sees no BOS. tokens: at most this many tokens,
    BOS counted, rounded down to whole windows; None takes every full window of the text. Raises RequestError for an
    unknown protocol or a bad size, SourceError when the text has too few tokens.
    """
    seq_len = _checked_seq_len(protocol, seq_len)
    if tokens is not None and tokens < seq_len:
        raise RequestError(
            f"--tokens {tokens} is less than one window of {seq_len} tokens. Raise --tokens or lower --seq-len."
        )
    step = seq_len - 1 if bos_id is not None and protocol == "gptq" else seq_len
    stream = torch.from_numpy(np.array(text_ids, dtype=np.int64))
    if bos_id is not None and protocol == "llama.cpp":
        stream = torch.cat([torch.tensor([bos_id]), stream])
    available = len(stream) // step
    wanted = available if tokens is None else tokens // seq_len
    if available < max(wanted, 1):
        raise SourceError(
            f"The text has {len(text_ids)} tokens: {available} windows of {seq_len}, and {max(wanted, 1)} are asked"
            " for. Lower --tokens or --seq-len, or take a longer text."
        )
    ids = stream[: wanted * step].reshape(wanted, step)
    if bos_id is not None:
        opening = torch.full((wanted, 1), bos_id, dtype=torch.int64)
        ids = torch.cat([opening, ids if protocol == "gptq" else ids[:, 1:]], dim=1)
    first = 0 if protocol == "gptq" else seq_len // 2
    return EvaluationWindows(ids=ids, first=first, protocol=protocol, bos=bos_id is not None, stride=step)


def _checked_seq_len(protocol: str, seq_len: int | None) -> int:
    """Return the window length. Raises RequestError for an unknown protocol or fewer than 4 tokens."""
    if protocol not in DEFAULT_SEQ_LEN:
        raise RequestError(f"--protocol {protocol!r} is unknown. There are {' and '.join(DEFAULT_SEQ_LEN)}.")
    seq_len = DEFAULT_SEQ_LEN[protocol] if seq_len is None else seq_len
    if seq_len < 4:
        raise RequestError(f"--seq-len {seq_len}: a window needs at least 4 tokens.")
    return seq_len
