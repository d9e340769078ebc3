"""Which block format each tensor of a GGUF file gets: llama.cpp's choices."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantkit.convert.gguf.types import MIXES, NAMED, ModelFacts, mix_name, tensor_kind
from quantkit.errors import RequestError

# What llama-cpp-python 0.3.36 (llama_model_quantize, no importance matrix) made of three random llamas: by file the
# format of most matrices, and the names of those that have others.
GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "gguf_types.json").read_text())
# name -> layers, heads per key-value head, tied, rows
MODELS = {"wide": (16, 4, False, 256), "tied": (9, 1, True, 256), "odd": (9, 2, False, 96)}
LLAMA = ModelFacts(layers=32, values=32, experts=0, share=4, tied=False, informed=True, family="llama")
PARTS = {"attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096), "attn_output": (4096, 4096),
         "ffn_gate": (14336, 4096), "ffn_up": (14336, 4096), "ffn_down": (4096, 14336)}  # fmt: skip


def kinds(mix: str, facts: ModelFacts = LLAMA) -> dict[str, str]:
    names = {f"blk.{i}.{part}.weight": shape for i in range(facts.layers) for part, shape in PARTS.items()}
    names |= {"token_embd.weight": (32000, 4096), "blk.0.attn_norm.weight": (4096,)}
    if not facts.tied:
        names["output.weight"] = (32000, 4096)
    return {name: tensor_kind(mix, name, shape, facts).kind for name, shape in names.items()}


@pytest.mark.parametrize("case", GOLDEN)
def test_every_choice_is_the_one_llama_cpp_made(case: str) -> None:
    model, mix = case.split()
    layers, share, tied, width = MODELS[model]
    facts = ModelFacts(layers, layers, 0, share, tied, informed=False, family="llama")
    names = [f"blk.{i}.{part}" for i in range(layers) for part in PARTS] + ["token_embd"] + ["output"] * (not tied)
    made = {name: kind for kind, group in GOLDEN[case].items() if kind != "most" for name in group}
    for name in names:
        chosen = tensor_kind(mix, f"{name}.weight", (width, width), facts)
        assert chosen.kind == made.get(name, GOLDEN[case]["most"]), name


def test_q4_k_m_gives_more_bits_where_llama_cpp_does() -> None:
    found = kinds("q4_k_m")
    more = [i for i in range(32) if found[f"blk.{i}.attn_v.weight"] == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [i for i in range(32) if found[f"blk.{i}.ffn_down.weight"] == "Q6_K"] == more
    assert (found["output.weight"], found["token_embd.weight"], found["blk.5.attn_q.weight"]) == (
        "Q6_K",
        "Q4_K",
        "Q4_K",
    )
    assert found["blk.0.attn_norm.weight"] == "F32"


def test_a_tied_embedding_gets_what_the_head_would() -> None:
    assert kinds("q4_k_m", replace(LLAMA, tied=True))["token_embd.weight"] == "Q6_K"
    assert kinds("q8_0", replace(LLAMA, tied=True))["token_embd.weight"] == "Q8_0"
    assert kinds("q4_0", replace(LLAMA, tied=True))["token_embd.weight"] == "Q6_K"


def test_small_mixes_raise_what_suffers_most() -> None:
    assert Counter(kinds("q3_k_m").values()) == {"Q3_K": 129, "Q4_K": 92, "Q5_K": 4, "Q6_K": 1, "F32": 1}
    found = kinds("q2_k")
    assert [found[f"blk.9.{part}.weight"] for part in ("attn_v", "attn_output", "ffn_down", "ffn_up")] == [
        "Q4_K", "Q3_K", "Q3_K", "Q2_K",
    ]  # fmt: skip


def test_statistics_change_the_first_layers_of_simple_formats() -> None:
    assert kinds("q4_0")["blk.0.ffn_down.weight"] == "Q4_1"
    assert kinds("q4_0", replace(LLAMA, informed=False))["blk.0.ffn_down.weight"] == "Q4_0"
    assert kinds("iq4_nl", replace(LLAMA, informed=False))["blk.0.ffn_down.weight"] == "Q5_K"


@pytest.mark.parametrize(
    ("mix", "width", "kind", "words"),
    [
        ("q4_k_m", 576, "Q5_0", "Q5_0 instead of Q4_K: rows of 576 are no multiple of 256"),
        ("q5_k_m", 576, "Q5_1", "Q5_1 instead of Q5_K"), ("q6_k", 576, "Q8_0", "Q8_0 instead of Q6_K"),
        ("q3_k_s", 576, "Q4_0", "Q4_0 instead of Q3_K"), ("q2_k", 576, "Q4_0", "Q4_0 instead of Q2_K"),
        ("q4_k_m", 100, "F16", "no multiple of 32"), ("q4_0", 100, "F16", "no multiple of 32"),
        ("q4_0", 576, "Q4_0", None),
    ],
)  # fmt: skip
def test_rows_that_blocks_do_not_divide_fall_back_and_say_so(
    mix: str, width: int, kind: str, words: str | None
) -> None:
    chosen = tensor_kind(mix, "blk.9.ffn_up.weight", (64, width), LLAMA)
    assert chosen.kind == kind
    assert words in chosen.fallback if words and chosen.fallback else chosen.fallback is words


def test_experts_of_mxfp4_alone_are_mxfp4() -> None:
    facts = replace(LLAMA, experts=32)
    assert tensor_kind("mxfp4", "blk.0.ffn_up_exps.weight", (32, 64, 64), facts).kind == "MXFP4"
    assert tensor_kind("mxfp4", "blk.0.attn_q.weight", (64, 64), facts).kind == "Q8_0"
    assert tensor_kind("mxfp4", "blk.0.ffn_gate_inp.weight", (32, 64), facts).kind == "F32"


def test_names_are_taken_in_capitals_and_short_forms() -> None:
    assert [mix_name(name) for name in ("Q4_K_M", "q4-k-m", "Q4_K", "fp16")] == ["q4_k_m", "q4_k_m", "q4_k_m", "f16"]
    with pytest.raises(RequestError, match=r"--gguf-type q9: no such type\. Types: f32, "):
        mix_name("q9")


def test_file_types_are_those_of_the_library() -> None:
    import gguf

    for mix in NAMED:
        name = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}.get(mix, f"MOSTLY_{mix.upper()}")
        assert gguf.LlamaFileType[name] == MIXES[mix][0]
