"""The whole path on a tiny model: convert, read back, load in transformers, the manifest, determinism."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from written import digest

import quantkit
from quantkit.calibrate import capture
from quantkit.checkpoint.open import open_source
from quantkit.convert.api import plan_request
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import make_plan
from quantkit.convert.stages import block
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.formats.reader import QuantizedReader

SMALL = dict(samples=4, seq_len=32, group_size=32)


def convert(source: Path, out: Path, text: Path, **options: Any) -> Any:
    small: dict[str, Any] = {**SMALL, "calibration": str(text)}
    if options.get("method") == "rtn" and options.get("kv_bits", 16) == 16:  # reads no text
        small = {"group_size": SMALL["group_size"]}
    return quantkit.convert(source, out=out, **{**small, **options})


def relative_logit_error(original: Path, quantized: Path) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    ids = torch.arange(10, 42)[None]
    reader = QuantizedReader(open_source(quantized))
    with torch.no_grad():
        before = model(ids).logits
        for name in reader.modules:
            model.get_submodule(name).weight.copy_(reader.module(name).dequantize())
        return float((model(ids).logits - before).norm() / before.norm())


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("compressed-tensors", Scheme(4, 32, False)),
        ("compressed-tensors", Scheme(8, None, True)),
        ("native", Scheme(4, 48, False)),
        ("native", Scheme(3, 32, True)),
        ("native", Scheme(6, None, False, "bfloat16")),
    ],
    ids=str,
)
def test_what_is_written_stays_close_to_the_original(
    method: str, form: str, scheme: Scheme, tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    options = dict(
        method=method, format=form, bits=scheme.bits, group_size=scheme.group_size, symmetric=scheme.symmetric,
        scale_dtype=scheme.scale_dtype,
    )  # fmt: skip
    report = convert(tiny_original, tmp_path / "out", calibration_text, **options)
    assert len(report.layers) == 21
    assert report.verified_tensors == len(open_source(tmp_path / "out").names())
    # measured on this model: 0.38, 0.10, 0.011, 0.008; half a step of b bits is 2**-b of the range
    assert relative_logit_error(tiny_original, tmp_path / "out") < {3: 0.6, 4: 0.2, 6: 0.06, 8: 0.02}[scheme.bits]
    reader = QuantizedReader(open_source(tmp_path / "out"))
    q = reader.module("model.layers.1.mlp.down_proj")
    assert isinstance(q, QuantTensor)
    assert (q.scheme.bits, q.scheme.symmetric, q.scheme.scale_dtype) == (
        scheme.bits,
        scheme.symmetric,
        scheme.scale_dtype,
    )


def test_the_folder_is_complete(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    convert(tiny_original, tmp_path / "out", calibration_text, kv_bits=8)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"}
    wanted |= {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "quantkit.json",
        "quantkit_kv.safetensors",
    }
    assert names == wanted
    assert "TokenizersBackend" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["quantization_config"]["kv_cache_scheme"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # no work folder is left


def test_a_users_own_files_come_along_but_no_code_and_no_pickles(tiny_model: Path, tmp_path: Path) -> None:
    mine = {"LICENSE": "do what you like", "README.md": "# mine", "labels.json": '{"a": 1}', "NOTICE.txt": "by me"}
    others = {
        "modeling_mine.py": "import os",
        "training_args.bin": "x",
        "trainer_state.json": "{}",
        "quantize_config.json": "{}",
    }
    for name, text in {**mine, **others}.items():
        (tiny_model / name).write_text(text)
    report = quantkit.convert(tiny_model, out=tmp_path / "out", method="rtn", group_size=32)
    found = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert {name: found[name].decode() for name in mine} == mine
    assert not set(others) & set(found)
    assert [w for w in report.warnings if "not copied" in w and all(name in w for name in others)]


def test_transformers_loads_it_with_its_compressed_tensors_library(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Oracle: an engine that is not ours gives our numbers."""
    import warnings

    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert(tiny_original, tmp_path / "out", calibration_text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = quantkit.load(tmp_path / "out", dequantize=True, dtype="float32", device="cpu")
    ids = torch.arange(10, 42)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits.float(), ours(ids).float(), rtol=2e-3, atol=2e-3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("The old fox", add_special_tokens=False)["input_ids"]) == "The old fox"


def test_plain_transformers_refuses_native_instead_of_running_random_weights(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import auto

    for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(known, "quantkit", raising=False)  # some test or doctest has imported quantkit.hf

    convert(tiny_original, tmp_path / "out", calibration_text, format="native", method="rtn")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert quantkit.load(tmp_path / "out").generate("The old", max_tokens=2).tokens


def test_the_same_job_gives_the_same_bytes(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        convert(tiny_original, tmp_path / name, calibration_text, kv_bits=4)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_the_manifest_says_what_made_the_bytes(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    convert(tiny_original, tmp_path / "out", calibration_text, seed=3)
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["options"]["seed"] == 3
    assert manifest["options"]["method"] == "gptq"
    assert len(manifest["calibration"]["tokens_sha256"]) == 64
    assert len(manifest["source_sha256"]) == 64
    assert manifest["threads"] == torch.get_num_threads()
    assert len(manifest["layers"]) == 21
    assert 0 < manifest["layers"][0]["relative_output_error"] < 0.5


def test_gptq_beats_rounding_on_what_the_layers_give_out(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    """Same Hessians for both: rounding is measured by asking for the KV cache, which brings data."""
    gptq = convert(tiny_original, tmp_path / "g", calibration_text, bits=3, format="native")
    rtn = convert(tiny_original, tmp_path / "r", calibration_text, bits=3, format="native", method="rtn", kv_bits=8)
    worse = [
        g.name
        for g, r in zip(gptq.layers, rtn.layers, strict=True)
        if g.relative_output_error > r.relative_output_error
    ]
    assert len(worse) <= 2, worse  # later blocks see different inputs, so a tie may fall the other way


def test_sharded_sources_give_the_same_result(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_original).save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    for file in tiny_original.glob("*token*"):
        (sharded / file.name).write_bytes(file.read_bytes())
    convert(tiny_original, tmp_path / "a", calibration_text)
    convert(sharded, tmp_path / "b", calibration_text)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_the_plan_collects_all_problems(tiny_original: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    options = ConvertOptions(str(tiny_original), tmp_path / "out", bits=3, calibration=str(short), seq_len=1024)
    problems = "\n".join(make_plan(options).problems)
    assert "3 bits" in problems
    assert "exceeds the model's context of 256" in problems
    assert "fewer than one window" in problems
    with pytest.raises(QuantkitError, match="cannot run"):
        make_plan(options).raise_problems()


def test_reading_back_notices_a_flipped_bit(
    tiny_original: Path, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.checkpoint.writer import CheckpointWriter

    whole = CheckpointWriter.assemble

    def damaged(self: CheckpointWriter) -> None:
        whole(self)
        path = self.folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(CheckpointWriter, "assemble", damaged)
    with pytest.raises(CheckpointError, match="reads back different"):
        convert(tiny_original, tmp_path / "out", calibration_text)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(CheckpointWriter, "assemble", whole)  # the parts are whole: the disk may do better this time
    convert(tiny_original, tmp_path / "out", calibration_text, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_cast_of_scales_to_bfloat16_would_lose_is_measured_for_bfloat16_models(
    tiny_original: Path, calibration_text: Path, tmp_path: Path
) -> None:
    source = tmp_path / "bfloat16"
    shutil.copytree(tiny_original, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))

    def notes(model: Path, **options: Any) -> list[str]:
        report = convert(
            model, tmp_path / f"out-{len(list(tmp_path.iterdir()))}", calibration_text, method="rtn", **options
        )
        return [note for note in report.notes if "casts the scales to bfloat16" in note]

    (note,) = notes(source)
    share = float(re.search(r"by ([0-9.]+)%", note).group(1))  # type: ignore[union-attr]
    assert 0.03 < share < 0.4, "8 bits of mantissa: at most 2**-8 of each scale, some 0.1 % on average"
    assert notes(source, scale_dtype="bfloat16") == []
    assert notes(tiny_original) == []


def test_fewer_tokens_than_inputs_are_said(tiny_original: Path, calibration_text: Path, tmp_path: Path) -> None:
    def notes(samples: int) -> str:
        options = ConvertOptions(
            str(tiny_original),
            tmp_path / "out",
            group_size=32,
            calibration=str(calibration_text),
            samples=samples,
            seq_len=32,
        )
        return "\n".join(make_plan(options).warnings)

    assert "64 calibration tokens are fewer than the 96 inputs" in notes(2)
    assert "fewer than" not in notes(3)


@pytest.mark.parametrize("mode", ["float32", "bf16"])
def test_the_model_runs_in_the_products_asked_for_and_codes_are_chosen_in_float32(
    mode: str, tiny_original: Path, calibration_text: Path, tmp_path: Path, precisions_seen: Any
) -> None:
    rounding, model = precisions_seen(block, "gptq_steps"), precisions_seen(capture, "run_block")
    report = convert(tiny_original, tmp_path / "out", calibration_text, method="gptq", matmul_precision=mode)
    assert rounding == {"ieee"}
    assert model == {"bf16" if mode == "bf16" else "ieee"}
    manifest = json.loads((tmp_path / "out" / "quantkit.json").read_text())
    assert manifest["products"] == report.to_json()["products"] == mode


def test_a_source_is_opened_once(tiny_original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    for place in ("quantkit.convert.api", "quantkit.convert.plan.plan"):
        open_source = getattr(__import__(place, fromlist=["open_source"]), "open_source")  # noqa: B009
        monkeypatch.setattr(f"{place}.open_source", lambda ref, real=open_source: (opened.append(ref), real(ref))[1])
    plan_request(tiny_original, tmp_path / "out", method="rtn", group_size=32)
    assert opened == [tiny_original]
