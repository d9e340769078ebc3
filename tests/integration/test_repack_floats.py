"""FP8, NVFP4 and MXFP4 folders of several tools, repacked: the same numbers, or a rounding that was asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from english import with_tokenizer_of_english
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantkit as qk
from quantkit.checkpoint.open import open_source
from quantkit.errors import QuantkitError
from quantkit.formats.reader import QuantizedReader

RTN = dict(method="rtn", scales="minmax")
IDS = torch.tensor([[5, 9, 130, 77, 201, 14, 8, 300]])


@pytest.fixture(scope="module")
def made(tiny_original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A compressed-tensors folder for each scheme. Do not modify."""
    folder = tmp_path_factory.mktemp("floats")
    tiny_original = with_tokenizer_of_english(tiny_original, tmp_path_factory.mktemp("english") / "source")
    for scheme in ("fp8", "fp8-tensor", "nvfp4", "mxfp4"):
        qk.convert(tiny_original, folder / scheme, scheme=scheme, **RTN)
    return {path.name: path for path in folder.iterdir()}


def rewritten(source: Path, out: Path, config: dict[str, Any], change: Callable[[str, Tensor], Any]) -> Path:
    """The same weights as another tool stores them. change: name, value -> {name: value}."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    written = {key: v.contiguous() for name, value in tensors.items() for key, v in change(name, value).items()}
    save_file(written, out / "model.safetensors")
    (out / "model.safetensors.index.json").unlink()
    data = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**data, "quantization_config": config}))
    return out


def deepseek(source: Path, out: Path) -> Path:
    return rewritten(
        source, out, {"quant_method": "fp8", "activation_scheme": "dynamic"}, lambda name, value: {name: value}
    )


def modelopt(source: Path, out: Path, factor: float, *, static: bool = False) -> Path:
    """ModelOpt's NVFP4, whose second scale is a factor: a power of two divides as well, another number does not."""

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        module, _, local = name.rpartition(".")
        if local == "weight_global_scale":
            extra = {f"{module}.input_scale": torch.tensor(0.01)} if static else {}
            return {f"{module}.weight_scale_2": (factor / value).reshape(()), **extra}
        return {f"{module}.weight" if local == "weight_packed" else name: value}

    return rewritten(source, out, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, change)


def numbers(folder: Path) -> dict[str, Tensor]:
    reader = QuantizedReader(open_source(folder))
    assert len(reader.modules) == 21
    return {name: reader.module(name).dequantize() for name in reader.modules}


def same(a: Path, b: Path) -> None:
    before, after = numbers(a), numbers(b)
    assert set(before) == set(after)
    for name in before:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("scheme", ["fp8", "fp8-tensor", "nvfp4", "mxfp4"])
def test_native_and_back_gives_the_same_bytes(scheme: str, made: dict[str, Path], tmp_path: Path) -> None:
    report = qk.convert(made[scheme], tmp_path / "native", format="native", repack=True)
    assert report.repacked_from == "compressed-tensors"
    same(made[scheme], tmp_path / "native")
    qk.convert(tmp_path / "native", tmp_path / "back", format="compressed-tensors", repack=True)
    first, last = (load_file(path / "model.safetensors") for path in (made[scheme], tmp_path / "back"))
    assert set(first) == set(last)
    assert all(torch.equal(first[name].view(torch.uint8), last[name].view(torch.uint8)) for name in first)
    a, b = (qk.load(path, device="cpu", dtype="float32")(IDS) for path in (made[scheme], tmp_path / "native"))
    assert torch.equal(a, b)


def test_mxfp4_is_the_same_in_a_gguf_file_and_back(made: dict[str, Path], tmp_path: Path) -> None:
    qk.convert(made["mxfp4"], tmp_path / "gguf", format="gguf", repack=True)
    (path,) = (tmp_path / "gguf").glob("*.gguf")
    assert path.name == "model-MXFP4.gguf"
    kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors]
    assert kinds.count("MXFP4") == 21
    for form in ("compressed-tensors", "native"):
        qk.convert(path, tmp_path / form, format=form, repack=True, overwrite=True)
        same(made["mxfp4"], tmp_path / form)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-tensor"])
@pytest.mark.parametrize("form", ["compressed-tensors", "native"])
def test_fp8_of_deepseek_keeps_its_numbers(scheme: str, form: str, made: dict[str, Path], tmp_path: Path) -> None:
    source = deepseek(made[scheme], tmp_path / "deepseek")
    report = qk.convert(source, tmp_path / "out", format=form, repack=True)
    assert report.repacked_from == "fp8"
    same(made[scheme], tmp_path / "out")


def test_nvfp4_of_modelopt_keeps_its_numbers_where_its_factor_is_a_power_of_two(
    made: dict[str, Path], tmp_path: Path
) -> None:
    source = modelopt(made["nvfp4"], tmp_path / "modelopt", 1.0, static=True)
    report = qk.convert(source, tmp_path / "out", repack=True)
    assert any("21 linears" in warning and "left out" in warning for warning in report.warnings)
    same(made["nvfp4"], tmp_path / "out")


def test_other_factors_are_rounded_when_asked_for_and_measured(made: dict[str, Path], tmp_path: Path) -> None:
    source = modelopt(made["nvfp4"], tmp_path / "modelopt", 1.7)
    with pytest.raises(QuantkitError, match=r"weight_scale_2.*--allow-rounding"):
        qk.convert(source, tmp_path / "out", repack=True)
    assert not (tmp_path / "out").exists()
    qk.convert(source, tmp_path / "out", repack=True, allow_rounding=True)
    before, after = numbers(source), numbers(tmp_path / "out")
    rounded = json.loads((tmp_path / "out" / "quantkit.json").read_text())["rounded"]
    assert set(rounded) == set(before)
    for name in before:
        error = float((after[name] - before[name]).norm() / before[name].norm())
        assert 0 < error < 1e-6
        assert rounded[name] == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize(
    ("scheme", "form", "words"),
    [
        ("fp8", "gguf", "no blocks of fp8"),
        ("nvfp4", "gguf", "no blocks of nvfp4"),
        ("fp8", "gptq", "no quantized activations"),
        ("mxfp4", "gptq", "gptq files hold integers"),
        ("nvfp4", "awq", "awq files hold integers"),
    ],
)
def test_what_other_formats_do_not_hold_is_refused(
    scheme: str, form: str, words: str, made: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(QuantkitError, match=words):
        qk.convert(made[scheme], tmp_path / "out", format=form, repack=True)
    assert not (tmp_path / "out").exists()


def test_without_repack_such_a_folder_is_quantized_like_any_original(made: dict[str, Path], tmp_path: Path) -> None:
    report = qk.convert(made["fp8"], tmp_path / "out", group_size=32, symmetric=True, **RTN)
    assert report.repacked_from is None
    assert any("--repack" in warning for warning in report.warnings)
