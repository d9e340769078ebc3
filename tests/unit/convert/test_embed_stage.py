"""The first stage: hidden states in front of block 0, and the arguments of the blocks.

With those the blocks give the model's own states.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stage_models import IDS, Stored, stored
from torch import Tensor

from quantkit.convert.stages.embed import SHORT, HiddenStates, embed
from quantkit.errors import UnsupportedModel
from quantkit.model.stepper import run_block

CPU = torch.device("cpu")


def embedded(model: Stored, given: list[Tensor] | None = None, **changes: Any) -> HiddenStates:
    return embed(model.model, model.blocks, model.weights, IDS, CPU, given, **changes)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])  # embeddings alone; scaled; with positions
def test_states_and_arguments_are_those_of_the_models_own_forward(kind: str, tmp_path: Path) -> None:
    model = stored(tmp_path, kind)
    hidden = embedded(model)
    with torch.no_grad():
        own = model.original(IDS, output_hidden_states=True, use_cache=False).hidden_states
        assert len(hidden.calls) == len(hidden.short) == len(hidden.single) == len(model.blocks) == 3
        assert torch.equal(torch.cat(hidden.states), own[0])
        for index in (0, 1):
            block = model.original.get_submodule(model.blocks.name(index))
            torch.testing.assert_close(run_block(block, own[index], hidden.calls[index]), own[index + 1])
            single = run_block(block, own[index][:1], hidden.single[index])
            torch.testing.assert_close(single, own[index + 1][:1])
            short = run_block(block, own[index][:1, :SHORT], hidden.short[index])
            torch.testing.assert_close(short, own[index + 1][:1, :SHORT], rtol=1e-4, atol=1e-5)  # causal


def test_batches_are_alike_hold_no_more_than_asked_for_and_every_window_in_order(tmp_path: Path) -> None:
    model = stored(tmp_path)
    whole, split = embedded(model), embedded(model, tokens=4 * IDS.shape[1])
    assert [len(state) for state in whole.states] == [9]
    assert [len(state) for state in split.states] == [3, 3, 3]  # the most up to four that divide nine
    assert torch.equal(torch.cat(split.states), whole.states[0])


def test_the_memory_of_what_lies_before_the_blocks_is_free_again(tmp_path: Path) -> None:
    model = stored(tmp_path)
    embedded(model)
    assert all(parameter.is_meta for parameter in model.model.parameters())


def test_stored_states_are_taken_as_they_are_with_the_same_arguments(tmp_path: Path) -> None:
    model = stored(tmp_path)
    fresh, given = embedded(model), [torch.randn(3, 24, 32) for _ in range(3)]
    again = embedded(model, [state.clone() for state in given])
    assert all(torch.equal(a, b) for a, b in zip(again.states, given, strict=True))
    for before, after in zip(fresh.calls, again.calls, strict=True):
        for a, b in zip(before.kwargs["position_embeddings"], after.kwargs["position_embeddings"], strict=True):
            assert torch.equal(a[:1], b[:1])


def test_other_values_take_the_place_of_the_stored_embeddings(tmp_path: Path) -> None:
    model, table = stored(tmp_path), torch.randn(100, 32)
    hidden = embedded(model, replaced={"model.embed_tokens.weight": table})
    assert torch.equal(torch.cat(hidden.states), table[IDS])


def test_arguments_that_depend_on_the_tokens_are_refused(tmp_path: Path) -> None:
    model = stored(tmp_path)
    rotary = model.model.get_submodule("model.rotary_emb")
    plain = rotary.forward
    rotary.forward = lambda x, *args, **kwargs: [table + x.mean() for table in plain(x, *args, **kwargs)]
    with pytest.raises(UnsupportedModel, match="depend on the tokens, not only on their positions"):
        embedded(model, tokens=3 * IDS.shape[1])
