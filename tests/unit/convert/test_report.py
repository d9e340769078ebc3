"""The report of a conversion in words: what is told of errors, sizes and trouble."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quantkit.convert.report.report import ConvertReport
from quantkit.convert.results import LayerReport

LAYER = LayerReport("model.layers.0.mlp.up_proj", "W4 g16 asym", 0.1, 0.02, weights=1000, bits=4500)
LAYERS = [
    LAYER,
    replace(LAYER, name="model.layers.1.mlp.up_proj", relative_output_error=0.06, weights=3000, bits=24000),
    replace(LAYER, name="lm_head", relative_output_error=None, scheme="W8 g16 asym"),
]


def report(**changes: Any) -> ConvertReport:
    given: dict[str, Any] = dict(
        out=Path("out"), method="gptq", format="native", scheme="W4 g16 asym", kv_bits=16, layers=LAYERS,
        seconds=12.3, source_bytes=4_000_000, output_bytes=1_000_000, verified_tensors=29,
    )  # fmt: skip
    return ConvertReport(**{**given, **changes})


def line(text: str, start: str) -> str:
    (found,) = [one.strip() for one in text.splitlines() if one.strip().startswith(start)]
    return found


def test_bits_are_averaged_over_weights_not_over_layers() -> None:
    assert report().bits_per_weight == (4500 + 24000 + 4500) / 5000
    assert report(layers=[]).bits_per_weight == 0


def test_the_mean_error_and_the_largest_are_of_measured_layers_alone() -> None:
    told = line(report().table(), "error")
    assert "4.0% on average; largest: model.layers.1.mlp.up_proj 6.0%, model.layers.0.mlp.up_proj 2.0%" in told
    assert "lm_head" not in told
    assert "error" not in report(layers=LAYERS[2:]).table()


def test_sizes_and_what_was_checked_are_told() -> None:
    text = report().table()
    assert line(text, "size") == "size      4.0 MB -> 1.0 MB (4.00 x smaller), 6.600 bits per quantized weight"
    assert "(4.00 x larger)" in line(report(source_bytes=250_000).table(), "size")
    assert line(text, "checked") == "checked   29 tensors read back and equal to what was decided"
    assert line(text, "schemes") == "schemes   W4 g16 asym x 2, W8 g16 asym x 1"


def test_layers_with_one_trouble_share_a_line() -> None:
    bad = [replace(layer, fallback="rounded: no token", dropped_tokens=2, tokens=98) for layer in LAYERS]
    text = report(layers=bad).table()
    assert line(text, "fallback") == f"fallback  {LAYER.name} and 2 more: rounded: no token"
    assert line(text, "trouble").startswith(f"trouble   {LAYER.name} and 2 more: 2 of 100 calibration tokens")
    assert report(layers=bad).dropped_tokens == 6


def test_what_is_stored_restores_an_equal_report() -> None:
    learned = {"model.layers.0": {"before": 1.0, "after": 0.5, "step": 3}}
    full = report(notes=["a"], tuning=learned, rotated=1e-6, sample={"prompt": "a", "text": "b"})
    again = report(layers=[], verified_tensors=0)
    again.restore(full.to_store(), Path("job.json"))
    assert again == full
    assert again.to_json() == full.to_json()


def test_a_long_job_tells_where_its_time_went_and_a_short_one_does_not() -> None:
    stages = {"plan": 1.0, "blocks": 4.0, "observe": 50.0, "solve": 40.0, "verify": 5.0}
    told = line(report(seconds=100.0, stage_seconds=stages).table(), "of that")
    assert told == "of that   observe 50 s, solve 40 s, verify 5 s, rest 5 s"
    assert "of that" not in report(seconds=10.0, stage_seconds=stages).table()
    assert report(stage_seconds=stages).to_json()["stage_seconds"] == stages
