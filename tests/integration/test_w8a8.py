"""W8A8 from end to end on a tiny model: convert, read back, run, measure; and what contradicts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.cli.main import cli
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.runtime.layers.linear import QuantLinear

IDS = torch.tensor([[5, 9, 130, 77, 201, 14, 8, 300]])


def convert(source: Path, out: Path, text: Path, **options: Any) -> Any:
    given = dict(method="smooth", activations="int8", calibration=str(text), samples=4, seq_len=32)
    return quantkit.convert(source, out=out, **{**given, **options})


@pytest.fixture(scope="module")
def smooth(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, SmoothQuant. Do not modify."""
    out = tmp_path_factory.mktemp("w8a8") / "out"
    report = convert(tiny_original, out, calibration_text)
    assert {layer.scheme for layer in report.layers} == {"W8A8 channel sym"}
    return out


def test_the_written_model_is_what_vllm_reads(smooth: Path) -> None:
    tensors = load_file(smooth / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    assert tensors[f"{name}.weight"].dtype == torch.int8
    assert tensors[f"{name}.weight"].shape == (64, 96)
    assert tensors[f"{name}.weight_scale"].shape == (64, 1)
    assert not [key for key in tensors if "packed" in key or "weight_shape" in key or "input_scale" in key]
    config = json.loads((smooth / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (config["format"], group["format"], group["targets"]) == ("int-quantized", "int-quantized", ["Linear"])
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert wanted.items() <= group["input_activations"].items()
    assert group["weights"]["strategy"] == "channel"
    assert config["ignore"] == ["lm_head"]


def test_transformers_computes_our_logits(smooth: Path) -> None:
    """Its activations are rounded with max|x| / 127.5 instead of 127: the same to within half a step."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smooth, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(IDS).logits
    ours = quantkit.load(smooth, device="cpu", dtype="float32")(IDS)
    assert float((theirs - ours).abs().max()) < 0.03 * float(ours.abs().max())


def test_packed_and_dequantized_layers_round_activations_alike(smooth: Path) -> None:
    packed = quantkit.load(smooth, device="cpu", dtype="float32")
    layers = [m for m in packed.module.modules() if isinstance(m, QuantLinear)]
    assert {layer.packed.layout for layer in layers} - {"half"} == {"w8a8"}  # half: the head
    dense = quantkit.load(smooth, device="cpu", dtype="float32", dequantize=True)
    torch.testing.assert_close(packed(IDS), dense(IDS), rtol=1e-4, atol=1e-4)
    for module in dense.module.modules():
        module._forward_pre_hooks.clear()
    assert float((dense(IDS) - packed(IDS)).abs().max()) > 1e-3  # without them the numbers are others


def test_eval_measures_activations_whether_whole_or_streamed(
    smooth: Path, tiny_original: Path, calibration_text: Path
) -> None:
    found = [
        quantkit.evaluate(
            smooth, baseline=tiny_original, data=str(calibration_text), seq_len=32, tokens=128, **how
        ).kl_mean
        for how in (
            {},
            {"runtime": True, "dtype": "float32"},
            {"stream": True},
        )  # "auto" is bfloat16 on some processors
    ]
    assert found[0] == pytest.approx(found[1], rel=0.05)
    assert found[0] == found[2]


def test_repacking_changes_no_code_and_no_logit(smooth: Path, tmp_path: Path) -> None:
    quantkit.convert(smooth, out=tmp_path / "native", format="native")
    quantkit.convert(tmp_path / "native", out=tmp_path / "back", format="compressed-tensors", activations="int8")
    first, last = load_file(smooth / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    loaded = quantkit.load(tmp_path / "native", device="cpu", dtype="float32")
    assert torch.equal(loaded(IDS), quantkit.load(smooth, device="cpu", dtype="float32")(IDS))
    with pytest.raises(RequestError, match=r"activations none: .* int8"):
        quantkit.convert(smooth, out=tmp_path / "other", format="native", activations="none")
    for target in ("gptq", "awq"):
        with pytest.raises(QuantkitError, match="readers know no quantized activations"):
            quantkit.convert(smooth, out=tmp_path / target, format=target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic": False}, "dynamic False"),
        ({"symmetric": False}, "symmetric False"),
        ({"strategy": "tensor", "num_bits": 4}, "num_bits 4, strategy 'tensor'"),
    ],
)
def test_other_activations_are_refused_by_name(
    smooth: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    import shutil

    folder = Path(shutil.copytree(smooth, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        quantkit.load(folder, device="cpu")


def test_a_file_as_llm_compressor_writes_it_is_read(smooth: Path, tmp_path: Path) -> None:
    """bf16 scales, no "format" in the group, fewer keys for the activations."""
    import shutil

    folder = Path(shutil.copytree(smooth, tmp_path / "model"))
    path = folder / "model.safetensors"
    tensors = {k: v.bfloat16() if k.endswith("_scale") else v for k, v in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    del group["format"]
    keys = ("num_bits", "type", "symmetric", "strategy", "dynamic")
    group["input_activations"] = {key: group["input_activations"][key] for key in keys}
    (folder / "config.json").write_text(json.dumps(config))
    ours = quantkit.load(smooth, device="cpu", dtype="float32")(IDS)
    torch.testing.assert_close(quantkit.load(folder, device="cpu", dtype="float32")(IDS), ours, rtol=0.1, atol=0.1)


def test_a_rule_for_the_head_is_weight_only(tiny_original: Path, tmp_path: Path) -> None:
    out, rules = tmp_path / "out", ["model.embed_tokens=bits:8"]
    quantkit.convert(tiny_original, out=out, method="rtn", activations="int8", format="native", rules=rules)
    schemes = json.loads((out / "config.json").read_text())["quantization_config"]["modules"]
    assert Scheme.from_json(schemes["model.embed_tokens"]) == Scheme(8, None)
    assert Scheme.from_json(schemes["model.layers.1.self_attn.q_proj"]) == Scheme(8, None, activations="int8")
    assert quantkit.load(out, device="cpu")(IDS).isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 4}, "W4A8 channel sym: int8 activations go with weights of 8 bits"),
        ({"group_size": 128}, "W8A8 g128 sym"),
        ({"symmetric": False}, "W8A8 channel asym"),
        ({"rules": ["*.down_proj=bits:4"]}, "W4A8"),
        ({"format": "gptq"}, "gptq cannot hold W8A8 channel sym"),
        ({"activations": "int4"}, "activations='int4'"),
        ({"activations": "none"}, "--method smooth .* Add --activations int8"),
        ({"damping": 0.02}, "--damping has no effect: --method smooth"),
    ],
)
def test_contradictions_are_refused(
    options: dict[str, Any], message: str, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=message):
        convert(tiny_original, tmp_path / "out", calibration_text, **options)


def test_the_command_line_sets_what_goes_with_int8_activations(tiny_original: Path, tmp_path: Path) -> None:
    arguments = [
        "convert",
        str(tiny_original),
        "--out",
        str(tmp_path / "out"),
        "--method",
        "rtn",
        "--activations",
        "int8",
    ]
    done = CliRunner().invoke(cli, [*arguments, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert {layer["scheme"] for layer in plan["layers"]} == {"W8A8 channel sym"}
    assert {e["engine"] for e in plan["engines"] if e["loads"]} >= {"quantkit", "vLLM", "SGLang", "transformers"}
    refused = CliRunner().invoke(cli, [*arguments, "--bits", "4"])
    assert isinstance(refused.exception, RequestError)
    assert "--bits 8" in str(refused.exception)
