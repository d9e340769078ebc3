"""``deterministic``: a prompt's logits, and so its answer, are bit by bit those that it gets alone.

Whatever else is in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.runtime.generate.loop import run
from quantkit.runtime.generate.prefill import PREFILL_TOKENS
from quantkit.runtime.generate.sampling import GenerationOptions, Sampler
from quantkit.runtime.kernels.cpu_layouts import GEMM_TOKENS
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.load import load
from quantkit.runtime.model import Model

KINDS = ["llama", "gemma3_text", "mixtral"]
SIZES = (1, 2, 3, 7, 16, 64)
Answers = list[tuple[list[int], list[Tensor]]]


@pytest.fixture
def model_of(packed_folder: Any, float_folder: Any) -> Callable[..., Model]:
    """``model_of(kind, packed, dtype, kv_bits)``; a packed one has a packed head, too."""

    def make(kind: str, packed: bool, dtype: str, kv_bits: int) -> Model:
        folder: Path = packed_folder(kind, Scheme(4, 32, False)) if packed else float_folder(kind)
        return load(folder, dtype=dtype, kv_bits=kv_bits, device="cpu", head_bits=8 if packed else None)

    return make


@pytest.fixture
def logits_of(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Tensor]]:
    """What each sampler chose from, by its identity."""
    seen: dict[int, list[Tensor]] = {}
    choose = Sampler.__call__

    def watched(self: Sampler, logits: Tensor) -> int:
        seen.setdefault(id(self), []).append(logits.clone())
        return choose(self, logits)

    monkeypatch.setattr(Sampler, "__call__", watched)
    return seen


def requests(count: int, tokens: int) -> tuple[list[list[int]], list[GenerationOptions]]:
    """Prompts of 1 to 150 tokens, some with one beginning, greedy and sampled."""
    draw = random.Random(count)
    common = [draw.randrange(250) for _ in range(130)]
    prompts, options = [], []
    for index in range(count):
        own = [draw.randrange(250) for _ in range(draw.choice((1, 2, 9, 31, 33, 64, 80)))]
        prompts.append(common[: draw.choice((64, 130))] + own if index % 3 == 0 else own)
        warm = index % 2
        options.append(
            GenerationOptions(
                max_tokens=draw.randrange(2, tokens), ignore_eos=True, deterministic=True, seed=index,
                temperature=warm * 1.3, top_k=40 * (index % 4 == 3), top_p=0.9 if index % 5 == 1 else 1.0,
                repetition_penalty=1.2 if index % 7 == 5 else 1.0,
            )
        )  # fmt: skip
    return prompts, options


def answers(
    model: Model, prompts: list[list[int]], options: list[GenerationOptions], seen: dict[int, list[Tensor]]
) -> Answers:
    seen.clear()
    pieces = run(model, prompts, options, end_tokens=(), context=model.context)
    done = {piece.row: piece.done for piece in pieces if piece.done is not None}
    logits = list(seen.values())  # samplers are asked in the order of the prompts
    return [(done[row].tokens, logits[row]) for row in range(len(prompts))]  # type: ignore[union-attr]


def same(alone: Answers, together: Answers) -> bool:
    return all(
        a[0] == b[0] and len(a[1]) == len(b[1]) and all(map(torch.equal, a[1], b[1]))
        for a, b in zip(alone, together, strict=True)
    )


def check(model: Model, sizes: tuple[int, ...], count: int, tokens: int, seen: dict[int, list[Tensor]]) -> None:
    """Fails unless the first and the last prompts, so many at a time, get what each gets alone."""
    prompts, options = requests(count, tokens)
    alone = [answers(model, [p], [o], seen)[0] for p, o in zip(prompts, options, strict=True)]
    for size in sizes:
        for first in {0, count - size}:
            rows = slice(first, first + size)
            assert same(alone[rows], answers(model, prompts[rows], options[rows], seen)), (size, first)


@pytest.mark.parametrize(
    ("kind", "packed", "kv_bits", "dtype"),
    [
        ("llama", False, 16, "float32"),
        ("llama", True, 4, "float32"),
        ("gemma3_text", True, 16, "bfloat16"),
        ("mixtral", False, 4, "bfloat16"),
    ],
)
def test_a_prompt_gets_the_same_logits_alone_and_in_a_batch(
    kind: str, packed: bool, kv_bits: int, dtype: str, model_of: Any, logits_of: dict[int, list[Tensor]]
) -> None:
    check(model_of(kind, packed, dtype, kv_bits), (3, 10), 10, 5, logits_of)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_bits", [16, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_sixty_four_prompts_get_the_same_logits_alone_and_in_any_batch(
    kind: str, packed: bool, kv_bits: int, dtype: str, model_of: Any, logits_of: dict[int, list[Tensor]]
) -> None:
    check(model_of(kind, packed, dtype, kv_bits), SIZES, 64, 8, logits_of)


def test_a_beginning_of_whole_pieces_is_read_once_and_changes_nothing(
    model_of: Any, logits_of: dict[int, list[Tensor]]
) -> None:
    model = model_of("llama", True, "float32", 4)
    model.module.config.max_position_embeddings = 1024
    common = [index * 7 % 250 for index in range(PREFILL_TOKENS)]
    prompts = [[*common, *range(count)] for count in (1, 5, 40)]
    options = [GenerationOptions(max_tokens=3, ignore_eos=True, deterministic=True)] * 3
    alone = [answers(model, [p], [o], logits_of)[0] for p, o in zip(prompts, options, strict=True)]
    assert same(alone, answers(model, prompts, options, logits_of))


@pytest.mark.parametrize(("dtype", "together"), [("float32", 8), ("bfloat16", 1)])
def test_the_compiled_step_takes_eight_sequences_and_any_other_one(dtype: str, together: int, model_of: Any) -> None:
    model = model_of("llama", True, dtype, 16)
    compiled = threads.available()
    assert model.invariant_step == (together if compiled else 1)
    assert model.invariant_head == (GEMM_TOKENS - 1 if compiled else 1)  # a packed head


def test_one_prompt_that_asks_for_it_gets_it_for_the_batch(model_of: Any, logits_of: dict[int, list[Tensor]]) -> None:
    model = model_of("llama", False, "float32", 16)
    prompts, options = requests(4, 5)
    alone = answers(model, prompts[:1], options[:1], logits_of)
    others = [options[0], *(replace(option, deterministic=False) for option in options[1:])]
    assert same(alone, answers(model, prompts, others, logits_of)[:1])


def test_deterministic_is_true_or_false() -> None:
    with pytest.raises(RequestError, match="deterministic='yes'"):
        GenerationOptions(deterministic="yes")  # type: ignore[arg-type]
