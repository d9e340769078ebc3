"""``--rotate``: the rotated model is what is quantized.

It is proved first, named in what is written, and refused where it cannot be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from written import digest

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.errors import NumericsError, RequestError, UnsupportedModel
from quantkit.model.rotate import RotatedSource, prove

IDS = torch.arange(2, 60)[None]


def logits(folder: Path) -> torch.Tensor:
    model = quantkit.load(folder, device="cpu", dtype="float32", dequantize=True).module
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("format_", ["native", "compressed-tensors"])
def test_eight_bits_of_the_rotated_model_compute_nearly_what_the_original_does(
    tiny_original: Path, tmp_path: Path, format_: str
) -> None:
    report = quantkit.convert(
        tiny_original, tmp_path / "out", method="rtn", bits=8, group_size=32, format=format_, rotate=True
    )
    assert report.rotated is not None
    assert 0 < report.rotated < 1e-4
    assert report.to_json()["rotated"] == report.rotated
    assert any("the head is tied to the embeddings no longer" in warning for warning in report.warnings)
    before = logits(tiny_original)
    torch.testing.assert_close(logits(tmp_path / "out"), before, rtol=0, atol=0.05 * float(before.std()))
    written, source = open_source(tmp_path / "out"), RotatedSource(open_source(tiny_original))
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.2.input_layernorm.weight"):
        assert torch.equal(written.read(name), source.read(name))
    assert not written.config["tie_word_embeddings"]
    assert (written.read("model.norm.weight") == 1).all()
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["options"]["rotate"] is True
    assert manifest["source_sha256"] == source.digest() != open_source(tiny_original).digest()


def test_factors_and_a_quantized_head_go_on_top(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    report = quantkit.convert(
        tiny_original, tmp_path / "out", preset="balanced", bits=8, group_size=None, symmetric=True, format="native",
        rotate=True, rules=("lm_head=bits:8",), calibration=str(calibration_text), samples=2, seq_len=64,
    )  # fmt: skip
    assert "lm_head" in {layer.name for layer in report.layers}
    before = logits(tiny_original)
    torch.testing.assert_close(logits(tmp_path / "out"), before, rtol=0, atol=0.1 * float(before.std()))


def test_a_rotation_that_changes_the_model_stops_the_job(
    tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RotatedSource.exact

    def wrong(source: RotatedSource, name: str, *given: Any, **more: Any) -> torch.Tensor:
        tensor = right(source, name, *given, **more)
        return -tensor if name.endswith("2.self_attn.v_proj.weight") else tensor

    assert prove(RotatedSource(open_source(tiny_original))) < 1e-4
    monkeypatch.setattr(RotatedSource, "exact", wrong)
    with pytest.raises(NumericsError, match="rotated weights do not compute what its own do"):
        quantkit.convert(tiny_original, tmp_path / "out", method="rtn", format="native", rotate=True)
    assert not list(tmp_path.iterdir())


def test_a_model_with_norms_after_attention_is_refused_before_anything_runs(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    with pytest.raises(UnsupportedModel, match="gemma3_text has norms after attention and MLP"):
        quantkit.convert(tiny_model, tmp_path / "out", method="rtn", rotate=True)


def test_what_is_quantized_already_is_not_rotated(tiny_original: Path, tmp_path: Path) -> None:
    quantkit.convert(tiny_original, tmp_path / "one", method="rtn", format="native")
    with pytest.raises(RequestError, match="--rotate has no effect"):
        quantkit.convert(tmp_path / "one", tmp_path / "two", format="native", rotate=True)


def test_a_stopped_job_goes_on_with_the_same_bytes_and_not_without_the_rotation(
    tiny_original: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = dict(method="rtn", format="native")
    quantkit.convert(tiny_original, tmp_path / "whole", rotate=True, **asked)

    def stop(progress: Any) -> None:
        if progress.stage == "blocks" and progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(tiny_original, tmp_path / "out", rotate=True, on_progress=stop, **asked)
    with pytest.raises(RequestError, match="--rotate: True there, False here"):
        quantkit.convert(tiny_original, tmp_path / "out", resume=True, **asked)
    report = quantkit.convert(tiny_original, tmp_path / "out", rotate=True, resume=True, **asked)
    assert report.rotated is not None
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
