"""A model written as one GGUF file: what is in it reads back as the model that was converted."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from architectures import with_tokenizer_of
from click.testing import CliRunner

import quantkit
from quantkit.checkpoint import tokenizer
from quantkit.checkpoint.gguf_files.header import read_header
from quantkit.checkpoint.gguf_files.imatrix import read_imatrix
from quantkit.checkpoint.gguf_files.out_names import Names
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.gguf_files.vocabulary import rebuild
from quantkit.checkpoint.source import FolderSource
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.cli.main import cli
from quantkit.convert.imatrix import imatrix
from quantkit.errors import RequestError, SourceError, UnsupportedModel


def convert(model: Path, out: Path, mix: str, **options: Any) -> Any:
    given = {"method": "rtn"} if "imatrix" not in options and mix not in ("f16", "f32", "bf16") else {}
    return quantkit.convert(model, out, format="gguf", gguf_type=mix, **{**given, **options})


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.gguf")
    return path


def text_options(text: Path) -> dict[str, Any]:
    return {"calibration": str(text), "samples": 8, "seq_len": 32}


def test_sixteen_bits_read_back_exactly(tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path / "out", "f16")
    path = only_file(tmp_path / "out")
    assert path.name == "model-F16.gguf"
    original, written = FolderSource(tiny_model), GGUFSource(path)
    assert set(written.names()) == set(original.names())
    for name in original.names():  # rows of q and k among them, which llama.cpp rotates in another order
        assert torch.equal(written.read(name), original.read(name)), name
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size"):
        assert written.config[key] == original.config[key], key
    assert written.config["tie_word_embeddings"] is True


def test_the_folder_has_one_file_of_weights_and_no_tokenizer_beside_it(tiny_model: Path, tmp_path: Path) -> None:
    report = convert(tiny_model, tmp_path / "out", "q8_0")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model-Q8_0.gguf", "config.json", "generation_config.json", "quantkit.json"}
    assert report.output_bytes == only_file(tmp_path / "out").stat().st_size
    assert report.sample is not None
    assert [verdict.engine for verdict in report.engines if verdict.loads] == ["quantkit", "llama.cpp"]


def test_tokenizer_and_chat_template_are_in_the_file(tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path / "out", "q8_0")
    path = only_file(tmp_path / "out")
    ours, theirs = load_tokenizer(tiny_model), rebuild(read_header(path).metadata, path)
    text = "The old fox waits near the gate, 27 times.\n"
    assert theirs.tokenizer.encode(text).ids == ours.encode(text)
    assert theirs.chat_template == ours.chat_template
    assert (theirs.special["eos_token"], theirs.add_bos) == (ours.eos_token, False)


@pytest.mark.parametrize("mix", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "bf16", "q6_k"])
def test_every_type_runs(mix: str, tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path / "out", mix)
    ids = torch.arange(5, 37)[None]
    a, b = (quantkit.load(path, device="cpu", dtype="float32")(ids) for path in (tiny_model, tmp_path / "out"))
    assert torch.nn.functional.cosine_similarity(a, b, dim=-1).mean() > (0.97 if "4" in mix else 0.995)


def test_what_falls_back_is_told_for_every_tensor(tiny_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    report = convert(tiny_model, tmp_path / "out", "q4_k_m", method="gptq", **text_options(calibration_text))
    told = {layer.name: layer.fallback for layer in report.layers}
    assert told["model.layers.1.self_attn.q_proj"] == "Q5_0 instead of Q4_K: rows of 64 are no multiple of 256"
    assert all(told.values()) or told["model.embed_tokens"] is None
    stored = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(only_file(tmp_path / "out")).tensors}
    assert stored["blk.1.attn_q.weight"] == "Q5_0"
    assert stored["token_embd.weight"] == "Q8_0"
    assert stored["blk.1.attn_norm.weight"] == "F32"
    assert all(layer.relative_output_error is not None for layer in report.layers if "layers" in layer.name)


def test_a_stopped_job_goes_on_to_the_same_bytes(tiny_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    options = {"method": "kquant", **text_options(calibration_text)}
    convert(tiny_model, tmp_path / "whole", "q4_1", **options)

    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.stage == "blocks" and progress.done == 2:
            raise Stop

    with pytest.raises(Stop):
        convert(tiny_model, tmp_path / "part", "q4_1", on_progress=stop, **options)
    convert(tiny_model, tmp_path / "part", "q4_1", resume=True, **options)
    assert only_file(tmp_path / "part").read_bytes() == only_file(tmp_path / "whole").read_bytes()


def test_an_importance_matrix_stands_for_the_text(tiny_model: Path, calibration_text: Path, tmp_path: Path) -> None:
    made = CliRunner().invoke(
        cli,
        ["imatrix", str(tiny_model), "-o", str(tmp_path / "im.gguf"), "--calibration", str(calibration_text),
         "--samples", "8", "--seq-len", "32", "--json"],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["entries"] == 3 * 7
    entry = read_imatrix(tmp_path / "im.gguf")["blk.2.ffn_down.weight"]
    with pytest.raises(RequestError, match=r"exists already. Choose another -o, or remove it"):
        imatrix(tiny_model, tmp_path / "im.gguf", lambda progress: None)
    quantkit.convert(tiny_model, tmp_path / "w4", method="rtn")
    with pytest.raises(RequestError, match=r"an importance matrix is the original's.*--dequantize"):
        imatrix(tmp_path / "w4", tmp_path / "other.gguf", lambda progress: None)
    (tmp_path / "old.dat").write_bytes(b"\x02\0\0\0" * 8)
    with pytest.raises(SourceError, match="old importance matrices"):
        read_imatrix(tmp_path / "old.dat")
    assert (tuple(entry.sums.shape), entry.counts.tolist()) == ((1, 96), [256.0])
    report = convert(tiny_model, tmp_path / "out", "q4_0", imatrix=tmp_path / "im.gguf")
    assert report.method == "kquant"
    plain = convert(tiny_model, tmp_path / "plain", "q4_0")
    assert [layer.name for layer in report.layers] == [layer.name for layer in plain.layers]
    assert only_file(tmp_path / "out").read_bytes() != only_file(tmp_path / "plain").read_bytes()


def test_an_importance_matrix_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from quantkit.checkpoint.gguf_files.imatrix import Importance, write_imatrix

    entries = {"blk.0.attn_q.weight": Importance(torch.ones(1, 32), torch.ones(1))}
    write_imatrix(tmp_path / "im.gguf", entries, "t", 1, 1)
    with pytest.raises(RequestError, match="another model's"):
        convert(tiny_model, tmp_path / "out", "q4_0", imatrix=tmp_path / "im.gguf")


def test_a_gguf_file_becomes_another(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "check_round_trip", lambda *given: None)  # so small a vocabulary spells most words
    convert(tiny_model, tmp_path / "first", "f16")
    convert(only_file(tmp_path / "first"), tmp_path / "second", "f16")
    one, two = (gguf.GGUFReader(only_file(tmp_path / name)) for name in ("first", "second"))
    assert {t.name: t.data.tobytes() for t in one.tensors} == {t.name: t.data.tobytes() for t in two.tensors}
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template", "llama.block_count"):
        assert one.fields[key].contents() == two.fields[key].contents()


def test_a_model_type_without_a_place_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps({**config, "model_type": "smollm3"}))
    with pytest.raises(UnsupportedModel, match="'smollm3' is not written as GGUF"):
        convert(tiny_model, tmp_path / "out", "q8_0")


def test_the_codes_of_a_quantized_source_decide_the_types(tiny_model: Path, tmp_path: Path) -> None:
    quantkit.convert(tiny_model, tmp_path / "int4", method="rtn", bits=4, group_size=32)
    with pytest.raises(RequestError, match="its codes decide the type of each tensor"):
        convert(tmp_path / "int4", tmp_path / "out", "q4_0")


@pytest.mark.parametrize(
    ("mix", "options", "message"),
    [
        ("q4_0", dict(method="gptq", gptaq=True), "--format gguf with --gptaq"),
        ("q4_0", dict(imatrix="im.gguf", method="kquant", rotate=True), "--imatrix with --rotate"),
        ("mxfp4", dict(), "this model has none"),
    ],
)
def test_what_would_do_nothing_or_harm_is_refused(
    mix: str, options: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    given = {"method": "rtn", **options}
    with pytest.raises((RequestError, UnsupportedModel), match=message):
        quantkit.convert(tiny_model, tmp_path / "out", format="gguf", gguf_type=mix, **given)


def test_a_tokenizer_that_gguf_cannot_say_is_refused_by_the_plan(tiny_model: Path, tmp_path: Path) -> None:
    path = tiny_model / "tokenizer.json"
    data = json.loads(path.read_text())
    data["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
    path.write_text(json.dumps(data))
    done = CliRunner().invoke(
        cli, ["convert", str(tiny_model), "--format", "gguf", "--gguf-type", "q8_0", "--method", "rtn",
              "--out", str(tmp_path / "out"), "--dry-run"],
    )  # fmt: skip
    assert done.exit_code != 0
    assert "takes about" not in done.output


SIZED: list[dict[str, Any]] = [
    dict(method="rtn", target_bpw=6.2),
    dict(method="gptq", target_bpw=5.4),
    dict(method="kquant", target_bpw=7.0),
    dict(preset="balanced", target_bpw=6.5),
]


@pytest.mark.parametrize("options", SIZED, ids=lambda o: o.get("method", "balanced"))
def test_types_within_a_size_are_chosen_by_tensor_and_counted_to_the_byte(
    options: dict[str, Any], tiny_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    report = quantkit.convert(tiny_model, tmp_path / "out", format="gguf", **options, **text_options(calibration_text))
    header = read_header(only_file(tmp_path / "out"))
    assert "general.file_type" not in header.metadata  # llama.cpp then tells from the tensors
    found = report.allocation
    sizes = {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[t.kind]] for name, t in header.tensors.items()}
    counted = sum(prod(t.shape) // sizes[name][0] * sizes[name][1] for name, t in header.tensors.items())
    assert counted == found["bytes"] <= found["budget_bytes"]
    assert 0.95 * options["target_bpw"] < found["model_bits_per_weight"] <= options["target_bpw"]
    names = Names(json.loads((tmp_path / "out" / "config.json").read_text()))
    for row in found["groups"]:
        assert {header.tensors[names.place(f"{name}.weight").name].kind for name in row["names"]} == {row["scheme"]}
    assert len({row["scheme"] for row in found["groups"]}) > 1
    quantkit.load(tmp_path / "out", device="cpu")(torch.arange(5, 37)[None])


@pytest.mark.parametrize("options", [dict(gguf_type="q4_0"), dict(target_bpw=7.0)], ids=["type", "size"])
def test_rules_choose_the_type_of_single_tensors(
    options: dict[str, Any], tiny_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    rules = ["*.v_proj=q8_0", "layers.0.*.up_proj=keep", "lm_head=q5_1", "*.down_proj=Q5_0"]
    text = text_options(calibration_text) if "target_bpw" in options else {}
    given = {"format": "gguf", "method": "rtn", "rules": rules, **text, **options}
    report = quantkit.convert(tiny_model, tmp_path / "out", **given)
    path = only_file(tmp_path / "out")
    kinds = {name: tensor.kind for name, tensor in read_header(path).tensors.items()}
    assert kinds["token_embd.weight"] == "Q5_1"  # tied: the head's name is the embedding's, too
    assert (kinds["blk.0.ffn_up.weight"], kinds["blk.1.ffn_up.weight"] in ("F16", "BF16")) == ("F16", False)
    assert {kinds[f"blk.{i}.{part}.weight"] for i in (0, 1) for part in ("attn_v",)} == {"Q8_0"}
    assert {kinds[f"blk.{i}.ffn_down.weight"] for i in (0, 1)} == {"Q5_0"}
    if "target_bpw" in options:
        sizes = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in kinds.values()]
        shapes = [prod(tensor.shape) for tensor in read_header(path).tensors.values()]
        counted = sum(n // width * size for n, (width, size) in zip(shapes, sizes, strict=True))
        assert counted == report.allocation["bytes"] <= report.allocation["budget_bytes"]
    quantkit.load(tmp_path / "out", device="cpu")(torch.arange(5, 37)[None])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("*.v_proj=bits:8", "'bits:8' is no block format; .*q6_k"),
        ("*.v_proj=q7_k", "'q7_k' is no block format"),
        ("*.down_proj=q6_k", "rows of 96 are no multiple of 256, a block of Q6_K. Use q8_0 there"),
        ("*.w_proj=q8_0", "matches no module of this model"),
        (
            "lm_head=q8_0;embed_tokens=q5_0",
            "are one matrix .tied.: --rule 'embed_tokens=q5_0' and",
        ),
        ("*_proj=keep;embed_tokens=keep", "nothing is left to quantize"),
    ],
)
def test_a_rule_that_no_tensor_of_the_file_can_follow_is_refused(
    rule: str, words: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=words):
        convert(tiny_model, tmp_path / "out", "q4_0", rules=rule.split(";"))
    with pytest.raises(RequestError, match="goes with --format gguf"):
        quantkit.convert(tiny_model, tmp_path / "out", method="rtn", rules=["*.v_proj=q6_k"])
    with pytest.raises(RequestError, match="--gguf-type f16 rounds nothing"):
        convert(tiny_model, tmp_path / "out", "f16", rules=["*.v_proj=q8_0"])


def test_inspect_shows_the_types_of_a_file(tiny_model: Path, tmp_path: Path) -> None:
    convert(tiny_model, tmp_path / "out", "q4_0", rules=["layers.0.*.v_proj=q8_0"])
    done = CliRunner().invoke(cli, ["inspect", str(only_file(tmp_path / "out"))])
    (values,) = (line for line in done.stdout.splitlines() if "v_proj" in line)
    assert "2 Q4_0, 1 Q8_0" in values
    assert any(line.split()[0] == "Q8_0" and "embedding" in line for line in done.stdout.splitlines()), done.stdout


def test_a_type_and_a_size_contradict_each_other(tiny_model: Path, tmp_path: Path) -> None:
    for more, words in (
        (dict(gguf_type="q4_k_m", target_bpw=5), "the size decides which type each tensor gets"),
        (dict(gguf_type="mixed"), "for which size"),
        (dict(target_bpw=2), "the least that is possible here is --target-bpw 4"),
    ):
        with pytest.raises(RequestError, match=words):
            quantkit.convert(tiny_model, tmp_path / "out", format="gguf", method="rtn", **more)


# what llama.cpp's graphs of these types take for granted: no window, Gemma's order of windows
USUAL = {
    "mistral": dict(sliding_window=None),
    "olmo2": dict(tie_word_embeddings=False),
    "gemma3_text": dict(layer_types=["sliding_attention"] * 3),
}


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "granite", "olmo2"])
def test_what_is_written_of_a_family_is_read_back(name: str, tiny_original: Path, tmp_path: Path) -> None:
    source = with_tokenizer_of(tiny_original, name, tmp_path / "source", **USUAL.get(name, {}))
    convert(source, tmp_path / "out", "f32")
    ids = torch.arange(5, 25)[None]
    a, b = (quantkit.load(path, device="cpu", dtype="float32")(ids) for path in (source, tmp_path / "out"))
    assert torch.allclose(a, b, atol=1e-5), float((a - b).abs().max())


def test_experts_that_a_rule_and_a_size_would_part_are_refused(tiny_original: Path, tmp_path: Path) -> None:
    small = dict(hidden_size=64, moe_intermediate_size=64, num_experts=4, head_dim=16, mlp_only_layers=[])
    source = with_tokenizer_of(tiny_original, "qwen3_moe", tmp_path / "source", **small)
    rules = ["*.experts.0.gate_proj=q8_0"]
    with pytest.raises(RequestError, match=r"ffn_gate_exps.weight.*its experts are one tensor, and rules give Q8_0"):
        quantkit.convert(source, tmp_path / "out", format="gguf", method="rtn", target_bpw=8, rules=rules)
