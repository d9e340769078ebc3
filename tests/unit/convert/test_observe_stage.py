"""The observing stage: statistics, compared with sums over inputs that are caught here."""

from __future__ import annotations

from typing import Any

import torch
from stage_models import IDS, first_block, groups_of, inputs_of
from torch import Tensor

from quantkit.algorithms.kv import KVObserver
from quantkit.convert.options.kv_request import CacheRequest
from quantkit.convert.results import BlockResult, InputGroup
from quantkit.convert.stages.observe import observe_block, observe_cache
from quantkit.core.kvscheme import KVScheme
from quantkit.model.stepper import run_block

PREFIX, ATTENTION = "model.layers.0", "model.layers.0.self_attn"
REQUEST = CacheRequest(KVScheme.of("k4v2", "static"))


def observed(layer: Any, result: BlockResult, names: Any = None, **changes: Any) -> list[InputGroup]:
    given: dict[str, Any] = dict(original=[], crossed=False, correlations=True, guide=None, cache=None)
    states = list(layer.states.split(3))
    call = changes.pop("call", None) or layer.call
    return observe_block(
        PREFIX, layer.block, layer.names if names is None else names, states, call, result, **{**given, **changes}
    )


def test_the_statistics_of_each_group_are_means_over_all_tokens() -> None:
    layer, result = first_block(), BlockResult()
    groups = observed(layer, result)
    assert [group.names for group in groups] == layer.names
    for group, expected in zip(groups, groups_of(layer), strict=True):
        assert group.hessian is not None
        assert expected.hessian is not None
        assert (group.tokens, group.dropped, group.cross) == (9 * 24, 0, None)
        torch.testing.assert_close(group.hessian.double(), expected.hessian, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(group.largest, expected.largest)
    assert result == BlockResult()


def test_only_the_groups_that_are_asked_for_are_observed() -> None:
    layer = first_block()
    (group,) = observed(layer, BlockResult(), [layer.names[-1]])
    assert group.names == layer.names[-1] == ("mlp.down_proj",)
    assert observed(layer, BlockResult(), []) == []


def test_the_originals_states_go_through_the_block_and_their_inputs_are_compared() -> None:
    layer = first_block()
    other = layer.states + 0.1 * torch.randn(layer.states.shape, generator=torch.Generator().manual_seed(7))
    original: list[Tensor] = list(other.clone().split(3))
    groups = observed(layer, BlockResult(), original=original, crossed=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(original), run_block(layer.block, other, layer.call))
        x = inputs_of(layer)
        layer.states = other
        y = inputs_of(layer)
    for group in groups:
        name = group.names[0]
        assert group.cross is not None
        expected = (y[name] - x[name]).t() @ x[name] / len(x[name])
        torch.testing.assert_close(group.cross.double(), expected, rtol=1e-3, atol=1e-4)


def test_tokens_that_are_not_finite_are_counted_and_left_out() -> None:
    layer = first_block()
    layer.states = layer.states.clone()
    layer.states[4, 11, 3] = float("nan")
    (group,) = observed(layer, BlockResult(), layer.names[:1])
    x = inputs_of(layer)["self_attn.q_proj"]
    x = x[torch.isfinite(x).all(1)]
    assert (group.tokens, group.dropped, len(x)) == (9 * 24 - 1, 1, 9 * 24 - 1)
    assert group.hessian is not None
    torch.testing.assert_close(group.hessian.double(), x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def test_a_pass_of_its_own_finds_the_same_ranges_of_the_cache_as_the_pass_over_the_statistics() -> None:
    layer, together, alone = first_block(), BlockResult(), BlockResult()
    observed(layer, together, cache=(REQUEST, ATTENTION))
    observe_cache(REQUEST, ATTENTION, layer.block, list(layer.states.split(3)), layer.call, alone)
    by_hand = KVObserver()
    values = inputs_of(layer)["self_attn.v_proj"].float() @ layer.block.get_parameter("self_attn.v_proj.weight").t()
    values = values.reshape(9, 24, 2, 8).transpose(1, 2)
    by_hand.add(torch.zeros_like(values), values)  # keys go through rotary embeddings first: not compared
    expected = by_hand.ranges([REQUEST.scheme]).values[2]
    for ranges in (together.kv[ATTENTION], alone.kv[ATTENTION]):
        for found, wanted in zip(ranges.values[2], expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(together.kv[ATTENTION].keys[4], alone.kv[ATTENTION].keys[4], strict=True):
        assert torch.equal(a, b)


def test_starved_experts_are_named_with_the_block() -> None:
    layer, result = first_block("mixtral", IDS[:3, :4]), BlockResult()
    observed(layer, result, call=first_block("mixtral", IDS[:1, :4]).call)
    (note,) = result.notes
    assert note.startswith(f"{PREFIX}.mlp.experts: 4 experts saw fewer tokens than their 64 inputs")
