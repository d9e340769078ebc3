"""Layers that predict further tokens (MTP): copied under their names, or quantized with --quantize-mtp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from scripts import script
from written import schemes

import quantkit
from quantkit.cli.inspect import command
from quantkit.errors import RequestError

EVAL = Path(__file__).resolve().parents[2] / "eval"
# as published: behind the last layer (its number in config.json), or under a name of their own
KINDS = {"deepseek_v3": "model.layers.2.", "qwen3_next": "mtp.layers.0."}
BESIDE = {"deepseek_v3": "model.layers.2.eh_proj", "qwen3_next": "mtp.fc"}
Convert = Callable[..., Path]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def source(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with one more layer than transformers has modules for, as its checkpoints have."""
    monkeypatch.syspath_prepend(str(EVAL))
    tiny = script(EVAL / "tiny_models.py")
    folder = tmp_path / "source"
    tiny.tiny_model(tiny.Kind("causal", kind)).save_pretrained(folder)
    script(EVAL / "architecture_trial.py").write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "deepseek_v3":
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    more = {
        f"{KINDS[kind]}{name[len(last) :]}": 1.5 * value for name, value in tensors.items() if name.startswith(last)
    }
    more[f"{BESIDE[kind]}.weight"] = torch.randn(64, 128)
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def convert(source: Path, tmp_path: Path) -> Convert:
    def run(name: str, **options: Any) -> Path:
        text = dict(calibration=str(source / "calibration.txt"), samples=2, seq_len=48)
        text = text if {"method", "target_bpw"} & set(options) else {}  # rtn alone reads none
        quantkit.convert(source, out=tmp_path / name, **{"method": "rtn", "group_size": 32, **text, **options})
        return tmp_path / name

    return run


def ignored(folder: Path) -> list[str]:
    names: list[str] = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    return names


def test_they_are_copied_and_named_as_not_quantized(kind: str, source: Path, convert: Convert) -> None:
    before, after = load_file(source / "model.safetensors"), load_file(convert("out") / "model.safetensors")
    mine = [name for name in before if name.startswith((KINDS[kind], BESIDE[kind]))]
    assert len(mine) > 10
    assert all(torch.equal(after[name], before[name]) for name in mine)
    matrices = {name.removesuffix(".weight") for name in mine if before[name].dim() == 2}
    assert matrices <= set(ignored(source.parent / "out"))


@pytest.mark.parametrize("options", [{}, {"method": "gptq"}], ids=str)
def test_their_linears_are_quantized_on_request(
    kind: str, source: Path, convert: Convert, options: dict[str, Any]
) -> None:
    plain, asked = convert("plain", **options), convert("asked", quantize_mtp=True, **options)
    more = set(schemes(asked)) - set(schemes(plain))
    assert {f"{KINDS[kind]}mlp.experts.0.up_proj", f"{KINDS[kind]}self_attn.o_proj"} <= more
    assert all(name.startswith(KINDS[kind]) for name in more)
    assert not {f"{KINDS[kind]}mlp.gate", BESIDE[kind]} & more  # routers, and what no decoder block has
    ids = torch.arange(3, 20)[None]
    loaded = [quantkit.load(folder, dtype="float32", device="cpu") for folder in (plain, asked)]
    assert torch.equal(loaded[0](ids), loaded[1](ids))
    assert not more & set(ignored(asked))
    assert (asked / "model.safetensors").stat().st_size < (plain / "model.safetensors").stat().st_size


def test_a_size_counts_them(kind: str, convert: Convert) -> None:
    bits = {"deepseek_v3": 13.0, "qwen3_next": 12.0}[kind]
    folder = convert("out", quantize_mtp=True, target_bpw=bits, format="native")
    assert f"{KINDS[kind]}self_attn.o_proj" in schemes(folder)
    stored = sum(value.numel() for value in load_file(folder.parent / "source" / "model.safetensors").values())
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert bits - 0.5 < 8 * size / stored < bits + 2  # with its header


def test_rules_hold_for_them(kind: str, convert: Convert) -> None:
    rules = (f"{KINDS[kind]}*.o_proj=bits:8", f"{KINDS[kind]}mlp.*=keep")
    found = schemes(convert("out", quantize_mtp=True, rules=rules, format="native"))
    assert found[f"{KINDS[kind]}self_attn.o_proj"].startswith("W8")
    assert f"{KINDS[kind]}mlp.experts.0.up_proj" not in found
    assert "model.layers.1.mlp.experts.0.up_proj" in found


def test_they_are_repacked(kind: str, convert: Convert, tmp_path: Path) -> None:
    asked = convert("asked", quantize_mtp=True)
    quantkit.convert(asked, out=tmp_path / "gptq", format="gptq")
    assert schemes(tmp_path / "gptq").keys() == schemes(asked).keys()
    quantkit.load(tmp_path / "gptq", dtype="float32", device="cpu")


def test_a_model_without_them_is_refused_by_name(tiny_original: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--quantize-mtp.*stores no layers that predict further tokens"):
        quantkit.convert(tiny_original, out=tmp_path / "out", method="rtn", quantize_mtp=True)


def test_inspect_names_the_layers_and_the_option(source: Path, kind: str) -> None:
    shown = CliRunner().invoke(command, [str(source)]).output
    begins = KINDS[kind] if kind == "deepseek_v3" else "mtp."
    lines = [line for line in shown.splitlines() if "--quantize-mtp" in line]
    assert len(lines) == 1
    assert f" {begins}*" in lines[0]
