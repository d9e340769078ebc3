"""What stages hand to each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.algorithms.rtn import rtn
from quantkit.convert.results import BlockResult, Collected, LayerReport, decision_sha256
from quantkit.core.scheme import Scheme

LAYER = LayerReport("model.layers.0.mlp.up_proj", "W4 g16 asym", 0.123456789, 0.0234567891, weights=3200, bits=14400)


def test_a_digest_changes_with_codes_scales_zeros_and_scheme_and_with_nothing_else() -> None:
    q = rtn(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), Scheme(4, 16, False)).quantized
    assert q.zeros is not None
    codes, scales, zeros = q.codes.clone(), q.scales.clone(), q.zeros.clone()
    codes[3, 5] ^= 1
    scales[2, 1] *= 2
    zeros[7, 0] = (zeros[7, 0] + 1) % 16
    others = [
        replace(q, stored=codes),
        replace(q, scales=scales),
        replace(q, zeros=zeros),
    ]
    assert decision_sha256(replace(q, stored=q.codes.clone())) == decision_sha256(q)
    assert len({decision_sha256(one) for one in (q, *others)}) == 4
    plain = rtn(torch.ones(8, 32), Scheme(8, None, True)).quantized
    rounded = replace(plain, scheme=replace(plain.scheme, activations="int8"))
    assert decision_sha256(plain) != decision_sha256(rounded)


def test_what_is_collected_of_blocks_is_all_of_it_in_order_without_tensors() -> None:
    collected = Collected()
    second = replace(LAYER, name="model.layers.1.mlp.up_proj")
    first = BlockResult({"a": torch.ones(2)}, {"a": "1"}, [LAYER], notes=["early"], tuning={"b0": {"before": 1.0}})
    collected.add(first)
    collected.add(
        BlockResult({}, {"b": "2"}, [second], notes=["late"], folds={"b1": {"norm": True}}, distilled={"steps": 3})
    )
    collected.add(BlockResult())  # what says nothing takes nothing back
    assert collected == Collected(
        digests={"a": "1", "b": "2"}, layers=[LAYER, second], notes=["early", "late"],
        folds={"b1": {"norm": True}}, tuning={"b0": {"before": 1.0}}, distilled={"steps": 3},
    )  # fmt: skip


def test_the_last_error_is_that_of_the_last_layer_if_it_was_measured() -> None:
    assert Collected().last_error() == ""
    assert Collected(layers=[LAYER]).last_error() == "up_proj error 2.3%"
    assert Collected(layers=[LAYER, replace(LAYER, relative_output_error=None)]).last_error() == ""


def test_a_layer_in_json_has_five_digits_and_the_bits_of_a_weight() -> None:
    told = LAYER.to_json()
    assert (told["relative_weight_error"], told["relative_output_error"]) == (0.12346, 0.023457)
    assert told["bits_per_weight"] == pytest.approx(4.5)
    assert replace(LAYER, relative_output_error=None).to_json()["relative_output_error"] is None
