"""Configs, indexes and shards that somebody made to do harm are refused in one line, in 10 s and under 1 GB."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile.limits import Limited
from safetensors.torch import load_file, save_file

OPEN = "hostile.entries:opened_and_built"
NAN, INF = float("nan"), float("inf")
# field, value that no model has
CONFIG: list[tuple[str, Any]] = [
    ("num_hidden_layers", 10**9), ("num_hidden_layers", 1000), ("num_hidden_layers", -1), ("num_hidden_layers", 2.5),
    ("num_labels", 2**31), ("vocab_size", 2**40), ("vocab_size", -5), ("vocab_size", "many"), ("hidden_size", 2**31),
    ("hidden_size", [64]), ("hidden_size", {}), ("hidden_size", True), ("hidden_size", 10**20),
    ("num_attention_heads", 0),
    ("intermediate_size", 2**60), ("head_dim", 0), ("max_position_embeddings", 2**40), ("num_local_experts", 10**9),
    ("rms_norm_eps", INF), ("rms_norm_eps", NAN), ("rms_norm_eps", -1e-6), ("rms_norm_eps", "small"),
    ("rms_norm_eps", 1e30), ("rope_theta", INF), ("rope_theta", 0), ("rope_theta", -1e4), ("rope_theta", [1e4]),
    ("rope_theta", 1e300), ("eos_token_id", NAN), ("eos_token_id", {"a": 1}), ("eos_token_id", [[1]]),
    ("eos_token_id", "two"), ("pad_token_id", 1e300), ("attention_dropout", 7), ("tie_word_embeddings", "yes"),
    ("layer_types", "full"), ("layer_types", [1, 2, 3]), ("architectures", [{}]), ("model_type", ["llama"]),
    ("hidden_act", {}), ("logits_scaling", 0), ("initializer_range", INF), ("is_causal", False), ("sliding_window", 0),
    ("sliding_window", -5), ("rms_norm_eps", 0.9), ("decoder_layers", 10**9), ("rotary_dim", 10**6),
    ("rope_theta", 1), ("rope_theta", 9.5), ("tie_word_embeddings", None),
]  # fmt: skip
ROPE: list[tuple[str, Any]] = [
    ("factor", INF), ("factor", 0), ("factor", -2), ("factor", "x"), ("factor", [1]), ("low_freq_factor", NAN),
    ("short_factor", "abc"), ("long_factor", [NAN]), ("long_factor", [0.0]),
    ("original_max_position_embeddings", 2**40),
    ("original_max_position_embeddings", 0), ("beta_fast", -INF), ("rope_type", 5), ("factor", 1e-4),
    ("attention_factor", 1e6), ("attention_factor", 1e-4),
]  # fmt: skip


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("field", "value"), CONFIG)
def test_a_field_that_no_model_has(field: str, value: Any, tiny_model: Path, limited: Limited) -> None:
    edit(tiny_model / "config.json", **{field: value})
    limited(OPEN, str(tiny_model)).refused(str(tiny_model), field)


@pytest.mark.parametrize(("field", "value"), ROPE)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_that_no_model_has(key: str, field: str, value: Any, tiny_model: Path, limited: Limited) -> None:
    edit(tiny_model / "config.json", **{key: {"rope_type": "llama3", "factor": 2.0, field: value}})
    limited(OPEN, str(tiny_model)).refused(str(tiny_model), field)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, '{"a": ' + "9" * 5000 + "}", '{"a": 1e999}', '{"a": NaN}',
        '{"a": "\\ud800"}', '{"vocab_size": 1, "vocab_size": 2}', "", "null", "[]", "3", '"x"', "{", "\x00", "\ufeff{}",
        '{"a": [' + "[]," * 1_100_000 + "0]}",
    ],
    ids=lambda text: repr(text[:24]),
)  # fmt: skip
def test_json_that_is_none(file: str, text: str, tiny_model: Path, limited: Limited) -> None:
    (tiny_model / file).write_text(text)
    limited(OPEN, str(tiny_model)).refused(str(tiny_model / file))


def test_values_that_models_do_have(tiny_model: Path, limited: Limited) -> None:
    """What stands in configs of the hub and looks odd is read."""
    edit(
        tiny_model / "config.json",
        time_step_limit=[0.0, INF],
        pad_token_id=-1,
        eos_token_id=[1, 2],
        sliding_window=None,
    )
    outcome = limited(OPEN, str(tiny_model))
    assert outcome.kind == "passed", outcome


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../b", "..", "", "a\\b", "a\0b"])
def test_an_index_that_leads_out_of_the_folder(name: str, tiny_model: Path, limited: Limited) -> None:
    (tiny_model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    limited(OPEN, str(tiny_model)).refused("model.safetensors.index.json", "weight_map")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {}}])
def test_an_index_of_another_form(index: Any, tiny_model: Path, limited: Limited) -> None:
    (tiny_model / "model.safetensors.index.json").write_text(json.dumps(index))
    limited(OPEN, str(tiny_model)).refused("model.safetensors.index.json", "weight_map")


def rewrite(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of the shard, and keep its data."""
    file = model / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


NORM = "model.norm.weight"
HEADERS: list[tuple[Callable[[dict[str, Any]], Any], list[str]]] = [
    (lambda h: h[NORM].update(dtype="F4"), [NORM, "dtype", "F4"]),
    (lambda h: h[NORM].update(dtype=["F16"]), [NORM, "dtype"]),
    (lambda h: h[NORM].update(shape=[0]), [NORM, "shape"]),
    (lambda h: h[NORM].update(shape=[-64]), [NORM, "shape"]),
    (lambda h: h[NORM].update(shape=[2**62, 2**62]), [NORM, "shape"]),
    (lambda h: h[NORM].update(shape="64"), [NORM, "shape"]),
    (lambda h: h[NORM].update(shape=[1] * 70 + [64]), [NORM]),
    (lambda h: h[NORM].update(data_offsets=[0, 128]), ["overlaps"]),
    (lambda h: h[NORM].update(data_offsets=[0]), [NORM, "data_offsets"]),
    (lambda h: h[NORM].update(data_offsets=[128, 0]), [NORM, "data_offsets"]),
    (lambda h: h[NORM].update(data_offsets={}), [NORM, "data_offsets"]),
    (lambda h: h[NORM].pop("shape"), [NORM, "shape"]),
    (lambda h: h.update({NORM: 5}), [NORM]),
    (lambda h: [h], ["header"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), HEADERS, ids=range(len(HEADERS)))
def test_a_header_that_contradicts_itself(
    change: Callable[[dict[str, Any]], Any], words: list[str], tiny_model: Path, limited: Limited
) -> None:
    def changed(header: dict[str, Any]) -> Any:
        result = change(header)
        return result if isinstance(result, list) and isinstance(result[0], dict) else header

    rewrite(tiny_model, changed)
    limited(OPEN, str(tiny_model)).refused("model.safetensors", *words)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10**9, 100_000_001])
def test_a_header_length_that_lies(length: int, tiny_model: Path, limited: Limited) -> None:
    file = tiny_model / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    limited(OPEN, str(tiny_model)).refused("model.safetensors")


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, b"\0" * 8, struct.pack("<Q", 2) + b"{}"])
def test_a_shard_that_is_none(raw: bytes, tiny_model: Path, limited: Limited) -> None:
    (tiny_model / "model.safetensors").write_bytes(raw)
    limited(OPEN, str(tiny_model)).refused(str(tiny_model))


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -1.0, 1e38, 1e-45])
def test_scales_for_other_engines_that_no_cache_needs(value: float, tiny_model: Path, limited: Limited) -> None:
    name = "model.layers.0.self_attn.k_scale"
    file = tiny_model / "model.safetensors"
    save_file({**load_file(file), name: torch.tensor([value])}, file, metadata={"format": "pt"})
    limited(OPEN, str(tiny_model)).refused(str(tiny_model), name)


@pytest.mark.parametrize("value", [10**6, [1, 328], -1])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_of_the_answer_that_is_no_token(file: str, value: Any, tiny_model: Path, limited: Limited) -> None:
    if file == "config.json":
        (tiny_model / "generation_config.json").unlink()
    edit(tiny_model / "config.json", vocab_size=328)
    edit(tiny_model / file, eos_token_id=value)
    limited(OPEN, str(tiny_model)).refused(str(tiny_model / file), "eos_token_id")
