"""GPTQ after AWQ's channel factors: ``--fold``, which preset balanced sets."""

from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.checkpoint.source import open_source
from quantkit.errors import RequestError

NORM = "model.layers.1.input_layernorm.weight"


def test_channels_are_scaled_only_if_asked_for(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    losses = {}
    for fold in (False, True):
        report = quantkit.convert(
            tiny_original, out=tmp_path / f"fold-{fold}", method="gptq", bits=3, group_size=32, format="native", fold=fold,
            calibration=str(calibration_text), samples=4, seq_len=64,
        )  # fmt: skip
        same = torch.equal(open_source(tmp_path / f"fold-{fold}").read(NORM), open_source(tiny_original).read(NORM))
        assert same == (not fold)
        losses[fold] = sum(layer.relative_output_error or 0.0 for layer in report.layers)
    assert losses[True] < 1.1 * losses[False]


def test_balanced_folds(tiny_original: Path, tmp_path: Path) -> None:
    from quantkit.convert.options import ConvertOptions, apply_preset

    asked = ConvertOptions(str(tiny_original), tmp_path / "out", **apply_preset("balanced", {}))
    assert asked.method == "gptq"
    assert asked.folds


@pytest.mark.parametrize(("method", "reason"), [("awq", "always scales channels"), ("rtn", "does not scale channels")])
def test_fold_beside_another_method_is_refused(tiny_original: Path, tmp_path: Path, method: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"--fold has no effect: --method {method} {reason}"):
        quantkit.convert(tiny_original, out=tmp_path / "out", method=method, fold=True)
