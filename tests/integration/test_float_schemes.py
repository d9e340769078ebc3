"""FP8, NVFP4 and MXFP4 from end to end on a tiny model: convert, read back, run, measure; sources; refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.core.rounding import float_activations as activations
from quantkit.errors import QuantkitWarning, RequestError
from quantkit.runtime.layers.linear import QuantLinear

IDS = torch.tensor([[5, 9, 130, 77, 201, 14, 8, 300]])
LINEAR = "model.layers.0.mlp.down_proj"


def convert(source: Path, out: Path, text: Path | None = None, **options: Any) -> Any:
    calibration = {} if text is None else dict(calibration=str(text), samples=4, seq_len=32)
    return quantkit.convert(source, out=out, **{**calibration, **options})


MADE = {
    "fp8": dict(scheme="fp8", method="rtn"),
    "fp8-tensor": dict(scheme="fp8-tensor", method="gptq"),
    "nvfp4": dict(scheme="nvfp4", preset="balanced"),
    "nvfp4-a4": dict(scheme="nvfp4", method="awq", activations="nvfp4"),
    "mxfp4": dict(scheme="mxfp4", method="gptq"),
    "mxfp4-a4": dict(scheme="mxfp4", method="rtn", activations="mxfp4"),
}
WORDS = {
    "fp8": "W8A8 fp8 channel", "fp8-tensor": "W8A8 fp8 tensor", "nvfp4": "W4 nvfp4", "nvfp4-a4": "W4A4 nvfp4",
    "mxfp4": "W4 mxfp4", "mxfp4-a4": "W4A4 mxfp4",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tiny_original: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each scheme. Do not modify."""
    folder = tmp_path_factory.mktemp("floats")
    for name, options in MADE.items():
        text = None if options.get("method") == "rtn" else calibration_text
        report = convert(tiny_original, folder / name, text, **options)
        assert {layer.scheme for layer in report.layers} == {WORDS[name]}
    return {name: folder / name for name in MADE}


@pytest.mark.parametrize("name", MADE)
def test_packed_and_dequantized_weights_run_alike_with_activations_rounded(made: dict[str, Path], name: str) -> None:
    packed = quantkit.load(made[name], device="cpu", dtype="float32", head_bits=16)
    dense = quantkit.load(made[name], device="cpu", dtype="float32", dequantize=True)
    difference = float((packed(IDS) - dense(IDS)).abs().max())
    assert difference < (2e-2 if name.endswith("a4") else 1e-3)  # a rounded activation may fall to the other side
    layer: Any = packed.module.get_submodule(LINEAR)
    assert isinstance(layer, QuantLinear)
    assert layer.packed.layout == "float"
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    scheme: Any = layer.packed.scheme
    assert torch.allclose(layer(x), activations.round_for(x, scheme) @ layer.dequantize().T, atol=1e-5)


def test_activations_are_rounded_when_a_model_is_evaluated(made: dict[str, Path]) -> None:
    module = quantkit.load(made["fp8"], device="cpu", dtype="float32", dequantize=True).module
    linear: Any = module.get_submodule(LINEAR)
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x), activations.round_fp8(x) @ linear.weight.T)


def test_what_is_written_is_what_vllm_reads(made: dict[str, Path]) -> None:
    wanted = {
        "fp8": {"weight": (torch.float8_e4m3fn, (64, 96)), "weight_scale": (torch.float32, (64, 1))},
        "fp8-tensor": {"weight": (torch.float8_e4m3fn, (64, 96)), "weight_scale": (torch.float32, (1,))},
        "nvfp4-a4": {
            "weight_packed": (torch.uint8, (64, 48)), "weight_scale": (torch.float8_e4m3fn, (64, 6)),
            "weight_global_scale": (torch.float32, (1,)), "input_global_scale": (torch.float32, (1,)),
        },
        "mxfp4": {"weight_packed": (torch.uint8, (64, 48)), "weight_scale": (torch.uint8, (64, 3))},
    }  # fmt: skip
    for name, parts in wanted.items():
        tensors = load_file(made[name] / "model.safetensors")
        mine = {key.removeprefix(f"{LINEAR}."): t for key, t in tensors.items() if key.startswith(LINEAR)}
        assert {key: (t.dtype, tuple(t.shape)) for key, t in mine.items()} == parts
    config = json.loads((made["fp8"] / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (config["format"], group["targets"], group["weights"]["strategy"]) == (
        "float-quantized", ["Linear"], "channel",
    )  # fmt: skip
    assert {"type": "float", "strategy": "token", "dynamic": True}.items() <= group["input_activations"].items()


def test_linears_that_engines_fuse_have_one_global_scale(made: dict[str, Path]) -> None:
    tensors = load_file(made["nvfp4-a4"] / "model.safetensors")
    for index in range(3):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            for part in ("weight_global_scale", "input_global_scale"):
                assert len({float(tensors[f"model.layers.{index}.{name}.{part}"]) for name in group}) == 1


@pytest.mark.parametrize(("scheme", "part"), [("nvfp4", "weight_global_scale"), ("fp8-tensor", "weight_scale")])
def test_linears_that_engines_fuse_share_a_scale_without_a_text_too(
    scheme: str, part: str, tiny_original: Path, tmp_path: Path
) -> None:
    convert(tiny_original, tmp_path / "out", scheme=scheme, method="rtn")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for index in range(3):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({float(tensors[f"model.layers.{index}.{name}.{part}"]) for name in group}) == 1


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_a_stopped_job_goes_on_to_the_same_bytes(scheme: str, tiny_original: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.stage == "blocks" and progress.done == 2:
            raise Stop

    options: dict[str, Any] = dict(scheme=scheme, method="rtn")
    convert(tiny_original, tmp_path / "whole", **options)
    with pytest.raises(Stop):
        convert(tiny_original, tmp_path / "part", on_progress=stop, **options)
    convert(tiny_original, tmp_path / "part", resume=True, **options)
    whole, part = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part"))
    assert whole == part


@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "nvfp4", "mxfp4"])
def test_transformers_computes_our_logits(made: dict[str, Path], name: str) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if name.startswith("fp8") else torch.bfloat16  # it decompresses 4 bits to bfloat16, always
    model = AutoModelForCausalLM.from_pretrained(made[name], dtype=dtype).eval()
    with torch.no_grad():
        theirs = model(IDS).logits.float()
    ours = quantkit.load(made[name], device="cpu", dtype="float32", dequantize=True)(IDS)
    assert float((theirs - ours).abs().max()) < 0.02
    if dtype == torch.bfloat16:
        mine = quantkit.load(made[name], device="cpu", dequantize=True).module.get_submodule(LINEAR)
        assert torch.equal(model.get_submodule(LINEAR).weight.float(), mine.weight.float())


def test_the_report_says_which_engines_read_it(made: dict[str, Path]) -> None:
    verdicts = {name: {v.engine: v for v in quantkit_lint(made[name])} for name in MADE}
    for name in ("fp8", "fp8-tensor", "nvfp4", "nvfp4-a4", "mxfp4"):
        assert verdicts[name]["quantkit"].loads
        assert verdicts[name]["vLLM"].loads
        assert not verdicts[name]["lmdeploy"].loads
    assert "8.9" in verdicts["fp8"]["vLLM"].line()
    assert not verdicts["mxfp4"]["SGLang"].loads
    assert "Not shown to load W4A4 mxfp4" in verdicts["mxfp4-a4"]["vLLM"].line()
    assert "Not shown" in verdicts["mxfp4"]["SGLang"].line()


def quantkit_lint(folder: Path) -> list[Any]:
    from quantkit.checkpoint.open import open_source
    from quantkit.convert.engines.lint import lint_folder

    return lint_folder(open_source(folder))


# -- sources ----------------------------------------------------------------------------------------------------------


def stored_as_fp8(source: Path, out: Path, *, scale: str = "weight_scale_inv") -> Path:
    """Make a copy whose linears are FP8 in DeepSeek's blocks (of 32 x 32: the model is tiny), or per channel."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        w = tensors.pop(name).float()
        rows, cols = w.shape
        if scale == "weight_scale_inv":
            s = w.abs().reshape(rows // 32, 32, cols // 32, 32).amax((1, 3)) / 448
            spread = s.repeat_interleave(32, 0).repeat_interleave(32, 1)
        else:
            s = spread = w.abs().amax(1, keepdim=True) / 448
        tensors[name] = (w / spread).to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + scale] = s
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if scale == "weight_scale_inv":
        config["quantization_config"]["weight_block_size"] = [32, 32]
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_an_fp8_source_is_evaluated_and_quantized_anew(tiny_original: Path, tmp_path: Path, scale: str) -> None:
    source = stored_as_fp8(tiny_original, tmp_path / "fp8", scale=scale)
    near = quantkit.load(source, device="cpu", dtype="float32")(IDS)
    assert 0 < float((near - quantkit.load(tiny_original, device="cpu", dtype="float32")(IDS)).abs().max()) < 0.2
    report = convert(source, tmp_path / "w4", method="rtn", bits=8, group_size=32)
    assert any("stored as W8A8 fp8" in note for note in report.warnings)
    config = json.loads((tmp_path / "w4" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    far = quantkit.load(tmp_path / "w4", device="cpu", dtype="float32", dequantize=True)(IDS)
    assert float((far - near).abs().max()) < 0.2


def test_an_mxfp4_source_becomes_mxfp4_without_a_change(made: dict[str, Path], tmp_path: Path) -> None:
    convert(made["mxfp4"], tmp_path / "again", scheme="mxfp4", method="rtn")
    for name, tensor in load_file(made["mxfp4"] / "model.safetensors").items():
        if name.endswith("weight_scale"):
            module = name.removesuffix(".weight_scale")
            before, after = (
                quantkit.load(folder, device="cpu", dequantize=True).module.get_submodule(module).weight
                for folder in (made["mxfp4"], tmp_path / "again")
            )
            assert torch.equal(before, after)
            assert tensor.dtype == torch.uint8
            break


def test_fixed_scales_of_activations_are_told_of(tiny_original: Path, tmp_path: Path) -> None:
    source = stored_as_fp8(tiny_original, tmp_path / "fp8", scale="weight_scale")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{LINEAR}.input_scale"] = torch.tensor(0.5)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.warns(QuantkitWarning, match="1 linears .*fixed scale"):
        quantkit.load(source, device="cpu")


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(scheme="fp7"), "no such scheme"),
        (dict(scheme="nvfp4", bits=8), "--bits 8: --scheme nvfp4 is W4 nvfp4"),
        (dict(scheme="nvfp4", group_size=32), "--group-size 32"),
        (dict(scheme="fp8", method="rtn", scale_dtype="float16"), "Use bfloat16 or float32"),
        (dict(scheme="fp8", method="hqq"), "--method gptq, awq, tune or rtn"),
        (dict(scheme="fp8", method="smooth"), "rounds to integers only"),
        (dict(scheme="nvfp4", preset="best"), "--preset balanced, or --method tune"),
        (dict(scheme="nvfp4", format="gptq"), "written as compressed-tensors"),
        (dict(scheme="nvfp4", target_bpw=5.0), "chooses between integers"),
        (dict(scheme="nvfp4", distil=4), "--distil with --scheme nvfp4"),
        (dict(scheme="nvfp4", activations="nvfp4", method="rtn"), "comes from a text"),
        (dict(scheme="nvfp4", activations="int8"), "with nvfp4 weights they are none or nvfp4"),
        (dict(scheme="nvfp4", rules=["*.down_proj=bits:8"]), "can only keep modules at 16 bit"),
        (dict(scheme="fp8-block", method="rtn"), "128 x 128 blocks do not divide"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_remedy(
    tiny_original: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        quantkit.convert(tiny_original, out=tmp_path / "out", **options)


def test_nvfp4_of_modelopt_is_quantized_anew_and_its_own_config_stays_behind(
    made: dict[str, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(made["nvfp4"], tmp_path / "modelopt"))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        tensors[f"{module}.weight"] = tensors.pop(name)
        tensors[f"{module}.weight_scale_2"] = 1 / tensors.pop(f"{module}.weight_global_scale")[0]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "model.safetensors.index.json").unlink()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    words = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (source / "hf_quant_config.json").write_text(json.dumps(words))
    logits = [quantkit.load(folder, device="cpu", dtype="float32", head_bits=16)(IDS)
              for folder in (source, made["nvfp4"])]  # fmt: skip
    assert torch.equal(*logits)
    convert(source, tmp_path / "out", method="rtn", bits=8, group_size=32)
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_gpt_oss_in_mxfp4_is_run_and_quantized_anew(tiny_original: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt_oss", vocab_size=384, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    source = Path(shutil.copytree(tiny_original, tmp_path / "source"))
    model.save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, out = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, out, inside // 32, 16), dtype=torch.uint8, generator=generator
        )
        tensors[f"{name}_scales"] = torch.full((experts, out, inside // 32), 121, dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    stored = json.loads((source / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(stored))
    ours = quantkit.load(source, device="cpu", dtype="float32")
    expert: Any = ours.module.get_submodule("model.layers.0.mlp.experts.0.gate_proj")
    assert float(expert.weight.abs().max()) == 6 * 2.0**-6
    near = ours(IDS)
    report = convert(source, tmp_path / "out", method="rtn", bits=8, group_size=32, format="native")
    assert any("stored as W4 mxfp4" in note for note in report.warnings)
    far = quantkit.load(tmp_path / "out", device="cpu", dtype="float32", dequantize=True)(IDS)
    assert float((far - near).abs().max()) < 0.1 * float(near.abs().max())
    _same_experts(source, tmp_path)


def _same_experts(source: Path, tmp_path: Path) -> None:
    """The experts keep their numbers in a GGUF file, and in a dense checkpoint."""
    import gguf

    from quantkit.checkpoint.open import open_source
    from quantkit.runtime.layers.dense_source import as_original

    stored = as_original(open_source(source))
    quantkit.convert(source, tmp_path / "dense", dequantize=True)
    dense = open_source(tmp_path / "dense")
    assert set(dense.names()) == set(stored.names())
    for name in stored.names():
        assert torch.equal(dense.read(name), stored.read(name)), name
    convert(source, tmp_path / "gguf", method="rtn", format="gguf", gguf_type="mxfp4")
    (path,) = (tmp_path / "gguf").glob("*.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    gate_up, down = (
        stored.read(f"model.layers.1.mlp.experts.{part}").float() for part in ("gate_up_proj", "down_proj")
    )
    wanted = {"ffn_gate_exps": gate_up[..., ::2], "ffn_up_exps": gate_up[..., 1::2], "ffn_down_exps": down}
    for part, values in wanted.items():
        tensor = found[f"blk.1.{part}.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(theirs, values.transpose(1, 2)), part
    with pytest.raises(RequestError, match="--gguf-type mxfp4"):
        quantkit.convert(source, tmp_path / "repacked", repack=True)


@pytest.mark.parametrize(
    "options",
    [dict(scheme="fp8"), dict(scheme="fp8-tensor", activations="none"), dict(scheme="nvfp4", activations="nvfp4"),
     dict(scheme="mxfp4")],
    ids=lambda options: options["scheme"],
)  # fmt: skip
def test_rounding_to_floats_is_learned(
    options: dict[str, Any], tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """What is written is on the format's grid, runs, and no block is worse than what learning began with."""
    given = dict(method="tune", samples=12, tune_steps=8, seq_len=32, calibration=str(calibration_text))
    report = quantkit.convert(tiny_original, out=tmp_path / "out", **given, **options)
    errors = [(row["before"], row["after"], row["step"]) for row in report.tuning.values()]
    assert len(errors) == 3  # a block each
    assert all(after <= before for before, after, _ in errors)
    assert any(step > 0 for *_, step in errors), errors
    assert bool(torch.isfinite(quantkit.load(tmp_path / "out", device="cpu")(IDS)).all())
