"""How long a conversion takes, foretold from what it multiplies: counted, not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quantkit.cli.main import cli
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.duration import BEGIN, Speed, Work, measure_speed
from quantkit.convert.plan.plan import make_plan
from quantkit.core.host import time_text
from quantkit.model.skeleton import block_linears


def work(source: Path, out: Path, text: Path, **options: Any) -> Work:
    given = {"group_size": 32, "samples": 4, "seq_len": 32, "calibration": str(text), **options}
    return make_plan(ConvertOptions(str(source), out, **given)).work


def test_twice_the_tokens_are_twice_the_products_of_statistics_and_passes(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    one, two, four = (
        work(tiny_original, tmp_path / "out", calibration_text, samples=samples).products for samples in (4, 8, 16)
    )
    assert four - two == pytest.approx(2 * (two - one))
    assert two > one > 0


def test_passes_over_a_text_count_every_weight_once_for_each_token(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    plan = make_plan(
        ConvertOptions(str(tiny_original), tmp_path / "out", method="smooth", bits=8, activations="int8",
                       group_size=None, symmetric=True, samples=4, seq_len=32, calibration=str(calibration_text))
    )  # fmt: skip
    weights = sum(m.weight.numel() for block in plan.blocks.modules for m in block_linears(block).values())
    assert plan.work.products > 2 * 4 * 32 * weights


def test_a_method_that_reads_nothing_multiplies_nothing(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    plain = work(tiny_original, tmp_path / "out", calibration_text, method="rtn", scales="minmax")
    searched = work(tiny_original, tmp_path / "out", calibration_text, method="rtn")
    assert plain.products == 0
    assert searched.passes > plain.passes > 0


def test_learning_takes_longer_than_rounding(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    products = [
        work(tiny_original, tmp_path / "out", calibration_text, **options).products
        for options in ({"method": "rtn"}, {"method": "gptq"}, {"method": "tune", "tune_steps": 20})
    ]
    assert products == sorted(products)
    assert products[1] > products[0]


def test_seconds_are_products_and_passes_at_a_measured_speed() -> None:
    assert Work(3e9, 2e6).seconds(Speed(1e9, 1e-6)) == pytest.approx(BEGIN + 3 + 2)
    speed = measure_speed(torch.device("cpu"))
    assert speed.products > 0
    assert speed.pass_seconds > 0
    assert measure_speed(torch.device("cpu")) is speed


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3, "about 10 s"), (44, "about 40 s"), (100, "about 2 min"), (3000, "about 50 min"), (9000, "about 2.5 h")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert time_text(seconds) == words


def test_a_dry_run_says_how_long(tiny_original: Path, tmp_path: Path) -> None:
    command = ["convert", str(tiny_original), "--out", str(tmp_path / "out"), "--method", "rtn", "--group-size", "32"]
    said = CliRunner().invoke(cli, [*command, "--dry-run"]).output
    assert "  takes     about 10 s here (within a factor of two)" in said
    plan = json.loads(CliRunner().invoke(cli, [*command, "--dry-run", "--json"]).output)
    assert BEGIN <= plan["seconds"] < BEGIN + 60
