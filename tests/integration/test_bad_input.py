"""Bad input gets one clear message that names the thing and the remedy, the right exit code, and loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit import convert
from quantkit.errors import NumericsError

Run = Callable[..., Any]


def refused(done: Any, code: int, *words: str, out: Path | None = None) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("Error:") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    if out is not None:
        assert not out.exists()
        assert not list(out.parent.glob(".*partial*"))


def test_a_script_that_asked_for_json_gets_the_error_as_json(tiny_model: Path, tmp_path: Path, quantkit: Run) -> None:
    done = quantkit("convert", tiny_model, "--out", tmp_path / "out", "--bits", "9", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2
    assert json.loads(done.stdout)["error"] in done.stderr


def test_commands_of_other_tools_are_pointed_to_ours(quantkit: Run) -> None:
    refused(quantkit("repack", "x"), 2, "part of `quantkit convert`")


def save(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")


GGUF = ["--format", "gguf", "--gguf-type"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--bits", "9"], 2, ["bits=9", "2, 3, 4, 5, 6, 7 or 8"]),
        (["--group-size", "-5"], 2, ["group_size=-5", "'channel'"]),
        (["--group-size", "many"], 2, ["--group-size many", "positive number"]),
        (["--method", "kquant"], 2, ["--method kquant", "Add --format gguf", "gptq or awq"]),
        (["--method", "autoround"], 2, ["autoround", "--method tune does that here"]),
        (["--method", "magic"], 2, ["magic", "no such method"]),
        (["--format", "gguf"], 2, ["--format gguf: which type?", "--gguf-type q4_k_m"]),
        (["--gguf-type", "q4_k_m"], 2, ["--gguf-type q4_k_m", "goes with --format gguf"]),
        (["--imatrix", "none.gguf"], 2, ["--imatrix none.gguf", "goes with --format gguf"]),
        ([*GGUF, "q9_z"], 2, ["--gguf-type q9_z", "no such type", "q4_k_m"]),
        ([*GGUF, "q4_0", "--method", "awq"], 2, ["--method awq", "finds no scales", "gptq, kquant, rtn"]),
        ([*GGUF, "q4_0", "--preset", "best"], 2, ["preset best", "--preset balanced"]),
        ([*GGUF, "q4_0", "--bits", "4"], 2, ["--bits", "no effect", "--gguf-type q4_0 decides it"]),
        ([*GGUF, "q4_0", "--kv-bits", "8"], 2, ["--kv-bits", "--cache-type-k"]),
        ([*GGUF, "q4_0", "--rule", "*=bits:8"], 2, ["--rule", "block format"]),
        ([*GGUF, "q4_0", "--target-bpw", "5"], 2, ["--target-bpw", "decides which type"]),
        ([*GGUF, "q4_0", "--distil", "8"], 2, ["--distil", "integer schemes"]),
        ([*GGUF, "f16", "--method", "gptq"], 2, ["--method gptq has no effect", "rounds to no codes"]),
        ([*GGUF, "q4_0", "--imatrix", "none.gguf"], 2, ["none.gguf: no such file", "quantkit imatrix"]),
        ([*GGUF, "q4_0", "--imatrix", "none.gguf", "--method", "gptq"], 2, ["--imatrix with --method gptq"]),
        (["--kv-bits", "5"], 2, ["--kv-bits 5", "16"]),
        (["--preset", "finest"], 2, ["--preset finest", "no preset", "balanced"]),
        (["--preset", "slow"], 2, ["--preset slow", "is no preset"]),
        (["--preset", "fast", "--method", "gptq"], 2, ["--preset fast", "--method gptq", "Leave one"]),
        (["--preset", "fast", "--damping", "0.1"], 2, ["--damping", "no effect", "hqq"]),
        (["--colour", "red"], 2, ["--colour"]),
        (["--device", "tpu"], 2, ["device='tpu'", "auto, cpu or cuda"]),
        (["--damping", "7"], 2, ["--damping 7"]),
        (["--samples", "0"], 2, ["--samples 0"]),
        (["--calibration", "no-such-file.txt"], 2, ["no-such-file.txt"]),
        (["--calibration", "SHORT"], 2, ["fewer than one window", "longer text"]),
        (["--samples", "5000", "--seq-len", "32"], 2, ["5000", "Use a longer text"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].startswith("--") else None,
)
def test_wrong_options(
    arguments: list[str],
    code: int,
    words: list[str],
    tiny_original: Path,
    calibration_text: Path,
    tmp_path: Path,
    quantkit: Run,
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Short.")
    base = [] if "--calibration" in arguments else ["--calibration", calibration_text]
    out = tmp_path / "out"
    given = [str(short) if a == "SHORT" else a for a in arguments]
    refused(
        quantkit("convert", tiny_original, "--out", out, "--group-size", "32", *base, *given), code, *words, out=out
    )


def test_sources_that_are_none(tmp_path: Path, quantkit: Run) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    out = tmp_path / "out"
    refused(quantkit("convert", tmp_path / "nowhere", "--out", out), 2, "nowhere", "no such folder", out=out)
    refused(quantkit("convert", tmp_path / "empty", "--out", out), 1, "empty", "config.json", out=out)
    refused(quantkit("convert", tmp_path / "file.bin", "--out", out), 1, "pickle", "safetensors", out=out)
    refused(quantkit("convert", tmp_path / "notes.txt", "--out", out), 1, "not a model", out=out)


def test_an_output_that_exists_is_not_touched(tiny_original: Path, tmp_path: Path, quantkit: Run) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    refused(quantkit("convert", tiny_original, "--out", out), 2, "exists already", "--overwrite")
    refused(quantkit("convert", tiny_original, "--out", out, "--overwrite"), 2, "no model folder")
    assert (out / "precious.txt").read_text() == "mine"
    refused(quantkit("convert", tiny_original, "--out", tmp_path / "no" / "parent"), 2, "does not exist")


def damage_truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_lost_tensor(model: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        del t["model.layers.1.mlp.up_proj.weight"]

    save(model, change)


def damage_index(model: Path) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    table = dict.fromkeys([*names, "model.layers.9.ghost.weight"], "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def damage_shard(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}})
    )


def damage_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def damage_nan(model: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.2.self_attn.k_proj.weight"][0, 0] = float("nan")

    save(model, change)


def damage_tokenizer(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()


def damage_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))


def damage_config(model: Path) -> None:
    (model / "config.json").write_text("{ not json")


def damage_pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def damage_vocabulary(model: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t["model.embed_tokens.weight"] = t["model.embed_tokens.weight"][:100].clone()

    save(model, change)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


def damage_quantized(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (damage_truncate, 1, ["model.safetensors", "not a whole safetensors file", "again"]),
        (damage_lost_tensor, 1, ["model.layers.1.mlp.up_proj.weight", "incomplete"]),
        (damage_index, 1, ["model.layers.9.ghost.weight", "again"]),
        (damage_shard, 1, ["model-00002-of-00002.safetensors is missing"]),
        (damage_pointer, 1, ["model.safetensors", "git lfs pull"]),
        (damage_nan, 1, ["model.layers.2.self_attn.k_proj.weight", "NaN"]),
        (damage_tokenizer, 1, ["tokenizer"]),
        (damage_architecture, 1, ["nonesuch", "transformers"]),
        (damage_config, 1, ["config.json", "not valid JSON"]),
        (damage_pickle, 1, ["pickle", "safetensors"]),
        (damage_vocabulary, 2, ["tokenizer", "100 embeddings"]),
        (damage_quantized, 1, ["says quantized, but no quantized tensor"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_damaged_models(
    damage: Callable[[Path], None], code: int, words: list[str], tiny_model: Path, calibration_text: Path,
    tmp_path: Path, quantkit: Run,
) -> None:  # fmt: skip
    damage(tiny_model)
    out = tmp_path / "out"
    options = ["--group-size", "32", "--samples", "2", "--seq-len", "32", "--calibration", calibration_text]
    refused(quantkit("convert", tiny_model, "--out", out, *options), code, *words, out=out)


def test_a_tokenizer_of_another_model_is_refused_also_where_no_text_is_read(
    tiny_model: Path, tmp_path: Path, quantkit: Run
) -> None:
    damage_vocabulary(tiny_model)
    options = ["--method", "rtn", "--group-size", "32"]
    refused(
        quantkit("convert", tiny_model, "--out", tmp_path / "out", *options),
        2,
        "tokenizer",
        "100 embeddings",
        out=tmp_path / "out",
    )


def test_a_plan_that_does_not_fit_the_disk_is_refused_before_work(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    from quantkit.convert.options.options import ConvertOptions
    from quantkit.convert.plan.plan import make_plan

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1000))
    options = ConvertOptions(
        str(tiny_original), tmp_path / "out", calibration=str(calibration_text), samples=2, seq_len=32, group_size=32
    )
    assert any("disk" in problem for problem in make_plan(options).problems)


def test_the_source_is_never_overwritten(tiny_model: Path, calibration_text: Path, quantkit: Run) -> None:
    before = (tiny_model / "model.safetensors").read_bytes()
    for out in (tiny_model, tiny_model.parent, tiny_model / "inner"):
        done = quantkit("convert", tiny_model, "--out", out, "--overwrite", "--group-size", "32")
        assert done.returncode == 2
        assert "Error:" in done.stderr
    assert (tiny_model / "model.safetensors").read_bytes() == before


def test_an_overwritten_model_survives_a_failed_finish(
    tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quantkit

    out = tmp_path / "out"
    quantkit.convert(tiny_original, out=out, method="rtn", group_size=32)
    before = (out / "model.safetensors").read_bytes()
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if "partial" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        quantkit.convert(tiny_original, out=out, method="rtn", bits=8, group_size=32, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    monkeypatch.setattr(Path, "rename", rename)
    quantkit.convert(tiny_original, out=out, method="rtn", bits=8, group_size=32, overwrite=True, resume=True)
    assert (out / "model.safetensors").read_bytes() != before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_options_without_effect_are_refused(tiny_original: Path, tmp_path: Path, quantkit: Run) -> None:
    out = tmp_path / "out"
    for option in (["--damping", "0.5"], ["--samples", "8"], ["--calibration", "x.txt"]):
        done = quantkit("convert", tiny_original, "--out", out, "--method", "rtn", *option)
        refused(done, 2, option[0], "has no effect", out=out)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "foo"}, "foo"),
        ({"vocab_size": -1}, "config.json"),
        ({"hidden_size": "64"}, "config.json"),
        ({"quantization_config": "x"}, "quantization_config"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_blamed_itself(
    change: dict[str, Any], word: str, tiny_model: Path, tmp_path: Path
) -> None:
    import quantkit
    from quantkit.errors import QuantkitError

    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(QuantkitError, match=word) as caught:
        quantkit.convert(tiny_model, out=tmp_path / "out", method="rtn", group_size=32)
    assert "tokenizer" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda config, tensors: config.pop("config_groups"),
        lambda config, tensors: config["config_groups"]["group_0"].pop("targets"),
        lambda config, tensors: config["config_groups"]["group_0"]["weights"].pop("strategy"),
        lambda config, tensors: config["config_groups"]["group_0"].update(weights=None),
        lambda config, tensors: config["config_groups"]["group_0"].update(targets=["re:("]),
        lambda config, tensors: config["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
        lambda config, tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_zero_point"),
        lambda config, tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale"),
        lambda config, tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_shape": torch.ones(3).long()}),
        lambda config, tensors: tensors["model.layers.0.mlp.up_proj.weight_scale"].fill_(float("nan")),
    ],
)
def test_damaged_quantized_checkpoints_are_refused(
    damage: Callable[[dict[str, Any], dict[str, torch.Tensor]], None], tiny_original: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    import quantkit
    from quantkit.errors import QuantkitError

    out = tmp_path / "out"
    quantkit.convert(tiny_original, out=out, method="rtn", group_size=32)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    damage(config["quantization_config"], tensors)
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors.index.json").unlink()
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(QuantkitError):
        quantkit.load(out)


def test_weights_too_large_for_the_scale_are_named(tiny_model: Path, tmp_path: Path) -> None:
    import quantkit
    from quantkit.errors import NumericsError

    def change(t: dict[str, torch.Tensor]) -> None:
        for name in t:
            t[name] = t[name].float()
        t["model.layers.1.mlp.up_proj.weight"][0, 0] = 5e6

    save(tiny_model, change)
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up_proj.*bfloat16"):
        quantkit.convert(tiny_model, out=tmp_path / "out", method="rtn", group_size=32)
    quantkit.convert(tiny_model, out=tmp_path / "out", method="rtn", group_size=32, scale_dtype="bfloat16")


def test_a_head_that_differs_from_its_tied_embedding_is_used(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    import quantkit

    def change(t: dict[str, torch.Tensor]) -> None:
        t["lm_head.weight"] = -t["model.embed_tokens.weight"]

    save(tiny_model, change)
    ids = torch.arange(10, 30)[None]
    ours = quantkit.load(tiny_model, dtype="float32")(ids)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


def test_python_refuses_what_the_command_line_refuses(tiny_original: Path, tmp_path: Path) -> None:
    import quantkit
    from quantkit.errors import RequestError

    with pytest.raises(RequestError, match="--calibration, --samples have no effect"):
        quantkit.convert(tiny_original, tmp_path / "out", method="rtn", samples=4, calibration="self")


def test_weights_that_are_not_finite_are_found_before_any_block_is_worked_on(
    tiny_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """All of them, wherever they are; nothing is left behind."""

    def change(t: dict[str, torch.Tensor]) -> None:
        t["model.layers.2.self_attn.k_proj.weight"][0, :3] = float("nan")
        t["model.norm.weight"][1] = float("inf")

    save(tiny_model, change)
    stages: list[str] = []
    options: dict[str, Any] = {"method": "gptq", "group_size": 32, "samples": 2, "seq_len": 32}
    with pytest.raises(NumericsError) as caught:
        convert(
            tiny_model, tmp_path / "out", calibration=str(calibration_text),
            on_progress=lambda progress: stages.append(progress.stage), **options,
        )  # fmt: skip
    assert "tensors 'model.layers.2.self_attn.k_proj.weight', 'model.norm.weight' hold NaN" in str(caught.value)
    assert set(stages) == {"read"}
    assert not list(tmp_path.glob("*out*"))
