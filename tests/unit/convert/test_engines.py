"""The table of engines: what each one loads, up to which tensor-parallel size, and the reason when it does not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from quantkit.convert.engines.lint import lint
from quantkit.convert.engines.rules import Checkpoint
from quantkit.convert.engines.table import ENGINES
from quantkit.convert.engines.verdict import Verdict, unread_format_lines, verdict_lines
from quantkit.convert.plan.targets import Target
from quantkit.core.scheme import Scheme


def checkpoint(
    scheme: Scheme, form: str = "compressed-tensors", *, hidden: int = 4096, inner: int = 11008, heads: int = 32,
    kv_heads: int = 8, head_dim: int = 128, **changes: Scheme,
) -> Checkpoint:  # fmt: skip
    """One block like Llama's. changes: the scheme of single linears, by last name; head/embed add those."""
    shapes = {
        "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = []
    for name, (rows, inputs) in shapes.items():
        one = changes.get(name.rpartition(".")[2], scheme)
        weights.append(Target(f"model.layers.0.{name}", f"model.layers.0.{name}.weight", rows, inputs, one))
    for kind, name in (("head", "lm_head"), ("embedding", "model.embed_tokens"), ("tied", "model.embed_tokens")):
        if kind in changes:
            weights.append(Target(name, f"{name}.weight", 32000, hidden, changes[kind], kind))
    return Checkpoint(form, weights, heads, kv_heads)


def verdicts(given: Checkpoint) -> dict[str, Verdict]:
    return {verdict.engine: verdict for verdict in lint(given)}


def loads(given: Checkpoint) -> set[str]:
    return {name.partition(" ")[0] for name, verdict in verdicts(given).items() if verdict.loads}


W4, W4A = Scheme(4, 128, True), Scheme(4, 128, False)
EVERY = {"quantkit", "vLLM", "SGLang", "lmdeploy", "transformers", "GPTQModel", "llama.cpp"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (checkpoint(W4, "native"), {"quantkit", "transformers"}),
        (checkpoint(W4), EVERY - {"GPTQModel"}),
        (checkpoint(W4A), EVERY - {"GPTQModel"}),
        (checkpoint(Scheme(4, 64, True)), EVERY - {"GPTQModel", "lmdeploy"}),
        (checkpoint(Scheme(4, 32, True)), EVERY - {"GPTQModel"}),
        (checkpoint(Scheme(4, 256, True)), {"quantkit", "vLLM", "transformers", "llama.cpp"}),
        (checkpoint(Scheme(8, 256, True)), {"quantkit", "transformers", "llama.cpp"}),
        (checkpoint(Scheme(8, None, True)), {"quantkit", "vLLM", "SGLang", "transformers"}),
        (checkpoint(Scheme(8, None, True, activations="int8")),
         {"quantkit", "vLLM", "SGLang", "transformers", "llama.cpp"}),
        (checkpoint(Scheme(8, 128, False)), {"quantkit", "vLLM", "transformers", "llama.cpp"}),
        (checkpoint(Scheme(3, 128, True)), {"quantkit", "vLLM", "transformers", "llama.cpp"}),
        (checkpoint(W4, down_proj=Scheme(8, 128, True)), {"quantkit", "vLLM", "SGLang", "transformers"}),
        (checkpoint(W4, v_proj=Scheme(8, 128, True)), {"quantkit", "transformers"}),
        (checkpoint(W4, head=W4), {"quantkit", "vLLM", "SGLang", "transformers", "llama.cpp"}),
        (checkpoint(W4, embedding=W4), {"quantkit", "transformers", "llama.cpp"}),
        (dataclasses.replace(checkpoint(W4, embedding=W4), family="qwen3"),
         {"quantkit", "vLLM", "transformers", "llama.cpp"}),
        (checkpoint(W4, embedding=W4A, head=W4), {"quantkit"}),
        (dataclasses.replace(checkpoint(W4, embedding=Scheme(8, 128, True)), family="qwen3"), {"quantkit", "vLLM"}),
        (checkpoint(W4A, down_proj=Scheme(8, 128, True)), {"quantkit", "vLLM", "SGLang"}),
        (checkpoint(W4A, down_proj=Scheme(4, 64, False)), {"quantkit", "vLLM", "SGLang"}),
        (checkpoint(W4A, down_proj=Scheme(4, None, False)), {"quantkit", "vLLM", "SGLang", "transformers"}),
        (checkpoint(W4, down_proj=Scheme(4, 64, True)), {"quantkit", "vLLM", "SGLang", "transformers"}),
        (checkpoint(W4, "gptq"), EVERY),
        (checkpoint(W4A, "gptq"), {"quantkit", "transformers", "GPTQModel", "llama.cpp"}),
        (checkpoint(Scheme(3, 128, True), "gptq"), {"quantkit", "transformers", "GPTQModel"}),
        (checkpoint(Scheme(8, 128, True), "gptq"), EVERY - {"lmdeploy"}),
        (checkpoint(W4A, "awq"), EVERY - {"llama.cpp"}),
        (checkpoint(Scheme(4, 64, False), "awq"), EVERY - {"llama.cpp", "lmdeploy"}),
        (
            checkpoint(Scheme(4, 64), hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64),
            {"quantkit", "vLLM", "transformers", "llama.cpp"},
        ),
    ],
)  # fmt: skip
def test_which_engines_load_it(given: Checkpoint, wanted: set[str]) -> None:
    found = loads(given)
    assert found == wanted, {name: verdict.line() for name, verdict in verdicts(given).items()}


def mixture(scheme: Scheme, family: str, form: str = "compressed-tensors", **changes: Scheme) -> Checkpoint:
    """The dense block with an expert's linears in place of its mlp. changes: by last name."""
    given = checkpoint(scheme, form, **changes)
    weights = [dataclasses.replace(w, name=w.name.replace(".mlp.", ".mlp.experts.3.")) for w in given.weights]
    return dataclasses.replace(given, weights=weights, family=family, mixture=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (mixture(W4, "qwen3_moe"), {"quantkit", "transformers"}),
        (mixture(W4, "mixtral"), {"quantkit", "transformers"}),
        (mixture(W4A, "mixtral"), {"quantkit"}),
        (mixture(W4, "gpt_oss"), {"quantkit"}),
        (mixture(W4, "another_moe"), {"quantkit"}),
        (mixture(W4, "qwen3_moe", down_proj=Scheme(8, 128, True)), {"quantkit"}),
        (mixture(W4, "qwen3_moe", "gptq"), {"quantkit"}),
        (mixture(W4A, "mixtral", "awq"), {"quantkit"}),
        (mixture(W4, "mixtral", "native"), {"quantkit"}),
        # experts that stay at 16 bit
        (dataclasses.replace(checkpoint(W4), family="mixtral", mixture=True), {"quantkit"}),
    ],
)
def test_mixtures_of_experts_load_only_where_that_was_shown(given: Checkpoint, wanted: set[str]) -> None:
    assert loads(given) == wanted


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("vLLM", mixture(W4A, "qwen3_moe"), "Only symmetric quantization is supported for MoE"),
        ("SGLang", mixture(W4A, "qwen3_moe"), "Only symmetric quantization is supported for MoE"),
        ("vLLM", mixture(W4, "gpt_oss"), "No. Not shown to load mixtures of experts in this format"),
        ("transformers", mixture(W4A, "mixtral"), "Asymmetric quant requires zero-point values"),
        ("transformers", mixture(W4, "gpt_oss"), "they stay random"),
        ("lmdeploy", mixture(W4, "qwen3_moe"), "Not shown"),
    ],
)
def test_why_a_mixture_does_not_load(engine: str, given: Checkpoint, said: str) -> None:
    assert said.lower() in verdicts(given)[engine].line().lower()


@pytest.mark.parametrize(
    ("given", "vllm", "sglang"),
    [
        # 11008 = 86 * 128: 86 groups split on 2 ranks; Marlin's tiles are whole there too
        (checkpoint(W4), 2, 2),
        (checkpoint(Scheme(4, 32, True)), 8, 2),
        (checkpoint(W4, inner=14336), 16, 16),
        # one scale per channel splits anywhere; SGLang does not pad 14336 / 32 = 448 inputs to a tile
        (checkpoint(Scheme(8, None, True), inner=14336), 32, 16),
        (checkpoint(W4, inner=16384, heads=24, kv_heads=8, hidden=3072), 8, 8),
        (checkpoint(W4, inner=14336, heads=32, kv_heads=32), 16, 16),
        (checkpoint(W4, inner=16384, heads=7, kv_heads=1, hidden=896), 1, 1),
    ],
)
def test_how_far_it_splits(given: Checkpoint, vllm: int, sglang: int) -> None:
    found = verdicts(given)
    assert (found["vLLM"].tensor_parallel, found["SGLang"].tensor_parallel) == (vllm, sglang), [
        v.reason for v in found.values()
    ]


def test_the_reason_names_the_weight_and_what_stops_the_next_size() -> None:
    found = verdicts(checkpoint(W4))["vLLM"]
    assert (
        found.reason
        == "4 ranks: model.layers.0.mlp.down_proj: 2752 inputs a rank are no multiple of its groups of 128."
    )
    assert found.reader.endswith("marlin.py:58")


def test_bfloat16_scales_are_named_where_engines_cast_them() -> None:
    plain, cast = checkpoint(W4), dataclasses.replace(checkpoint(W4), bfloat16=True)
    assert verdicts(plain)["vLLM"].notes == ()
    assert "casts scales to bf16" in verdicts(cast)["vLLM"].notes[0]
    chosen = dataclasses.replace(checkpoint(Scheme(4, 128, True, "bfloat16")), bfloat16=True)
    assert verdicts(chosen)["vLLM"].notes == ()


def test_every_rule_quotes_its_reader() -> None:
    for engine in ENGINES:
        readers = [engine.unknown, *(rule.reader for rule in engine.rules), *(reader for reader, _ in engine.splits)]
        assert all(re.search(r"\.(py|cu)(:\d|, |: | \(|$)", reader) for reader in readers), engine.name


def test_the_line_for_people_is_one_line(tmp_path: Path) -> None:
    for verdict in lint(checkpoint(Scheme(8, 128, False))):
        assert "\n" not in verdict.line()
        assert verdict.line().startswith(f"{verdict.engine} {verdict.version}: {'yes' if verdict.loads else 'no'}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (checkpoint(W4, "native"), "vLLM 0.33.0: no. Does not read"),
        (checkpoint(W4, embedding=W4A), "vLLM 0.33.0: no. model.embed_tokens is asymmetric"),
        (checkpoint(W4, v_proj=Scheme(8, 128, True)), "lmdeploy 0.18.0: no. 2 schemes"),
    ],
)
def test_a_reason_is_a_sentence_and_names_stay_as_they_are(given: Checkpoint, said: str) -> None:
    assert any(verdict.line().startswith(said) for verdict in lint(given))


def test_an_engine_that_alone_does_not_know_a_format_has_a_line_like_the_others() -> None:
    lines = verdict_lines(lint(checkpoint(Scheme(4, 128, True))))
    assert any(
        line.startswith("  loads in  GPTQModel ") and "no. Does not read the format compressed-tensors" in line
        for line in lines
    )
    assert not any("none of" in line for line in lines)


def test_engines_that_do_not_know_a_format_share_a_line() -> None:
    lines = verdict_lines(lint(mixture(Scheme(4, 64, False), "mixtral", "native")))
    assert len(lines) == 5
    assert "they do not read the format native" in lines[3]
    assert lines[4].startswith("  loads in  nothing but quantkit")
    assert not any("nothing but" in line for line in verdict_lines(lint(checkpoint(Scheme(4, 128, True)))))


def test_engines_that_do_not_read_the_format_share_a_line_whatever_their_reasons_say() -> None:
    refusing = [Verdict(name, "1", False, None, "any words.", "", unread_format="native") for name in ("A", "B")]
    speaking = Verdict("C", "1", False, None, "does not read the format of this head.", "")
    shared = "  loads in  none of A 1, B 1: they do not read the format native."
    assert unread_format_lines([*refusing, speaking]) == [shared]
    assert "  loads in  C 1: no. Does not read the format of this head." in verdict_lines([*refusing, speaking])


W8, INT8 = Scheme(8, 128, True), Scheme(8, None, True, activations="int8")


@pytest.mark.parametrize(
    ("given", "on"),
    [
        (checkpoint(W4), ("on an NVIDIA GPU or a CPU",)),
        (checkpoint(W4A), ("on an NVIDIA GPU or a CPU",)),
        (checkpoint(INT8), ("on an NVIDIA GPU or a CPU",)),
        (checkpoint(W4, "gptq"), ("on an NVIDIA GPU or a CPU",)),
        (checkpoint(W4A, "awq"), ("on an NVIDIA GPU or a CPU",)),
        (checkpoint(W8), ("on an NVIDIA GPU", "on a CPU no: 4 bits only, or int8 with int8 activations")),
        (checkpoint(W8, "gptq"), ("on an NVIDIA GPU", "on a CPU no: 4 bits only, or int8 with int8 activations")),
        (checkpoint(Scheme(4, 16, True)), ("on a CPU", "on an NVIDIA GPU no: ")),
        (checkpoint(Scheme(8, 16, True)), ()),
        (checkpoint(W4, down_proj=INT8), ("on an NVIDIA GPU or a CPU",)),
        (
            dataclasses.replace(checkpoint(W4, embedding=W4), family="qwen3"),
            ("on an NVIDIA GPU", "on a CPU no: quantized embeddings are looked up by a Triton kernel"),
        ),
        (
            checkpoint(Scheme(4, 16 * 3), hidden=48, inner=96, heads=1, kv_heads=1, head_dim=48),
            (),
        ),
        (checkpoint(Scheme(4, None), inner=11000, kv_heads=8), ("on an NVIDIA GPU", "on a CPU no: ")),
    ],
)
def test_where_vllm_loads_it(given: Checkpoint, on: tuple[str, ...]) -> None:
    found = verdicts(given)["vLLM"].devices
    assert len(found) == len(on)
    assert all(device.startswith(wanted) for device, wanted in zip(found, on, strict=True))
    line = verdicts(given)["vLLM"].line()
    assert all(device in line for device in found)


def test_the_package_of_kernels_is_named_where_marlin_has_none() -> None:
    for scheme, words in (
        (Scheme(3, 128, True), "3 bits by humming-kernels"),
        (Scheme(8, 128, False), "8 bits with zero points by humming-kernels"),
    ):
        assert words in verdicts(checkpoint(scheme))["vLLM"].line()
    assert "humming" not in verdicts(checkpoint(W8))["vLLM"].line()


def test_each_engine_that_loads_says_how() -> None:
    given = dataclasses.replace(checkpoint(W4A), folder="my models/out", fp8_cache=True)
    found = {name: verdict.command for name, verdict in verdicts(given).items()}
    assert found["vLLM"] == "vllm serve 'my models/out' --kv-cache-dtype fp8"
    assert found["SGLang"] == "sglang serve --model-path 'my models/out' --kv-cache-dtype fp8_e4m3"
    assert found["transformers"] == "transformers.AutoModelForCausalLM.from_pretrained('my models/out')"
    assert found["llama.cpp (convert_hf_to_gguf)"] == (
        "python convert_hf_to_gguf.py 'my models/out' --outfile 'my models/out.gguf'"
        " && llama-server -m 'my models/out.gguf'"
    )
    assert found["GPTQModel"] is None
    assert verdicts(checkpoint(W4A))["vLLM"].command == "vllm serve OUT"
    native = verdicts(checkpoint(W4, "native"))["transformers"].command
    assert native == "import quantkit.hf; transformers.AutoModelForCausalLM.from_pretrained('OUT')"
    lines = verdict_lines(lint(given))
    where = next(i for i, line in enumerate(lines) if line.startswith("  loads in  vLLM"))
    assert lines[where + 1] == f"    with    {found['vLLM']}"


def test_a_gguf_file_is_served_by_llama_server() -> None:
    given = dataclasses.replace(checkpoint(W4, "gguf"), family="llama", folder="out/model-Q4_K_M.gguf")
    assert verdicts(given)["llama.cpp"].command == "llama-server -m out/model-Q4_K_M.gguf"


@pytest.mark.parametrize("name", ["attn.c_attn", "linear_attn.in_proj_qkvz", "mamba.in_proj"])
def test_layers_that_no_engine_was_read_for_are_not_promised(name: str) -> None:
    given = checkpoint(W4)
    more = Target(f"model.layers.1.{name}", f"model.layers.1.{name}.weight", 4096, 4096, W4)
    assert loads(dataclasses.replace(given, weights=[*given.weights, more])) == {"quantkit"}
    native = dataclasses.replace(checkpoint(W4, "native"), weights=[*given.weights, more])
    assert loads(native) == ({"quantkit"} if "c_attn" in name else {"quantkit", "transformers"})


def test_transformers_needs_to_be_asked_to_dequantize_zero_points() -> None:
    """llm-compressor's own folders do not ask; ours do."""
    for scheme, loads in ((W4A, False), (W4, True)):
        found = verdicts(dataclasses.replace(checkpoint(scheme), dequantized=False))["transformers"]
        assert found.loads is loads
        assert verdicts(checkpoint(scheme))["transformers"].loads
    assert "dequantize" in verdicts(dataclasses.replace(checkpoint(W4A), dequantized=False))["transformers"].reason
