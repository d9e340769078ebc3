"""eval/first_blocks.py: the trial sees the blocks as the loop leaves them, and nothing else of the model changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import script

from quantkit.convert import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trial() -> Any:
    return script(ROOT / "eval" / "first_blocks.py")


def options(text: Path) -> dict[str, Any]:
    return dict(method="tune", samples=12, seq_len=32, group_size=32, tune_steps=6, calibration=str(text))


def test_only_the_first_blocks_are_quantized_and_all_of_them_cost_more(
    trial: Any, tiny_original: Path, calibration_text: Path
) -> None:
    stage = run.quantize_block
    some, learned, _ = trial.first_blocks(str(tiny_original), 1, options(calibration_text), False)
    every, _, _ = trial.first_blocks(str(tiny_original), 2, options(calibration_text), False)
    assert run.quantize_block is stage  # put back
    assert list(some) == list(learned) == ["model.layers.0"]
    assert all(torch.equal(every["model.layers.0"][name], value) for name, value in some["model.layers.0"].items())
    none, one, two = (
        trial.divergences(str(tiny_original), blocks, 4, str(calibration_text), 32).mean()
        for blocks in ({}, some, every)
    )
    assert none == 0 < one < two


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--set", "rotate=True"], "rotate changes more"),
        (["--set", "distil=32"], "distil changes more"),
        (["--channels", "alike", "--set", "method=gptq"], "only --set method=tune"),
        (["--blocks", "0"], "at least 1"),
        (["--windows", "1"], "--windows 1: at least 2"),
        (["--set", "groupsize=64"], "'groupsize' .did you mean 'group_size'"),
    ],
)
def test_what_a_trial_would_not_see_is_refused(
    trial: Any,
    tiny_original: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["first_blocks.py", str(tiny_original), *given])
    with pytest.raises(SystemExit):
        trial.main()
    assert re.search(said, capsys.readouterr().err)


def test_channels_that_count_alike_teach_another_block(trial: Any, tiny_original: Path, calibration_text: Path) -> None:
    measured, alike = (
        trial.first_blocks(str(tiny_original), 1, options(calibration_text), flat)[0]["model.layers.0"]
        for flat in (False, True)
    )
    assert any(not torch.equal(measured[name], alike[name]) for name in measured)
