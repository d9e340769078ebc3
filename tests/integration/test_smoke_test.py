"""A short generation before the folder gets its name; presets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit as qk
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.options.presets import apply_preset
from quantkit.convert.plan import memory
from quantkit.convert.plan.plan import make_plan
from quantkit.errors import NumericsError, RequestError, UnsupportedModel


def test_the_written_model_continues_the_calibration_text(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = qk.convert(
        tiny_original,
        out=tmp_path / "out",
        calibration=str(calibration_text),
        samples=2,
        seq_len=32,
        group_size=32,
        kv_bits=8,
    )
    assert report.sample is not None
    assert report.sample["prompt"] in calibration_text.read_text()
    model = qk.load(tmp_path / "out")
    ids = make_plan(
        ConvertOptions(
            str(tiny_original), tmp_path / "x", calibration=str(calibration_text), samples=2, seq_len=32, group_size=32
        )
    ).inputs.calibration.ids[0, :16]  # type: ignore[union-attr]
    assert report.sample["text"].startswith(model.tokenizer.decode(int(model(ids[None])[0, -1].argmax())))
    assert "  sample    " in report.table()


def test_a_model_that_overflows_does_not_get_its_name(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 3e38, dtype=torch.float32)
    tensors["model.embed_tokens.weight"] *= 1000
    save_file(tensors, tiny_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match="logits that are not finite"):
        qk.convert(tiny_model, out=tmp_path / "out", method="rtn", group_size=32)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (TypeError("no such argument"), "TypeError in the model's own code: no such argument"),
        (UnsupportedModel("its head takes more"), "its head takes more"),
    ],
)
@pytest.mark.parametrize("part", ["step", "head"])
def test_a_sample_that_fails_does_not_fail_a_finished_conversion(
    part: str, error: Exception, note: str, tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(f"quantkit.runtime.model.Model.{part}", fail)
    report = qk.convert(tiny_original, out=tmp_path / "out", method="rtn", group_size=32)
    assert report.sample is None
    assert f"no sample was generated: {note}" in report.notes
    assert (tmp_path / "out" / "config.json").exists()


def test_a_large_model_is_not_run_and_the_report_says_so(
    tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GENERATE_BYTES", 0)
    monkeypatch.setattr("quantkit.convert.plan.memory_inputs.packed_model", lambda *a: 10**15)
    report = qk.convert(tiny_original, out=tmp_path / "out", method="rtn", group_size=32)
    assert report.sample is None
    assert any("no sample was generated" in note for note in report.notes)
    assert report.predicted_host_bytes < 10**15


def test_a_preset_sets_method_and_scales_and_an_option_wins() -> None:
    assert apply_preset("fast", {}) == {"method": "hqq", "scales": "search"}
    assert apply_preset("balanced", {"scales": "minmax", "method": "gptq"}) == {"fold": True, "guided": True}
    assert apply_preset(None, {"method": "gptq"}) == {}
    with pytest.raises(RequestError, match="Leave one of them out"):
        apply_preset("balanced", {"method": "rtn"})


def test_presets_reach_the_job(quantkit: Callable[..., Any], tiny_original: Path, tmp_path: Path) -> None:
    def planned(*arguments: str) -> Any:
        done = quantkit(
            "convert", tiny_original, "--out", tmp_path / "out", "--group-size", "32", "--dry-run", "--json", *arguments
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["options"]

    assert planned("--preset", "fast")["method"] == "hqq"
    assert planned("--preset", "fast", "--scales", "minmax")["scales"] == "minmax"
