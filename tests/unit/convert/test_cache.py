"""From statistics of layers to the plan of a cache, and what is said of it."""

from __future__ import annotations

import json

import pytest
import torch

from quantkit.algorithms.kv import KVObserver, LayerRanges
from quantkit.convert.job.records import from_record, to_record
from quantkit.convert.options.kv_request import BUDGET_BITS, CacheRequest, label_words
from quantkit.convert.report.kv_cache import summary, summary_lines
from quantkit.convert.stages.kv_cache import decide_cache, engine_scales
from quantkit.core.kvscheme import KVScheme

NAMES = [f"model.layers.{i}.self_attn" for i in range(3)]


def observer(seed: int = 0) -> KVObserver:
    made = torch.Generator().manual_seed(seed)
    found = KVObserver()
    found.add(*(torch.randn(1, 2, 100, 64, generator=made) for _ in range(2)))
    return found


def budgeted(budget: float, weights: tuple[float, ...] = (1, 100, 1)) -> tuple[CacheRequest, dict[str, LayerRanges]]:
    """Layers whose keys cost ``weights``, and whose values cost a tenth of it."""
    asked, layers = CacheRequest(KVScheme(), budget), {}
    for name, weight in zip(NAMES, weights, strict=True):
        ranges = observer().ranges(asked.candidates())
        sensitivity = {bits: weight * 4.0**-bits for bits in BUDGET_BITS}
        layers[name] = LayerRanges(
            ranges.keys, ranges.values, sensitivity, {b: cost / 10 for b, cost in sensitivity.items()}
        )
    return asked, layers


def test_without_a_budget_all_layers_are_alike() -> None:
    asked = CacheRequest(KVScheme.of("k4v2", "static"))
    plan = decide_cache(asked, {name: observer().ranges(asked.candidates()) for name in NAMES})
    assert plan.layers == dict.fromkeys(NAMES, KVScheme.of("k4v2", "static"))
    assert (plan.scheme, plan.label) == (KVScheme.of("k4v2", "static"), "k4v2")


def test_a_budget_goes_to_what_costs_most_and_scales_are_those_of_its_bits() -> None:
    asked, layers = budgeted(3.0)
    plan = decide_cache(asked, layers)
    found = {name: (one.keys, one.values) for name, one in plan.layers.items()}
    assert found[NAMES[1]][0] == max(bits for pair in found.values() for bits in pair)
    assert sum(map(sum, found.values())) <= 3.0 * 6
    for name, (keys, values) in found.items():
        assert torch.equal(plan.static[name].k_scale, layers[name].keys[keys][0])
        assert torch.equal(plan.static[name].v_low, layers[name].values[values][1])
    cache = summary(plan, layers, 3.0)
    assert cache["code_bits"] == sum(map(sum, found.values())) / 6
    lines = summary_lines(cache)
    assert len(lines) == 2 + 3
    assert "budget 3" in lines[0]


@pytest.mark.parametrize(
    ("bits", "scales", "stored"),
    [(4, "online", 4.5), (4, "static", 4.0), ("fp8", "online", 8.0), ("k16v2", "online", (16 + 2.5) / 2)],
)
def test_stored_bits_count_the_scales_of_pages(bits: int | str, scales: str, stored: float) -> None:
    asked = CacheRequest(KVScheme.of(bits, scales))  # type: ignore[arg-type]
    layers = {name: observer().ranges(asked.candidates()) for name in NAMES}
    assert summary(decide_cache(asked, layers), layers, None)["stored_bits"] == stored


def test_a_record_gives_back_every_bit() -> None:
    for layers in (budgeted(3.0)[1], {"x": observer(1).ranges([KVScheme.of("k8v16")])}):
        for ranges in layers.values():
            back = from_record(json.loads(json.dumps(to_record(ranges))))
            for side in ("keys", "values"):
                old, new = getattr(ranges, side), getattr(back, side)
                assert list(old) == list(new)
                assert all(torch.equal(a, b) for bits in old for a, b in zip(old[bits], new[bits], strict=True))
            assert (back.key_sensitivity, back.value_sensitivity) == (ranges.key_sensitivity, ranges.value_sensitivity)


def test_engines_find_the_scales_beside_the_stored_projections() -> None:
    asked = CacheRequest(KVScheme.of("fp8"))
    plan = decide_cache(asked, {name: observer(i).ranges(asked.candidates()) for i, name in enumerate(NAMES)})
    stored = {
        f"{name}.{part}": f"language_{name}.{part}" for name in NAMES for part in ("q_proj.weight", "o_proj.weight")
    }
    found = engine_scales(plan, stored)
    assert sorted(found) == sorted(f"language_{name}.{side}_scale" for name in NAMES for side in "kv")
    assert all(float(found[f"language_{name}.k_scale"]) == float(plan.static[name].k_scale[1, 7]) for name in NAMES)


def test_words() -> None:
    assert label_words(4) == "KV cache 4 bits"
    assert label_words("k4v2") == "KV cache k4v2"
    assert label_words("fp8") == "KV cache fp8"
    assert label_words("2.83 on average") == "KV cache 2.83 bits on average"
    assert CacheRequest(KVScheme(), 3.0).words() == "KV cache within 3 bits on average"
