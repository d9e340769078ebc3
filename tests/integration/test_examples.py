"""The scripts of examples/ run, and print what they promise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from scripts import script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def example(name: str) -> Any:
    (path,) = (ROOT / "examples").glob(f"{name}_*.py")
    return script(path)


@pytest.fixture(scope="module")
def judged_by(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text for the comparison, long enough for windows of 256 tokens."""
    path = tmp_path_factory.mktemp("text") / "evaluation.txt"
    path.write_text(" ".join(f"{i}. A red bird by the sea sings to nobody." for i in range(120)))
    return path


def test_the_readme_of_the_examples_names_each_of_them() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in SCRIPTS if f"]({name})" not in text] == []
    assert len(SCRIPTS) == 4


def test_convert_and_compare(
    tiny_original: Path, judged_by: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    given = ["--group-size", "32", "--data", str(judged_by), "--seq-len", "64", "--windows", "3"]
    example("01").main([str(tiny_original), str(out), *given])
    shown = capsys.readouterr().out
    before, after = map(float, re.findall(r"size +([\d.]+) MB -> ([\d.]+) MB", shown)[0])
    assert 0 < after < before
    assert 0 < float(re.findall(r"KL +([\d.]+) nats", shown)[0]) < 1
    assert f"{tiny_original}: The capital of France is" in shown
    assert f"{out}: The capital of France is" in shown
    assert (out / "quantkit.json").exists()


def test_your_own_calibration_text(
    tiny_original: Path, calibration_text: Path, judged_by: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--group-size", "32", "--samples", "8", "--seq-len", "64", "--data", str(judged_by)]
    example("02").main([str(calibration_text), str(tiny_original), str(tmp_path / "out"), *given])
    shown = re.findall(r"(\w+) +(\d+) calibration tokens, KL (\S+) nats per token: (\S+)", capsys.readouterr().out)
    assert [(name, int(tokens)) for name, tokens, _, _ in shown] == [("rtn", 0), ("gptq", 8 * 64)]
    rtn, gptq = (float(kl) for _, _, kl, _ in shown)
    assert 0 < gptq < rtn
    assert all((Path(folder) / "quantkit.json").exists() for *_, folder in shown)


def test_kv_cache_of_4_bits(tiny_original: Path, judged_by: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("03").main(
        [str(tiny_original), "--data", str(judged_by), "--seq-len", "256", "--prompt", "a red bird " * 15]
    )
    shown = capsys.readouterr().out
    assert 0 < float(re.findall(r"KL +(\S+) nats", shown)[0]) < 0.1
    exact, packed = (float(size) for size in re.findall(r"cache \d+ +([\d.]+) MB", shown))
    assert 0 < packed < exact


def test_an_added_algorithm_loses_less_than_rounding_and_more_than_gptq(
    tiny_original: Path, calibration_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example("04").main([str(tiny_original), "--calibration", str(calibration_text)])
    shown = re.findall(r"(\w+) +W4 g64 asym: output error ([\d.]+)%", capsys.readouterr().out)
    errors = {name: float(error) for name, error in shown}
    assert list(errors) == ["rtn", "fitted", "gptq"]
    assert 0 < errors["gptq"] < errors["fitted"] < errors["rtn"]
