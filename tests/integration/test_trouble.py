"""Trouble has a policy, and the report names the layer (architecture, section 4): each kind is planted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quantkit
from quantkit.calibrate.stats import Hessian
from quantkit.checkpoint.open import open_source
from quantkit.convert import run
from quantkit.convert.stages import observe as observe_stage
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.errors import NumericsError
from quantkit.formats import PACKED
from quantkit.formats.reader import QuantizedReader

Convert = Callable[..., Any]


@pytest.fixture
def convert(tiny_model: Path, calibration_text: Path, tmp_path: Path) -> Convert:
    """16 windows of 16 tokens: one spoiled window is 6%."""

    def convert(**options: Any) -> Any:
        small = dict(samples=16, seq_len=16, group_size=32)
        return quantkit.convert(
            tiny_model, out=tmp_path / "out", calibration=str(calibration_text), **{**small, **options}
        )

    return convert


def plant_in_states(monkeypatch: pytest.MonkeyPatch, windows: int, value: float) -> None:
    """Token 5 of the first windows leaves the embedding with one bad entry."""
    embed = run.embed

    def spoiled(*args: Any) -> Any:
        found = embed(*args)
        found.states[0][:windows, 5, 3] = value
        return found

    monkeypatch.setattr(run, "embed", spoiled)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_spoiled_token_is_left_out_and_every_layer_it_reached_is_named(
    value: float, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_states(monkeypatch, 1, value)
    report = convert(kv_bits=8)
    dropped = {layer.name: layer.dropped_tokens for layer in report.layers}
    assert all(layer.tokens + layer.dropped_tokens == 256 for layer in report.layers)
    assert dropped["model.layers.0.self_attn.q_proj"] == (0 if value == 1e30 else 1)  # the norm tames a large one
    if value != 1e30:
        # inside attention it reaches the tokens after it (and, through 0 x NaN, may reach those before it), in its
        # window
        assert 11 <= dropped["model.layers.0.self_attn.o_proj"] <= 16
        assert 11 <= dropped["model.layers.2.mlp.down_proj"] <= 16
        assert "trouble   model.layers.0.self_attn.q_proj and 2 more: 1 of 256 calibration tokens" in report.table()
        assert any("layers.1.self_attn" in note and "KV scales" in note for note in report.notes)
        assert any("KV scales" in note for note in report.to_json()["notes"])
    assert report.to_json()["dropped_tokens"] == sum(dropped.values())
    assert all(0 <= layer.relative_output_error < 0.5 for layer in report.layers)
    assert quantkit.load(tmp_path / "out").generate("The old", max_tokens=2).tokens


def test_too_many_spoiled_tokens_end_the_job_with_the_layer_and_the_remedy(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    plant_in_states(monkeypatch, 4, float("nan"))  # 4 of 256 tokens at first, 4 windows of 16 behind the attention
    with pytest.raises(NumericsError, match=r"model\.layers\.0\.self_attn\.o_proj: .* of 256 .*10%.*--method rtn"):
        convert()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("excess", "fallback"), [(-0.03, None), (-0.1, None), (-10.0, "rounded")])
def test_a_hessian_that_cannot_be_factorised_raises_damping_then_is_rounded(
    excess: float, fallback: str | None, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eigenvalue below zero, as cancellation may leave one: by that share of the mean diagonal."""
    result = Hessian.result

    def indefinite(self: Hessian, name: str = "input") -> Tensor:
        h = result(self, name)
        if "layers.1.mlp.down_proj" in name:
            vector = torch.ones(len(h), dtype=h.dtype) / len(h) ** 0.5
            h -= torch.outer(vector, vector) * (vector @ h @ vector - excess * h.diagonal().mean())
        return h

    monkeypatch.setattr(Hessian, "result", indefinite)
    report = convert()
    hit = next(layer for layer in report.layers if layer.name == "model.layers.1.mlp.down_proj")
    others = [layer for layer in report.layers if layer is not hit]
    assert all(layer.fallback is None and layer.damping == 0.01 for layer in others)
    if fallback is None:
        assert hit.damping > 0.01
        assert hit.fallback is None
        assert any(
            "model.layers.1.mlp.down_proj: damping raised from 0.01" in note for note in report.to_json()["notes"]
        )
        assert "damping raised" in report.table()
    else:
        assert hit.fallback.startswith(fallback)
        assert "fallback  model.layers.1.mlp.down_proj: rounded" in report.table()


def test_an_input_that_never_varies_is_no_trouble(
    tiny_model: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A singular Hessian (a dead input, two equal ones) is the normal case: damping alone factorises it."""
    result = Hessian.result

    def singular(self: Hessian, name: str = "input") -> Tensor:
        h = result(self, name)
        h[0], h[:, 0] = 0, 0
        h[2], h[:, 2] = h[1].clone(), h[:, 1].clone()
        h[2, 2] = h[1, 1]
        return h

    monkeypatch.setattr(Hessian, "result", singular)
    assert all(layer.fallback is None and layer.damping == 0.01 for layer in convert().layers)


def test_a_layer_that_never_sees_data_is_rounded_and_named(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = observe_stage.observe

    def blind(block: Any, states: Any, call: Any, groups: Any, *rest: Any, **named: Any) -> Any:
        hessians = observe(block, states, call, groups, *rest, **named)
        return [
            Hessian(h.sum.shape[0]) if "self_attn.o_proj" in names else h
            for names, h in zip(groups, hessians, strict=True)
        ]

    monkeypatch.setattr(observe_stage, "observe", blind)
    report = convert()
    named = {layer.name: layer.fallback for layer in report.layers if layer.fallback}
    assert set(named) == {f"model.layers.{i}.self_attn.o_proj" for i in range(3)}
    assert "no calibration token reached" in named["model.layers.0.self_attn.o_proj"]
    assert "fallback  model.layers.0.self_attn.o_proj and 2 more: rounded" in report.table()
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert [layer["name"] for layer in manifest["layers"] if layer["fallback"]] == sorted(named)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", PACKED)
def test_zero_rows_groups_and_layers_stay_zero_in_every_format(
    form: str, symmetric: bool, tiny_model: Path, convert: Convert, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_model / "model.safetensors"
    tensors = load_file(path)
    up, q, v = (f"model.layers.1.{name}.weight" for name in ("mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj"))
    tensors[up][3] = 0  # a row
    tensors[q][:, :32] = 0  # a group of each row
    tensors[v].zero_()  # a layer
    save_file(tensors, path, metadata={"format": "pt"})
    report = convert(format=form, symmetric=symmetric)
    reader = QuantizedReader(open_source(tmp_path / "out"))
    # GPTQ moves other columns' errors into a group of zeros too, as far as its safe scale reaches
    for name, region, reach in (
        (up, slice(3, 4), 0),
        (q, (slice(None), slice(32)), 15 * SMALLEST_SCALE),
        (v, slice(None), 0),
    ):
        weight = reader.module(name.removesuffix(".weight")).dequantize()
        assert bool(torch.isfinite(weight).all()), name
        assert float(weight[region].abs().max()) <= reach, name
    assert all(layer.relative_output_error < 0.5 and layer.relative_weight_error < 0.5 for layer in report.layers)
    assert quantkit.load(tmp_path / "out").generate("The old", max_tokens=2).tokens
