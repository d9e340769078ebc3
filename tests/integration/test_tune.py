"""--method tune on a tiny model: what is written is what was learned, and it is better than its start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model as tiny_architecture
from stopping import stop_at, watch
from written import digest

import quantkit
from quantkit.algorithms.tune import block_error
from quantkit.calibrate.data import load_windows
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert.stages import tune
from quantkit.errors import RequestError

TEXT: dict[str, Any] = dict(method="tune", samples=12, seq_len=32, group_size=32, tune_steps=12)


def first_block_error(original: Path, written: Path, text: Path, channels: torch.Tensor) -> float:
    """Of block 0 as an engine runs it, on the windows that are held back."""
    source = open_source(original)
    ids = load_windows(str(text), load_tokenizer(source), samples=12, seq_len=32, seed=0, vocab_size=512).ids
    both = [
        quantkit.load(folder, device="cpu", dtype="float32", dequantize=folder is written).module
        for folder in (original, written)
    ]
    outputs: list[list[torch.Tensor]] = [[], []]
    for model, seen in zip(both, outputs, strict=True):
        block = model.model.layers[0]
        block.register_forward_hook(
            lambda module, args, out, seen=seen: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            for i in (0, 8):
                model(input_ids=ids[i : i + 1], use_cache=False)
    return sum(float(block_error(mine, wanted, channels)) for wanted, mine in zip(*outputs, strict=True)) / 2


@pytest.mark.parametrize("mode", ["float32", "bf16"])
def test_a_block_learns_in_the_products_asked_for(
    mode: str, tiny_original: Path, calibration_text: Path, tmp_path: Path, precisions_seen: Any
) -> None:
    seen = precisions_seen(tune, "forward_block")
    quantkit.convert(
        tiny_original, out=tmp_path / "out", calibration=str(calibration_text), matmul_precision=mode, **TEXT
    )
    assert seen == {"bf16" if mode == "bf16" else "ieee"}


@pytest.mark.parametrize("form", ["native", "gptq"])
def test_what_is_written_is_what_was_learned(
    form: str, tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels: list[torch.Tensor] = []
    learn = tune.tune
    monkeypatch.setattr(tune, "tune", lambda *args: (channels.append(args[-1]), learn(*args))[1])
    report = quantkit.convert(
        tiny_original, out=tmp_path / "out", calibration=str(calibration_text), format=form, **TEXT
    )
    assert set(report.tuning) == {f"model.layers.{i}" for i in range(3)}
    for block in report.tuning.values():
        assert block["after"] < block["before"]
        assert 0 < block["step"] <= TEXT["tune_steps"]
    error = first_block_error(tiny_original, tmp_path / "out", calibration_text, channels[0])
    assert [float(one.mean()) for one in channels] == pytest.approx([1.0] * 3)
    assert all(float(one.max() / one.min()) > 1.2 for one in channels)
    assert error == pytest.approx(report.tuning["model.layers.0"]["after"], rel=2e-2)
    assert report.to_json()["tuning"] == report.tuning
    assert json.loads((tmp_path / "out" / "quantkit.json").read_text())["tuning"] == report.tuning
    assert "learned   squared error" in report.table()
    assert all(layer.relative_output_error for layer in report.layers)


@pytest.mark.usefixtures("states_after_each_block")
def test_a_job_that_stopped_goes_on_to_the_same_bytes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    def convert(out: Path, **more: Any) -> Any:
        return quantkit.convert(tiny_original, out=out, calibration=str(calibration_text), kv_bits=8, **TEXT, **more)

    report = convert(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "out", on_progress=stop_at("blocks", 2))
    stages: list[str] = []
    resumed = convert(tmp_path / "out", resume=True, on_progress=watch(stages))
    assert "blocks" in stages
    assert "measure" not in stages  # what was found was kept
    assert digest(tmp_path / "out") == digest(tmp_path / "other")
    assert resumed.tuning == report.tuning


def test_the_whole_model_is_distilled_after_its_blocks_were_tuned(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    given = {**TEXT, "samples": 16, "tune_steps": 4, "format": "native", "calibration": str(calibration_text)}
    plain = quantkit.convert(tiny_original, out=tmp_path / "plain", **given)
    both = quantkit.convert(tiny_original, out=tmp_path / "out", distil=8, **given)
    assert both.tuning == plain.tuning
    assert digest(tmp_path / "out")["quantkit.json"] != digest(tmp_path / "plain")["quantkit.json"]
    assert both.verified_tensors == plain.verified_tensors


def test_too_little_text_leaves_the_start_and_says_so(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = quantkit.convert(
        tiny_original, out=tmp_path / "out", calibration=str(calibration_text), **{**TEXT, "samples": 1}
    )
    assert report.tuning == {}
    assert sum("not tuned, 1 windows of text" in note for note in report.notes) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(activations="int8", group_size=None), "--method tune learns with 16-bit activations"),
        (dict(tune_steps=0), "--tune-steps 0"),
        (dict(method="gptq"), "--tune-steps has no effect: --method gptq does not learn"),
        (dict(scales="minmax", damping=0.1), "--damping has no effect: --method tune --scales minmax"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], words: str, tiny_original: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        quantkit.convert(tiny_original, out=tmp_path / "out", **{**TEXT, **options})


def test_mixtures_of_experts_are_refused_by_name(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    vocab = json.loads((tiny_original / "config.json").read_text())["vocab_size"]
    tiny_architecture("qwen3_moe", vocab_size=vocab, max_position_embeddings=128).half().save_pretrained(source)
    for file in tiny_original.glob("*token*"):
        shutil.copy(file, source / file.name)
    with pytest.raises(RequestError, match="mixtures of experts are not tuned"):
        quantkit.convert(source, out=tmp_path / "out", calibration=str(calibration_text), **TEXT)
