"""Mixtures of experts as a GGUF file, and the file as a source: run, measured, converted, dequantized, repacked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from architectures import tiny_model
from click.testing import CliRunner
from english import with_tokenizer_of_english

import quantkit as qk
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.open import open_source
from quantkit.cli.main import cli
from quantkit.errors import RequestError, UnsupportedModel
from quantkit.formats.reader import QuantizedReader
from quantkit.model.skeleton import build_skeleton

IDS = torch.arange(5, 45)[None]
EXPERTS = 3
YARN = dict(
    rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=16,
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    num_experts_per_tok=2, bos_token_id=0, eos_token_id=1, pad_token_id=1, max_position_embeddings=256,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=EXPERTS, moe_intermediate_size=256, mlp_only_layers=[]),
    "gpt_oss": dict(
        num_local_experts=EXPERTS, intermediate_size=256, rope_parameters=YARN,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


@pytest.fixture(scope="module")
def sources(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    english = with_tokenizer_of_english(tiny_original, folder / "english")
    vocab = json.loads((english / "config.json").read_text())["vocab_size"]
    made = {}
    for name, changes in MODELS.items():
        made[name] = folder / name
        dtype = torch.bfloat16 if name == "gpt_oss" else torch.float16
        tiny_model(name, vocab_size=vocab, **{**SIZES, **changes}).to(dtype).save_pretrained(made[name])
        for file in english.glob("*token*"):
            shutil.copy(file, made[name] / file.name)
    return made


@pytest.fixture(scope="module")
def files(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """files(name, mix) -> the GGUF file of a model, made once."""
    folder, made = tmp_path_factory.mktemp("files"), dict[tuple[str, str], Path]()

    def file_of(name: str, mix: str) -> Path:
        if (name, mix) not in made:
            out = folder / f"{name}-{mix}"
            exact = mix in ("f16", "bf16")
            qk.convert(sources[name], out, format="gguf", gguf_type=mix, **({} if exact else {"method": "rtn"}))
            (made[name, mix],) = out.glob("*.gguf")
        return made[name, mix]

    return file_of


def logits(path: Path) -> torch.Tensor:
    return qk.load(path, device="cpu", dtype="float32")(IDS)


@pytest.mark.parametrize(("name", "mix"), [("qwen3_moe", "f16"), ("gpt_oss", "bf16")])
def test_sixteen_bits_read_back_as_the_same_model(name: str, mix: str, sources: dict[str, Path], files: Any) -> None:
    source, original = open_source(files(name, mix)), open_source(sources[name])
    ours, theirs = (build_skeleton(one.config).config.to_dict() for one in (source, original))
    assert ours == theirs
    assert torch.equal(logits(files(name, mix)), logits(sources[name]))  # type: ignore[attr-defined]
    for stored in set(source.names()) & set(original.names()):  # gpt_oss's folder has fused experts
        assert torch.equal(source.read(stored), original.read(stored)), stored


@pytest.mark.parametrize(
    ("name", "mix", "kinds", "near"),
    [
        ("qwen3_moe", "q8_0", {"Q8_0"}, 0.999),
        ("qwen3_moe", "q4_k_m", {"Q4_K", "Q6_K"}, 0.85),
        ("gpt_oss", "mxfp4", {"MXFP4"}, 0.9),
    ],
)
def test_experts_are_what_the_library_dequantizes_and_the_model_is_near(
    name: str, mix: str, kinds: set[str], near: float, sources: dict[str, Path], files: Any
) -> None:
    path = files(name, mix)
    source = GGUFSource(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    seen = set()
    for layer in range(2):
        for projection, stack in STACKS.items():
            tensor = theirs[f"blk.{layer}.{stack}.weight"]
            whole = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            seen.add(tensor.tensor_type.name)
            assert whole.shape == (EXPERTS, 256, 256)
            for index in range(EXPERTS):
                expert = f"model.layers.{layer}.mlp.experts.{index}.{projection}.weight"
                assert torch.equal(source.read_as(expert, torch.float32)[0], whole[index])
                assert torch.equal(source.read(expert), whole[index].to(source.info(expert).dtype))
    assert seen <= kinds
    a, b = (logits(one) for one in (path, sources[name]))
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).mean() > near


@pytest.mark.parametrize("name", MODELS)
def test_eval_and_inspect_take_the_file(name: str, sources: dict[str, Path], files: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The old fox waits near the gate, and nobody sings twice. " * 8)
    path = files(name, "q8_0")
    done = CliRunner().invoke(
        cli, ["eval", str(path), "--baseline", str(sources[name]), "--data", str(text), "--seq-len", "32", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert 0 <= json.loads(done.stdout)["kl_mean"] < 0.05
    done = CliRunner().invoke(cli, ["inspect", str(path)])
    assert done.exit_code == 0, done.output
    assert "linear       6 x mlp.experts.*.down_proj  [256, 256]" in done.stdout


@pytest.mark.parametrize(("name", "mix"), [("qwen3_moe", "q8_0"), ("gpt_oss", "mxfp4")])
def test_dequantized_it_is_a_folder_that_transformers_loads(name: str, mix: str, files: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = files(name, mix)
    qk.convert(path, tmp_path / "dense", dequantize=True, dtype="float32")
    dense, source = open_source(tmp_path / "dense"), GGUFSource(path)
    experts = "model.layers.1.mlp.experts"
    exact = {part: source.read_as(f"{experts}.2.{part}.weight", torch.float32)[0] for part in STACKS}
    if name == "gpt_oss":
        gate_up = dense.read_entry(f"{experts}.gate_up_proj", 2)
        found = {
            "gate_proj": gate_up[:, ::2].t(), "up_proj": gate_up[:, 1::2].t(),
            "down_proj": dense.read_entry(f"{experts}.down_proj", 2).t(),
        }  # fmt: skip
        bias = dense.read(f"{experts}.gate_up_proj_bias")[2]
        assert torch.equal(bias[1::2], source.read_as(f"{experts}.2.up_proj.bias", torch.float32)[0])
    else:
        found = {part: dense.read(f"{experts}.2.{part}.weight") for part in STACKS}
    for part, value in exact.items():
        assert torch.equal(found[part], value), part
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, logits(tmp_path / "dense"), rtol=0, atol=1e-4)


def test_a_quantized_folder_of_gpt_oss_is_dequantized_to_fused_experts(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    qk.convert(sources["gpt_oss"], tmp_path / "int8", method="rtn", bits=8, group_size=32)
    qk.convert(tmp_path / "int8", tmp_path / "dense", dequantize=True, dtype="float32")
    assert set(open_source(tmp_path / "dense").names()) == set(open_source(sources["gpt_oss"]).names())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(IDS).logits
    ours = qk.load(tmp_path / "int8", device="cpu", dtype="float32", dequantize=True)(IDS)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_quantized_anew(name: str, files: Any, tmp_path: Path) -> None:
    path = files(name, "q8_0")
    report = qk.convert(path, tmp_path / "out", method="rtn", bits=8, group_size=32, symmetric=True)
    assert len(report.layers) == 2 * (4 + 3 * EXPERTS)
    a, b = (logits(one) for one in (path, tmp_path / "out"))
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).mean() > 0.999


def test_the_plan_says_as_what_the_weights_are_read(files: Any, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["convert", str(files("gpt_oss", "mxfp4")), "--out", str(tmp_path / "out"), "--method", "rtn", "--dry-run"]
    )
    assert done.exit_code == 0, done.output
    assert "GGUF MXFP4, GGUF Q8_0" in done.output
    assert "its weights are read as float16 and bfloat16" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("name", "mix", "form"),
    [
        ("gpt_oss", "mxfp4", "compressed-tensors"),
        ("qwen3_moe", "q8_0", "compressed-tensors"),
        ("qwen3_moe", "q4_0", "native"),
    ],
)
def test_the_experts_codes_are_repacked_without_a_change(
    name: str, mix: str, form: str, files: Any, tmp_path: Path
) -> None:
    path = files(name, mix)
    report = qk.convert(path, tmp_path / "out", format=form, repack=True)
    assert report.repacked_from == "gguf"
    source, reader = GGUFSource(path), QuantizedReader(open_source(tmp_path / "out"))
    experts = [module for module in reader.modules if ".experts." in module]
    assert len(experts) == 2 * 3 * EXPERTS
    for module in reader.modules:
        weight: Any = reader.module(module)
        assert torch.equal(weight.dequantize(), source.read_as(f"{module}.weight", torch.float32)[0]), module
    a, b = (logits(one) for one in (path, tmp_path / "out"))
    torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * float(a.abs().max()))


def test_blocks_of_256_are_not_repacked_and_the_remedy_is_named(files: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no codes that compressed-tensors holds.*Without --repack"):
        qk.convert(files("qwen3_moe", "q4_k_m"), tmp_path / "out", repack=True)


def test_a_gguf_file_of_experts_becomes_another(files: Any, tmp_path: Path) -> None:
    path = files("qwen3_moe", "f16")
    qk.convert(path, tmp_path / "second", format="gguf", gguf_type="f16")
    (again,) = (tmp_path / "second").glob("*.gguf")
    one, two = (gguf.GGUFReader(each) for each in (path, again))
    assert {t.name: t.data.tobytes() for t in one.tensors} == {t.name: t.data.tobytes() for t in two.tensors}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(swiglu_limit=5.0), r"swiglu_limit 5\.0 has no GGUF form"),
        (dict(attention_bias=False), "attention_bias False has no GGUF form"),
        (dict(rope_parameters={**YARN, "truncate": True}), "truncate True"),
    ],
    ids=["limit", "bias", "truncate"],
)
def test_what_a_file_cannot_say_of_gpt_oss_is_not_written(
    changes: dict[str, Any], words: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(sources["gpt_oss"], tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    if "attention_bias" in changes:
        tiny_model("gpt_oss", vocab_size=config["vocab_size"], **{**SIZES, **MODELS["gpt_oss"], **changes}).to(
            torch.bfloat16
        ).save_pretrained(source)
    with pytest.raises(UnsupportedModel, match=words):
        qk.convert(source, tmp_path / "out", format="gguf", gguf_type="bf16")
