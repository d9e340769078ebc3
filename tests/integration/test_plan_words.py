"""What a plan, a report and a manifest say was asked for: a preset by name, and what it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.errors import RequestError

SHORT = ("--samples", 4, "--seq-len", 32, "--group-size", 32)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--preset", "balanced"), "method    gptq --fold --guided (preset balanced), W4 g32 asym"),
        (
            ("--preset", "balanced", "--no-fold", "--gptaq"),
            "method    gptq --no-fold --guided --gptaq (preset balanced), W4",
        ),
        (("--preset", "best", "--distil", 8), "method    tune --tune-steps 120 --distil 8 (preset best), W4 g32 asym"),
        (("--rotate", "--no-gptaq"), "method    gptq --rotate, W4 g32 asym"),
    ],
    ids=str,
)
def test_the_plan_shows_what_a_preset_stands_for(
    options: tuple[Any, ...], words: str, tiny_original: Path, calibration_text: Path, tmp_path: Path,
    quantkit: Callable[..., Any],
) -> None:  # fmt: skip
    common = (tiny_original, "--out", tmp_path / "out", "--calibration", calibration_text, *SHORT)
    done = quantkit("convert", *common, *options, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    learns = "learns    block by block, 120 steps of 2048 tokens; before that, which channels"
    assert (learns in done.stdout) == ("best" in options)
    assert ("weighs    each token by what it means to the model's output" in done.stdout) == ("--guided" in words)


@pytest.mark.parametrize(
    ("rules", "among"), [((), True), (("--rule", "*.embed_tokens=bits:8"), False)], ids=["kept", "quantized"]
)
def test_the_plan_says_whether_head_and_embeddings_are_among_what_is_kept(
    rules: tuple[str, ...], among: bool, tiny_original: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    done = quantkit(
        "convert", tiny_original, "--out", tmp_path / "out", "--preset", "fast", "--group-size", 32, *rules,
        "--format", "native", "--dry-run",
    )  # fmt: skip
    assert ("head and embeddings among them" in done.stdout) == among, done.stdout + done.stderr


def test_the_preset_is_in_plan_report_and_manifest(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    common = (
        tiny_original,
        "--out",
        tmp_path / "out",
        "--calibration",
        calibration_text,
        *SHORT,
        "--preset",
        "balanced",
    )
    plan = json.loads(quantkit("convert", *common, "--dry-run", "--json").stdout)
    assert (plan["preset"], plan["options"]["fold"], plan["options"]["gptaq"]) == ("balanced", True, False)
    report = json.loads(quantkit("convert", *common, "--json").stdout)
    assert (report["preset"], report["method"], report["method_options"]) == (
        "balanced",
        "gptq",
        {"fold": True, "guided": True},
    )
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert (manifest["preset"], manifest["options"]["fold"]) == ("balanced", True)


def test_the_report_names_the_preset_and_a_repack_refuses_one(tiny_original: Path, tmp_path: Path) -> None:
    report = quantkit.convert(tiny_original, tmp_path / "fast", preset="fast", group_size=32)
    assert ": hqq (preset fast), W4 g32 asym" in report.table().splitlines()[0]
    with pytest.raises(RequestError, match="--preset fast has no effect"):
        quantkit.convert(tmp_path / "fast", tmp_path / "again", preset="fast")
    again = quantkit.convert(tmp_path / "fast", tmp_path / "again", format="native", samples=128, fold=False)
    assert again.repacked_from == "compressed-tensors"


def test_the_report_counts_schemes_where_there_are_several(tiny_original: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "rtn", "group_size": 32, "rules": ["*.down_proj=bits:8"]}
    report = quantkit.convert(tiny_original, tmp_path / "out", **options)
    blocks = len({layer.name.split(".")[2] for layer in report.layers})
    assert f"  schemes   W4 g32 asym x {6 * blocks}, W8 g32 asym x {blocks}" in report.table().splitlines()
    del options["rules"]
    assert "  schemes " not in quantkit.convert(tiny_original, tmp_path / "other", **options).table()
