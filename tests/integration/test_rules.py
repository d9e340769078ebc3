"""Rules through the whole path: options, plan, loop, formats, manifest, loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import schemes

import quantkit as qk
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan
from quantkit.errors import QuantkitError, RequestError

MIXED = ["layers.0.*=keep", "*.down_proj=bits:8,group:channel,sym"]
SMALL: dict[str, Any] = dict(samples=2, seq_len=32, group_size=32)


def convert(source: Path, out: Path, text: Path, **options: Any) -> Any:
    return qk.convert(source, out=out, calibration=str(text), **{**SMALL, **options})


@pytest.mark.parametrize("form", ["compressed-tensors", "native"])
def test_a_model_with_rules_is_written_read_back_and_runs(
    form: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = convert(tiny_original, tmp_path / "out", calibration_text, rules=MIXED, format=form)
    found = schemes(tmp_path / "out")
    assert len(found) == len(report.layers) == 14
    assert {name.split(".")[2] for name in found} == {"1", "2"}
    assert {s for name, s in found.items() if name.endswith("down_proj")} == {"W8 channel sym"}
    assert {s for name, s in found.items() if not name.endswith("down_proj")} == {"W4 g32 asym"}
    model = qk.load(tmp_path / "out")
    assert len(model.generate("The old fox", max_tokens=4).tokens) == 4
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["options"]["rules"] == MIXED


def test_transformers_reads_mixed_schemes_and_kept_layers(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    convert(tiny_original, tmp_path / "out", calibration_text, rules=MIXED, symmetric=True)
    ids = torch.arange(10, 42)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = qk.load(tmp_path / "out", dtype="float32", dequantize=True)
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours(ids), atol=1e-4)


def test_mixed_schemes_of_one_input_are_solved_apart_and_each_is_kept(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = convert(tiny_original, tmp_path / "out", calibration_text, rules=["*.v_proj=bits:8"], format="native")
    found = schemes(tmp_path / "out")
    assert {s for name, s in found.items() if name.endswith("v_proj")} == {"W8 g32 asym"}
    assert len(found) == 21
    errors = {layer.name: layer.relative_weight_error for layer in report.layers}
    assert errors["model.layers.1.self_attn.v_proj"] < errors["model.layers.1.self_attn.k_proj"] / 4
    assert any("Engines run these as one matrix" in warning for warning in report.warnings)


def test_fused_linears_of_two_schemes_stop_a_job_for_other_engines(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=r"v_proj W8 g32 asym.*one rule for all"):
        convert(tiny_original, tmp_path / "out", calibration_text, rules=["*.v_proj=bits:8"])
    assert not (tmp_path / "out").exists()


def test_rules_that_leave_nothing_are_refused(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    options = ConvertOptions(str(tiny_original), tmp_path / "out", calibration=str(calibration_text), rules=("*=keep",))
    with pytest.raises(RequestError, match="nothing is left to quantize"):
        make_plan(options)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("*.down_porj=bits:8", "Nearest: "),
        ("*.down_proj=bits:8;group:64", "Example:"),
        ("*.down_proj=bits:12", "bits=12"),
    ],
)
def test_a_bad_rule_is_exit_2(
    quantkit: Callable[..., Any], rule: str, said: str, tiny_original: Path, tmp_path: Path
) -> None:
    done = quantkit("convert", tiny_original, "--out", tmp_path / "out", "--method", "rtn", "--rule", rule)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_shows_the_schemes_and_the_shadowed_rule(
    quantkit: Callable[..., Any], tiny_original: Path, tmp_path: Path
) -> None:
    done = quantkit(
        "convert", tiny_original, "--out", tmp_path / "out", "--method", "rtn", "--group-size", "32", "--dry-run",
        "--rule", "*.down_proj=bits:8", "--rule", "layers.0.mlp.down_proj=keep",
    )  # fmt: skip
    assert done.returncode == 2
    assert "This cannot run: 1 problem, see above." in done.stderr
    assert "3 x 64x96          W8 g32 asym" in done.stdout
    assert "'layers.0.mlp.down_proj=keep' has no effect" in done.stdout


def test_the_engines_are_told_in_report_dry_run_and_inspect(
    quantkit: Callable[..., Any], tiny_original: Path, tmp_path: Path
) -> None:
    arguments = (
        "convert",
        tiny_original,
        "--out",
        tmp_path / "out",
        "--method",
        "rtn",
        "--group-size",
        "32",
        "--sym",
        "--json",
    )
    planned = json.loads(quantkit(*arguments, "--dry-run").stdout)["engines"]
    reported = json.loads(quantkit(*arguments).stdout)["engines"]
    inspected = json.loads(quantkit("inspect", tmp_path / "out", "--json").stdout)["engines"]
    assert planned == reported == inspected
    by_name = {verdict["engine"]: verdict for verdict in inspected}
    assert by_name["vLLM"]["loads"]
    # 64 hidden units are no Marlin tile of 128
    assert not by_name["SGLang"]["loads"]
    assert by_name["SGLang"]["reader"] == "sglang/srt/layers/quantization/marlin_utils.py:168, 178"
    shown = quantkit("inspect", tmp_path / "out").stdout
    assert "loads in  vLLM 0.33.0: yes" in shown
    assert "21 x W4 g32 sym" in shown
