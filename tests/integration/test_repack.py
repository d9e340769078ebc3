"""A quantized model in another format: the same codes, or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import tiny_model
from safetensors.torch import load_file, save_file

import quantkit as qk
from quantkit.checkpoint.open import open_source
from quantkit.convert.repack.plan import plan_repack
from quantkit.errors import CheckpointError, QuantkitError, RequestError
from quantkit.formats.reader import QuantizedReader

FORMATS = ("compressed-tensors", "gptq", "awq", "native")
RTN = dict(method="rtn", scales="minmax")
Run = Callable[..., Any]


def weights(folder: Path) -> bytes:
    return next(folder.glob("*.safetensors")).read_bytes()


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def refused(source: Path, tmp_path: Path, *words: str, **options: Any) -> None:
    with pytest.raises(QuantkitError) as caught:
        qk.convert(source, tmp_path / "refused", **options)
    assert not (tmp_path / "refused").exists()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_each_format_repacks_into_each_with_the_bytes_of_a_direct_conversion(
    symmetric: bool, tiny_original: Path, tmp_path: Path
) -> None:
    for form in FORMATS:
        qk.convert(tiny_original, tmp_path / form, format=form, group_size=32, symmetric=symmetric, **RTN)
    for form in FORMATS:
        for target in FORMATS:
            out = tmp_path / f"{form} to {target}"
            report = qk.convert(tmp_path / form, out, format=target)
            assert report.repacked_from == form
            assert weights(out) == weights(tmp_path / target), (form, target)
            assert quantization(out) == quantization(tmp_path / target), (form, target)
            names = {file.name for file in out.iterdir()}
            assert names == {file.name for file in (tmp_path / target).iterdir()}


@pytest.mark.parametrize("name", ["opt", "mixtral", "gpt_neox"])
def test_what_stays_dense_is_named_as_by_a_direct_conversion(name: str, tiny_original: Path, tmp_path: Path) -> None:
    """Positions are looked up, routers are multiplied, a head may be called embed_out."""
    import shutil

    vocab = json.loads((tiny_original / "config.json").read_text())["vocab_size"]
    tiny_model(name, vocab_size=vocab, num_hidden_layers=12).half().save_pretrained(tmp_path / "source")
    for file in tiny_original.glob("*token*"):
        shutil.copy(file, tmp_path / "source" / file.name)
    for form in ("compressed-tensors", "gptq"):
        rules = ("*layers.1.*=bits:8", "*layers.3.*=keep")
        qk.convert(tmp_path / "source", tmp_path / form, format=form, group_size=32, symmetric=True, rules=rules, **RTN)
    for form, target in (("compressed-tensors", "gptq"), ("gptq", "compressed-tensors")):
        qk.convert(tmp_path / form, tmp_path / "out", format=target, overwrite=True)
        assert quantization(tmp_path / "out") == quantization(tmp_path / target)
        assert weights(tmp_path / "out") == weights(tmp_path / target)


def test_biases_without_a_place_are_dropped_if_zero_and_refused_if_not(awq_folder: Path, tmp_path: Path) -> None:
    import shutil

    model, name = tmp_path / "model", "model.layers.0.mlp.up_proj.bias"
    shutil.copytree(awq_folder, model)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors.index.json").unlink()
    tensors[name] = torch.zeros(96, dtype=torch.float16)
    save_file(tensors, model / "model.safetensors")
    report = qk.convert(model, tmp_path / "gptq", format="gptq")
    assert name not in load_file(tmp_path / "gptq" / "model.safetensors")
    assert any("1 biases of zeros are left out" in warning for warning in report.warnings)
    tensors[name][5] = 0.25
    save_file(tensors, model / "model.safetensors")
    refused(model, tmp_path, name, "no bias there", format="gptq")


def test_mixed_group_sizes_and_the_kv_scales_come_along(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options = dict(method="gptq", samples=4, seq_len=32, calibration=str(calibration_text), kv_bits=8)
    qk.convert(tiny_original, tmp_path / "ct", group_size=64, symmetric=True, **options)
    report = qk.convert(tmp_path / "ct", tmp_path / "gptq", format="gptq")
    assert report.scheme == "W4 g64 sym, W4 g32 sym"
    assert report.kv_bits == 8
    kv = "quantkit_kv.safetensors"
    assert (tmp_path / "gptq" / kv).read_bytes() == (tmp_path / "ct" / kv).read_bytes()
    prompt = dict(max_tokens=6, temperature=0.0)
    texts = [qk.load(tmp_path / name, device="cpu").generate("The old fox", **prompt).tokens for name in ("ct", "gptq")]
    assert texts[0] == texts[1]
    manifest = json.loads((tmp_path / "gptq" / "quantkit.json").read_text())
    assert manifest["repacked_from"]["format"] == "compressed-tensors"
    assert manifest["source"]["options"]["method"] == "gptq"
    assert len(manifest["source"]["layers"]) == 21
    refused(tmp_path / "gptq", tmp_path, "W4 g32 sym and W4 g64 sym", "--format gptq", format="awq")


def test_linears_kept_at_16_bit_stay_named(tiny_original: Path, tmp_path: Path) -> None:
    rules = ("*.1.mlp.down_proj=keep", "*.0.self_attn.o_proj=bits:8")
    qk.convert(tiny_original, tmp_path / "ct", group_size=32, symmetric=True, rules=rules, **RTN)
    qk.convert(tmp_path / "ct", tmp_path / "gptq", format="gptq")
    config = quantization(tmp_path / "gptq")
    assert config["dynamic"] == {
        r"-:^model\.layers\.1\.mlp\.down_proj$": {},
        r"+:^model\.layers\.0\.self_attn\.o_proj$": {"bits": 8},
    }
    qk.convert(tmp_path / "gptq", tmp_path / "back")
    assert weights(tmp_path / "back") == weights(tmp_path / "ct")
    before, after = quantization(tmp_path / "ct"), quantization(tmp_path / "back")
    assert after["ignore"] == before["ignore"]


@pytest.mark.parametrize(
    ("options", "target", "words"),
    [
        (
            dict(bits=3, group_size=32),
            "compressed-tensors",
            ["20 more", "3 bits", "16-bit original", "--format native"],
        ),
        (dict(bits=8, group_size=32), "awq", ["8 bits", "16-bit original"]),
        (dict(group_size=48), "gptq", ["group size 48 does not divide 64"]),
        (dict(group_size=32, rules=("*o_proj=sym",)), "gptq", ["v1 or v2"]),
    ],
    ids=lambda value: str(value),
)
def test_what_the_target_cannot_hold_is_refused_before_anything_is_written(
    options: dict[str, Any], target: str, words: list[str], tiny_original: Path, tmp_path: Path
) -> None:
    qk.convert(tiny_original, tmp_path / "native", format="native", **{**RTN, **options})
    plan = plan_repack(open_source(tmp_path / "native"), tmp_path / "refused", {"format": target})
    assert plan is not None
    for word in words:
        assert word in "\n".join(plan.problems)
    refused(tmp_path / "native", tmp_path, "cannot run", format=target)


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_scales_in_bfloat16_are_float16_numbers_unless_they_are_extreme(
    target: str, tiny_original: Path, tmp_path: Path
) -> None:
    qk.convert(tiny_original, tmp_path / "ct", group_size=32, scale_dtype="bfloat16", **RTN)
    report = qk.convert(tmp_path / "ct", tmp_path / "out", format=target)
    before, after = (QuantizedReader(open_source(tmp_path / name)) for name in ("ct", "out"))
    assert len(before.modules) == 21
    for name in before.modules:
        assert torch.equal(before.module(name).dequantize(), after.module(name).dequantize())
    assert not any(layer.relative_weight_error for layer in report.layers)
    file, name = tmp_path / "ct" / "model.safetensors", "model.layers.2.mlp.up_proj.weight_scale"
    tensors = load_file(file)
    tensors[name][3, 1] *= 2.0**-16  # below what float16 holds exactly
    save_file(tensors, file)
    refused(tmp_path / "ct", tmp_path, "layers.2.mlp.up_proj", "scales in bfloat16", "--allow-rounding", format=target)
    report = qk.convert(tmp_path / "ct", tmp_path / "rounded", format=target, allow_rounding=True)
    (layer,) = [layer for layer in report.layers if layer.relative_weight_error]
    assert layer.name == name.removesuffix(".weight_scale")
    manifest = json.loads((tmp_path / "rounded" / "quantkit.json").read_text())
    assert manifest["rounded"] == {layer.name: pytest.approx(layer.relative_weight_error, rel=1e-2)}


def test_a_zero_point_without_a_field_is_refused_naming_the_module(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "native", format="native", group_size=32, **RTN)
    file = tmp_path / "native" / "quantkit.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.mlp.up_proj.qzeros"
    words = tensors[name].clone()
    words[0, 0] = (words[0, 0] & ~31) | 16  # the first of the 5-bit zero fields
    tensors[name] = words
    save_file(tensors, file)
    for target in ("gptq", "awq", "compressed-tensors"):
        refused(tmp_path / "native", tmp_path, "layers.2.mlp.up_proj", "zero point of 16", format=target)
    qk.convert(tmp_path / "native", tmp_path / "again", format="native")


def test_act_order_is_refused_by_name(tiny_original: Path, tmp_path: Path) -> None:
    qk.convert(tiny_original, tmp_path / "gptq", format="gptq", group_size=32, symmetric=True, **RTN)
    file = tmp_path / "gptq" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file)
    refused(tmp_path / "gptq", tmp_path, "gptq act-order", "16-bit original", format="native")
    logits = qk.load(tmp_path / "gptq", device="cpu", dtype="float32")(torch.arange(5)[None])
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(bits=8), ["--bits 8", "4 bits"]),
        (dict(group_size=128), ["--group-size 128", "groups of 32"]),
        (dict(group_size="channel"), ["--group-size channel", "groups of 32"]),
        (dict(symmetric=True), ["--sym", "one zero point per group"]),
        (dict(method="gptq"), ["--method gptq", "rtn"]),
        (dict(samples=3), ["--samples 3", "no effect"]),
        (dict(rules=("*=keep",)), ["--rule", "no effect"]),
    ],
    ids=str,
)
def test_options_that_contradict_the_stored_model_or_have_no_effect_are_refused(
    options: dict[str, Any], words: list[str], awq_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError) as caught:
        qk.convert(awq_folder, tmp_path / "out", format="gptq", **options)
    for word in [*words, str(awq_folder)]:
        assert word in str(caught.value)


@pytest.fixture(scope="module")
def awq_folder(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("awq") / "model"
    qk.convert(tiny_original, out, format="awq", group_size=32, **RTN)
    return out


def test_options_that_are_true_of_the_source_are_accepted(awq_folder: Path, tmp_path: Path) -> None:
    same = dict(bits=4, group_size=32, symmetric=False, method="rtn", kv_bits=16, scale_dtype="float16")
    assert qk.convert(awq_folder, tmp_path / "out", format="gptq", **same).repacked_from == "awq"


def test_the_command_line_repacks_plans_and_refuses(awq_folder: Path, tmp_path: Path, quantkit: Run) -> None:
    out = tmp_path / "out"
    dry = quantkit("convert", awq_folder, "--out", out, "--format", "gptq", "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    plan = json.loads(dry.stdout)
    assert (plan["repacked_from"], plan["format"], plan["schemes"]) == ("awq", "gptq", {"W4 g32 asym": 21})
    assert not out.exists()
    done = quantkit("convert", awq_folder, "--out", out, "--format", "gptq", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["method"] == "repack"
    assert len(report["layers"]) == 21
    assert (
        abs(report["output_bytes"] - plan["output_bytes"]) < 0.2 * plan["output_bytes"]
    )  # the header counts on a tiny model
    wrong = quantkit("convert", awq_folder, "--out", tmp_path / "x", "--bits", "8")
    assert wrong.returncode == 2
    assert "--bits 8" in wrong.stderr
    inside = quantkit("convert", awq_folder, "--out", awq_folder / "x")
    assert inside.returncode == 2
    assert "Choose another --out" in inside.stderr


def test_a_damaged_source_leaves_nothing(awq_folder: Path, tmp_path: Path) -> None:
    import shutil

    broken = Path(shutil.copytree(awq_folder, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"] = tensors["model.layers.1.mlp.up_proj.scales"] * float("nan")
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.*not finite"):
        qk.convert(broken, tmp_path / "out", format="gptq")
    assert {path.name for path in tmp_path.iterdir()} == {"broken"}


def test_a_repacked_model_writes_a_few_words_unless_it_is_too_large(
    awq_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = qk.convert(awq_folder, tmp_path / "out", format="gptq")
    assert report.sample is not None
    model = qk.load(tmp_path / "out", device="cpu")
    ids = torch.tensor([model.encode(report.sample["prompt"])])
    assert report.sample["text"].startswith(model.tokenizer.decode(int(model(ids)[0, -1].argmax())))
    monkeypatch.setattr("quantkit.convert.repack.memory.packed_model", lambda *a: 10**15)
    report = qk.convert(awq_folder, tmp_path / "large", format="gptq")
    assert report.sample is None
    assert any("no sample was generated" in note for note in report.notes)
    assert report.predicted_host_bytes < 10**15
