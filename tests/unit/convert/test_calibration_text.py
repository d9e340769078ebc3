"""Token windows: text that the model writes itself, random tokens, and notes where there are too few."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import tiny_model
from torch import nn

from quantkit.algorithms.distil import ADAM_STEP_TOKENS
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan import self_calibration
from quantkit.convert.plan.calibration_text import too_few_tokens, unused_windows
from quantkit.convert.plan.random_tokens import TOKENS, draw
from quantkit.convert.plan.self_calibration import cut, first_tokens, note, planned, sequences, windows_in_all
from quantkit.errors import RequestError, SourceError
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.skeleton import block_linears, build_skeleton


class Tokenizer:
    """Ten tokens, of which 0, 1 and 9 are special. bos: whether its own encoding begins with one."""

    all_special_ids = (0, 1, 9)

    def __init__(self, bos: bool = False) -> None:
        self.bos_token_id, self.bos = 1, bos

    def __len__(self) -> int:
        return 10

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [*([1] if self.bos else []), 5]}

    bos_token = "<s>"

    def get_vocab(self) -> dict[str, int]:
        return {}


def asked(**options: Any) -> ConvertOptions:
    return ConvertOptions("model", Path("out"), **{"calibration": "self", **options})


def test_windows_lie_side_by_side_where_there_are_enough_ids_and_overlap_evenly_where_not() -> None:
    ids = torch.arange(12)
    assert cut(ids, 3, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert cut(ids, 2, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # never further apart than a window
    assert cut(ids, 5, 4).tolist() == [[i, i + 1, i + 2, i + 3] for i in (0, 2, 4, 6, 8)]
    assert cut(ids, 1, 12).tolist() == [list(range(12))]
    assert cut(ids, 3, 12).tolist() == [list(range(12))] * 3


def test_one_sequence_is_written_for_each_window_up_to_a_limit_of_tokens() -> None:
    limit = self_calibration.TOKENS
    assert sequences(asked(samples=5, seq_len=64)) == 5
    assert sequences(asked(samples=5, seq_len=64, distil=16)) == windows_in_all(asked(samples=5, distil=16)) == 21
    assert sequences(asked(samples=1000, seq_len=1024)) == limit // 1024
    assert sequences(asked(samples=3, seq_len=2 * limit)) == 1
    assert "overlap" not in note(asked(samples=5, seq_len=64), 10**9)
    assert f"writes {limit // 1024} x 1024 tokens first, cut into 1000 windows" in note(
        asked(samples=1000, seq_len=1024), 10**9
    )


@pytest.mark.parametrize("bos", [False, True])
def test_the_plan_knows_the_windows_before_they_are_written(bos: bool) -> None:
    found = planned(asked(samples=3, seq_len=4, seed=5), Tokenizer(bos))
    assert (found.ids.shape, found.ids.dtype, found.ids.is_meta) == ((3, 4), torch.int64, True)
    assert (found.bos, found.seed, found.name) == (bos, 5, "self")
    shortest = 3 if bos else 2
    planned(asked(seq_len=shortest), Tokenizer(bos))
    if bos:
        with pytest.raises(RequestError, match="needs 2 tokens besides BOS"):
            planned(asked(seq_len=shortest - 1), Tokenizer(bos))


def test_first_tokens_are_ordinary_ones_that_the_model_has_and_the_seed_decides_them() -> None:
    found = first_tokens(Tokenizer(), 7, 200, seed=1)
    assert set(found.tolist()) == {2, 3, 4, 5, 6}  # the model has an embedding for no other
    assert set(first_tokens(Tokenizer(), 100, 200, seed=1).tolist()) == {2, 3, 4, 5, 6, 7, 8}
    assert torch.equal(found, first_tokens(Tokenizer(), 7, 200, seed=1))
    assert not torch.equal(found, first_tokens(Tokenizer(), 7, 200, seed=2))
    with pytest.raises(SourceError, match="special tokens only"):
        first_tokens(Tokenizer(), 2, 1, seed=0)


@pytest.mark.parametrize("bos", [False, True])
def test_random_tokens_are_one_window_that_the_context_holds(bos: bool) -> None:
    found = draw(Tokenizer(bos), 7, 16, seed=3)
    assert found.ids.shape == (1, 16)
    assert (int(found.ids[0, 0]) == 1) == bos
    assert set(found.ids[0, 1:].tolist()) <= {2, 3, 4, 5, 6}
    assert draw(Tokenizer(bos), 7, None, seed=3).ids.shape == draw(Tokenizer(bos), 7, 10**6, seed=3).ids.shape
    assert draw(Tokenizer(bos), 7, None, seed=3).ids.shape == (1, TOKENS)
    assert draw(Tokenizer(bos), 7, 16, seed=3).text_sha256 == found.text_sha256
    assert draw(Tokenizer(bos), 7, 16, seed=4).text_sha256 != found.text_sha256


def blocks(*widths: int) -> Any:
    modules = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 4), "down": nn.Linear(width, 8)}) for width in widths])
    return SimpleNamespace(modules=modules)


def test_fewer_tokens_than_the_widest_linear_has_inputs_are_noted() -> None:
    assert too_few_tokens(48, blocks(16, 48, 32)) == []
    (told,) = too_few_tokens(47, blocks(16, 48, 32))
    assert told.startswith("47 calibration tokens are fewer than the 48 inputs of the widest linear")
    assert too_few_tokens(0, blocks()) == []


def test_experts_do_not_count_among_the_widest() -> None:
    """They see a share of the tokens, which is counted when they have run."""
    config = tiny_model("qwen3_moe", moe_intermediate_size=160, intermediate_size=48).config
    modules = build_skeleton(config.to_dict()).model.layers
    linears = [(expert_linears(block), block_linears(block)) for block in modules]
    experts = {module.in_features for inside, found in linears for name, module in found.items() if name in inside}
    others = {module.in_features for inside, found in linears for name, module in found.items() if name not in inside}
    assert max(experts) == 160 > max(others)
    assert too_few_tokens(max(others), SimpleNamespace(modules=modules)) == []
    assert len(too_few_tokens(max(others) - 1, SimpleNamespace(modules=modules))) == 1


def test_windows_that_do_not_fill_a_step_are_noted_with_their_number() -> None:
    length = ADAM_STEP_TOKENS // 3  # three windows a step
    assert unused_windows(asked(seq_len=length, distil=0)) == []
    assert unused_windows(asked(seq_len=length, distil=24)) == []
    assert unused_windows(asked(seq_len=length, distil=26)) == [
        "--distil 26: a step takes 3 windows, 24 of them are used"
    ]
