"""Models in gptq and awq: converted, read back, run, inspected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit as qk
from quantkit.checkpoint.open import open_source
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan
from quantkit.errors import QuantkitError, QuantkitWarning, UnsupportedModel
from quantkit.formats.reader import QuantizedReader

RTN = dict(method="rtn", scales="minmax")
IDS = torch.arange(10, 42)[None]


@pytest.mark.parametrize(
    ("form", "bits", "group", "symmetric"),
    [("gptq", 4, 32, True), ("gptq", 3, 32, False), ("gptq", 8, "channel", True), ("awq", 4, 32, False)],
)
def test_a_written_model_runs_and_equals_the_native_one(
    form: str, bits: int, group: Any, symmetric: bool, tiny_original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = qk.convert(tiny_original, out, format=form, bits=bits, group_size=group, symmetric=symmetric, **RTN)
    assert len(report.layers) == 21
    native = qk.convert(
        tiny_original, tmp_path / "n", format="native", bits=bits, group_size=group, symmetric=symmetric, **RTN
    )
    assert native.bits_per_weight == report.bits_per_weight
    for dense in (True, False):
        read = [qk.load(folder, dtype="float32", device="cpu", dequantize=dense) for folder in (out, tmp_path / "n")]
        assert torch.equal(read[0](IDS), read[1](IDS))


def test_gptq_writes_its_config_twice_and_rules_for_layers_of_other_group_sizes(
    tiny_original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = qk.convert(tiny_original, out, format="gptq", group_size=64, symmetric=True, **RTN)
    assert any("96 inputs are no multiple of 64: groups of 32 for 3 of 21" in note for note in report.warnings)
    assert "--group-size 32 gives all linears one group size, which more engines read" in report.warnings
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert json.loads((out / "quantize_config.json").read_text()) == config
    assert config["dynamic"] == {r"+:^model\.layers\.(?:0|1|2)\.mlp\.down_proj$": {"group_size": 32}}
    reader = QuantizedReader(open_source(out))
    sizes = {name.rpartition(".")[2]: reader.module(name).scheme.group_size for name in reader.modules}
    assert sizes["down_proj"] == 32
    assert {size for name, size in sizes.items() if name != "down_proj"} == {64}


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors"])
def test_strict_groups_refuses_another_size_and_names_one_that_divides(
    form: str, tiny_original: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = dict(format=form, strict_groups=True, **RTN)
    with pytest.raises(
        QuantkitError,
        match=r"96 inputs are no multiple of 64: .* --strict-groups forbids it\. "
        r"Use --group-size 32, which divides all",
    ):
        qk.convert(tiny_original, tmp_path / "out", group_size=64, **asked)
    assert not (tmp_path / "out").exists()
    report = qk.convert(tiny_original, tmp_path / "out", group_size=32, **asked)
    assert not report.warnings


def test_awq_uses_one_group_size_for_all_layers_and_says_so(tiny_original: Path, tmp_path: Path) -> None:
    plan = make_plan(ConvertOptions(str(tiny_original), tmp_path / "out", format="awq", group_size=64, **RTN))
    assert not plan.problems
    assert {target.scheme.group_size for target in plan.targets.values()} == {32}
    notes = "\n".join(plan.warnings)
    assert "96 inputs are no multiple of 64: groups of 32 for 3 of 21 linears" in notes
    assert "groups of 32 also for 18 of 21 linears with 64 inputs: one model in awq has one size" in notes
    assert "one group size" not in notes  # they have one already


def test_rules_that_awq_cannot_say_are_a_problem(tiny_original: Path, tmp_path: Path) -> None:
    options = dict(format="awq", group_size=32, rules=("*.down_proj=group:96",), **RTN)
    plan = make_plan(ConvertOptions(str(tiny_original), tmp_path / "out", **options))  # type: ignore[arg-type]
    assert "one model in awq has one scheme" in "\n".join(plan.problems)


def test_inspect_tells_schemes_of_a_quantized_folder(
    tiny_original: Path, tmp_path: Path, quantkit: Callable[..., Any]
) -> None:
    qk.convert(tiny_original, tmp_path / "out", format="gptq", group_size=64, symmetric=True, **RTN)
    done = quantkit("inspect", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["quant_method"] == "gptq"
    assert data["schemes"] == {"W4 g64 sym": 18, "W4 g32 sym": 3}
    assert data["format"] == "gptq"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)  # it would not name what is new
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_folders_from_before_config_json_said_it_are_read(form: str, tiny_original: Path, tmp_path: Path) -> None:
    """With AutoGPTQ's zero biases of layers that have none, too."""
    out = tmp_path / "out"
    qk.convert(tiny_original, out, format=form, group_size=32, **RTN)
    ids = torch.arange(10, 42)[None]
    before = qk.load(out, device="cpu", dtype="float32")(ids)
    name = "model.layers.0.mlp.up_proj.bias"

    def age(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        said = config.pop("quantization_config")
        if form == "awq":
            said = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
        else:
            said.pop("quant_method")
        file = "quant_config.json" if form == "awq" else "quantize_config.json"
        (out / file).write_text(json.dumps(said))
        tensors[name] = torch.zeros(96, dtype=torch.float16)

    edit(out, age)
    assert name in open_source(out).names()
    for dense in (False, True):
        assert qk.load(out, device="cpu", dtype="float32", dequantize=dense)(ids).shape == before.shape
    assert torch.equal(qk.load(out, device="cpu", dtype="float32")(ids), before)

    edit(out, lambda tensors, _: tensors[name].add_(0.5))  # not zero any more, and the model has no place for it
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.up_proj\.bias"):
        qk.load(out, device="cpu", dtype="float32")


def test_a_gptq_config_from_before_sym_is_read_as_symmetric_and_says_so(tiny_original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    qk.convert(tiny_original, out, format="gptq", group_size=32, symmetric=True, **RTN)
    before = qk.load(out, device="cpu", dtype="float32")(IDS)
    edit(out, lambda _, config: config["quantization_config"].pop("sym"))
    with pytest.warns(QuantkitWarning, match="does not say 'sym'"):
        after = qk.load(out, device="cpu", dtype="float32")(IDS)
    assert torch.equal(after, before)
