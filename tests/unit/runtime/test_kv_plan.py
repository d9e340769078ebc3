"""Which cache a model gets: what the checkpoint says, what is asked for, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.core.kvscheme import KVPlan, KVScheme, LayerScales
from quantkit.errors import RequestError
from quantkit.runtime.kv_cache.choose import kv_plan

NAME = "model.layers.0.self_attn"


def stored(bits: int | str, other: int | str | None = None) -> KVPlan:
    """As convert writes it: every layer named, with static scales whatever is used."""
    scale = torch.ones(2, 16)
    static = {name: LayerScales(scale, scale * 0, scale, scale * 0) for name in (NAME, NAME.replace("0", "1"))}
    one, two = KVScheme.of(bits), KVScheme.of(other or bits)
    return KVPlan(one, dict(zip(static, (one, two), strict=True)), static)


def test_what_is_stored_is_used_where_nothing_else_is_asked_for() -> None:
    plan = stored(4)
    assert kv_plan(plan, None, None) is plan
    assert kv_plan(plan, 4, None) is plan
    assert kv_plan(plan, "4", "online") is plan
    assert kv_plan(None, None, None).quantized is False
    budget = stored(4, 2)
    assert kv_plan(budget, None, None) is budget
    assert kv_plan(budget, 4, None).layers == {}


def test_static_scales_are_of_the_bits_that_they_were_calibrated_for() -> None:
    plan = kv_plan(stored(4), 4, "static")
    assert {scheme.scales for scheme in [plan.scheme, *plan.layers.values()]} == {"static"}
    assert kv_plan(stored(4, 2), None, "static").label == "3.00 on average"


@pytest.mark.parametrize(
    ("plan", "bits", "scales", "message"),
    [
        (None, None, "static", "says nothing about its cache"),
        (None, 16, "static", "no effect on a KV cache of 16 bits"),
        (stored(4), 16, "online", "no effect on a KV cache of 16 bits"),
        (None, 4, "static", "--kv-bits 4: this checkpoint holds no static KV scales. Convert with --kv-bits 4"),
        (
            stored(4),
            8,
            "static",
            "--kv-bits 8: the static KV scales of this checkpoint are for 4 bits. Leave --kv-bits out",
        ),
        (stored(4, 2), "k4v2", "static", "are for 3.00 bits on average"),
        (stored("fp8"), 4, "static", "are those of an fp8 cache"),
        (None, "fp8", "static", "Convert again"),
        (None, "fp8", "online", "Convert again"),
        (stored("fp8"), None, "static", "Convert again"),
        (stored("fp8"), None, "online", "Convert again"),
        (stored(4), None, "fp8", "Convert again"),
        (None, 5, None, "16, 8, 4, 3, 2 or fp8"),
        (None, "k4", None, "16, 8, 4, 3, 2 or fp8"),
        (None, "k4v5", None, "16, 8, 4, 3, 2"),
    ],
)
def test_what_cannot_be_is_refused(plan: KVPlan | None, bits: Any, scales: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        kv_plan(plan, bits, scales)
