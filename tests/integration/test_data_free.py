"""Method hqq: no text is read, random tokens say how large each channel is."""

from pathlib import Path

import pytest
import torch
from written import digest

import quantkit
from quantkit.checkpoint.open import open_source
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan
from quantkit.convert.plan.random_tokens import FALLBACK
from quantkit.convert.report import dry_run
from quantkit.errors import RequestError


def options(source: Path, out: Path, **more: object) -> ConvertOptions:
    return ConvertOptions(str(source), out, method="hqq", group_size=32, **more)  # type: ignore[arg-type]


def test_the_plan_names_random_tokens_and_no_text(tiny_original: Path, tmp_path: Path) -> None:
    plan = make_plan(options(tiny_original, tmp_path / "out"))
    assert plan.inputs.calibration is not None
    assert plan.inputs.calibration.name == "random tokens"
    assert "random tokens" in dry_run.describe(plan)
    assert not torch.equal(
        plan.inputs.calibration.ids, make_plan(options(tiny_original, tmp_path / "out", seed=1)).inputs.calibration.ids
    )  # type: ignore[union-attr]


def test_the_report_speaks_of_random_tokens_and_its_sample_continues_words(tiny_original: Path, tmp_path: Path) -> None:
    report = quantkit.convert(str(tiny_original), out=tmp_path / "out", method="hqq", group_size=32)
    assert "relative output error on random tokens" in str(report)
    assert report.sample is not None
    assert report.sample["prompt"].strip() == FALLBACK


def test_the_same_seed_gives_the_same_bytes_and_channels_are_scaled(tiny_original: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        quantkit.convert(str(tiny_original), out=tmp_path / name, method="hqq", group_size=32)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    norm = next(name for name in open_source(tiny_original).names() if name.endswith("input_layernorm.weight"))
    assert not torch.equal(open_source(tmp_path / "one").read(norm), open_source(tiny_original).read(norm))


@pytest.mark.parametrize("given", [{"samples": 8}, {"seq_len": 64}, {"calibration": "self"}])
def test_options_of_a_text_are_refused(tiny_original: Path, tmp_path: Path, given: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="has no effect: --method hqq reads no text"):
        quantkit.convert(str(tiny_original), out=tmp_path / "out", method="hqq", **given)  # type: ignore[arg-type]
