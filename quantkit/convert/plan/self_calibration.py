"""Calibration text that the model writes itself (``--calibration self``), for when there is none.

Each sequence starts with a token drawn at random and goes on as the model would (data-free calibration as in LLM-QAT,
arXiv 2305.17888, section 3.1). The 16-bit model is loaded whole for this, in the run-time dtype.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.data import CalibrationWindows
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import wants_bos
from quantkit.convert.options.options import ConvertOptions
from quantkit.core.host import OnStep, release_free_memory
from quantkit.errors import RequestError, SourceError
from quantkit.model.attention_shape import cached_kv_heads, head_dim

NAME = "self"
# 64 windows of 1024: past this, more of one model's own text hardly changes the statistics, and writing it takes the
# time.
TOKENS = 65_536
BATCH = 16
TEMPERATURE = 1.0
TOP_P = 0.95  # without the tail: a stretch that starts with an improbable token rarely finds back


def planned(options: ConvertOptions, tokenizer: Any) -> CalibrationWindows:
    """Return the calibration windows before they are written: ids int64 ``[samples, seq_len]`` on the meta device.

    Raises RequestError if ``--seq-len`` is too short.
    """
    bos = wants_bos(tokenizer)
    if options.seq_len - int(bos) < 2:
        raise RequestError(
            f"--seq-len {options.seq_len}: text the model writes needs 2 tokens besides BOS. Raise --seq-len."
        )
    ids = torch.empty(options.samples, options.seq_len, dtype=torch.int64, device="meta")
    return CalibrationWindows(ids, NAME, "", bos, options.seed)


def windows_in_all(options: ConvertOptions) -> int:
    """Count the calibration windows of the method and those of the end-to-end pass, which come after them."""
    return options.samples + options.distil


def sequences(options: ConvertOptions) -> int:
    """Count the sequences of ``seq_len`` tokens that the model writes: one per window, up to TOKENS tokens in all."""
    return max(1, min(windows_in_all(options), TOKENS // options.seq_len))


def note(options: ConvertOptions, needed: int) -> str:
    """Return the plan's note on self-written calibration text.

    needed: bytes of the whole model and its KV cache.
    """
    count = sequences(options)
    wanted = windows_in_all(options)
    recut = "" if count == wanted else f", cut into {wanted} windows that overlap"
    return (
        f"--calibration self: the model writes {count} x {options.seq_len} tokens first{recut}; for this it is in"
        f" memory whole ({needed / 1e9:.2f} GB)"
    )


def model_and_cache_bytes(config: Any, weights: int, options: ConvertOptions) -> int:
    """Return the bytes of host memory for writing: every weight and one batch's keys and values, in float32.

    weights: how many weights the model has, tied ones counted once.
    """
    token = 2 * config.num_hidden_layers * cached_kv_heads(config) * head_dim(config)
    cache = token * min(BATCH, sequences(options)) * options.seq_len
    return int(4 * (weights + cache))


def write(
    source: Source, tokenizer: Any, options: ConvertOptions, listen: OnStep, device: torch.device | str = "cpu"
) -> CalibrationWindows:
    """Let the model write calibration text, and cut it into ``windows_in_all`` windows.

    The same seed gives the same tokens. The model's memory is free again when this returns.

    Raises SourceError if the tokenizer has no ordinary token to start from.
    """
    from quantkit.runtime.load import load

    bos = tokenizer.bos_token_id if wants_bos(tokenizer) else None
    room = options.seq_len - int(bos is not None)
    starts = first_tokens(tokenizer, int(source.config["vocab_size"]), sequences(options), options.seed)
    # no name here holds the model: it is gone when the text is written
    written = _continue(
        load(source.path, dtype="auto", kv_bits=16, device=device), starts, bos, room, options.seed, listen
    )
    release_free_memory()
    text = tokenizer.decode(written.flatten().tolist())
    windows = cut(written.flatten(), windows_in_all(options), room)
    if bos is not None:
        windows = torch.cat([torch.full((len(windows), 1), bos, dtype=torch.int64), windows], dim=1)
    return CalibrationWindows(
        windows, NAME, hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(), bos is not None, options.seed
    )


def first_tokens(tokenizer: Any, vocab_size: int, count: int, seed: int) -> Tensor:
    """Draw ordinary tokens to start from, with replacement: int64 ``[count]``.

    Raises SourceError if the tokenizer has special tokens only.
    """
    special = set(tokenizer.all_special_ids)
    ordinary = [i for i in range(min(len(tokenizer), vocab_size)) if i not in special]
    if not ordinary:
        raise SourceError("The tokenizer has special tokens only; the model cannot write. Give a --calibration text.")
    chosen = torch.randint(len(ordinary), (count,), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(ordinary, dtype=torch.int64)[chosen]


def _continue(model: Any, starts: Tensor, bos: int | None, room: int, seed: int, listen: OnStep) -> Tensor:
    """Generate sequences of ``room`` tokens, first token included, BOS not: int64 ``[len(starts), room]``."""
    from quantkit.runtime.generate.loop import run
    from quantkit.runtime.generate.sampling import GenerationOptions

    total, done = len(starts) * room, 0
    sequences: list[list[int]] = []
    for begin in range(0, len(starts), BATCH):
        batch = starts[begin : begin + BATCH].tolist()
        prompts = [[start] if bos is None else [bos, start] for start in batch]
        requests = [
            GenerationOptions(
                max_tokens=room - 1, temperature=TEMPERATURE, top_p=TOP_P, seed=seed + begin + i, ignore_eos=True
            )
            for i in range(len(batch))
        ]
        written: dict[int, list[int]] = {}
        for piece in run(model, prompts, requests, end_tokens=(), context=model.context):
            done += 1
            if done % BATCH == 0:
                listen(done, total)
            if piece.done is not None:
                written[piece.row] = piece.done.tokens
        sequences += [[start, *written[i]] for i, start in enumerate(batch)]
    listen(total, total)
    return torch.tensor(sequences, dtype=torch.int64)


def cut(ids: Tensor, count: int, room: int) -> Tensor:
    """Cut ``count`` windows of ``room`` tokens, spread evenly over ``ids``: int64 ``[count, room]``.

    They lie side by side where there are enough ids, else they overlap.
    """
    last = len(ids) - room
    step = min(float(room), last / max(1, count - 1))
    return torch.stack([ids[(at := math.floor(i * step)) : at + room] for i in range(count)])
