"""GGUF files of mixtures that somebody made to do harm are refused by file and field, in 10 s and under 1 GB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hostile.limits import Limited

OPEN = "hostile.entries:opened_and_built"
WIDTH, INNER, LAYERS, HEADS, EXPERTS = 64, 32, 2, 4, 4
TOKENS = [*(chr(97 + n) for n in range(24)), "ab", "<s>"]
Shapes = dict[str, tuple[int, ...] | None]
METADATA: dict[str, Any] = {
    "context_length": 128, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": INNER,
    "attention.head_count": HEADS, "attention.head_count_kv": HEADS, "attention.key_length": 16,
    "rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5, "expert_count": EXPERTS,
    "expert_used_count": 2, "expert_feed_forward_length": INNER, "attention.sliding_window": 16,
}  # fmt: skip


def shapes(arch: str, layers: int = LAYERS) -> Shapes:
    part: Shapes = dict.fromkeys((f"attn_{name}.weight" for name in ("q", "k", "v", "output")), (WIDTH, WIDTH))
    part |= {"attn_norm.weight": (WIDTH,), "ffn_gate_inp.weight": (EXPERTS, WIDTH)}
    part |= dict.fromkeys(("ffn_gate_exps.weight", "ffn_up_exps.weight"), (EXPERTS, INNER, WIDTH))
    part |= {"ffn_down_exps.weight": (EXPERTS, WIDTH, INNER)}
    if arch == "qwen3moe":
        part |= {"ffn_norm.weight": (WIDTH,), "attn_q_norm.weight": (16,), "attn_k_norm.weight": (16,)}
    else:
        part |= dict.fromkeys((f"attn_{name}.bias" for name in ("q", "k", "v", "output")), (WIDTH,))
        part |= {"post_attention_norm.weight": (WIDTH,), "attn_sinks.weight": (HEADS,), "ffn_gate_inp.bias": (EXPERTS,)}
        part |= dict.fromkeys(("ffn_gate_exps.bias", "ffn_up_exps.bias"), (EXPERTS, INNER))
        part |= {"ffn_down_exps.bias": (EXPERTS, WIDTH)}
    outer: Shapes = dict.fromkeys(("token_embd.weight", "output.weight"), (len(TOKENS), WIDTH))
    outer |= {"output_norm.weight": (WIDTH,)}
    return outer | {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in part.items()}


def write(path: Path, arch: str, tensors: Shapes, **changes: Any) -> Path:
    """Write a file; tensors: None for one that is left out. changes: metadata, None for a field that is left out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**METADATA, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        if value is not None:
            {int: writer.add_uint32, float: writer.add_float32}[type(value)](f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * len(TOKENS))
    writer.add_eos_token_id(25)
    generator = np.random.default_rng(0)
    for name, shape in tensors.items():
        if shape is not None:
            writer.add_tensor(name, generator.normal(0, 0.1, shape).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_the_file_itself_is_read(arch: str, tmp_path: Path, limited: Limited) -> None:
    path = write(tmp_path / "model.gguf", arch, shapes(arch))
    outcome = limited(OPEN, str(path))
    assert (outcome.kind, outcome.value > LAYERS * 3 * EXPERTS) == ("passed", True), outcome


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expert_count", None), ("expert_count", 0), ("expert_count", 5), ("expert_count", 3),
        ("expert_count", 1 << 14), ("expert_count", 65537), ("expert_count", 2**31), ("expert_used_count", None),
        ("expert_used_count", 0),
        ("expert_used_count", 5), ("expert_feed_forward_length", None), ("expert_feed_forward_length", 0),
        ("expert_feed_forward_length", 64), ("expert_feed_forward_length", 2**31), ("embedding_length", 128),
        ("attention.sliding_window", None), ("attention.sliding_window", 0), ("block_count", 3),
    ],
)  # fmt: skip
def test_a_field_that_contradicts_the_stacks(field: str, value: Any, tmp_path: Path, limited: Limited) -> None:
    path = write(tmp_path / "model.gguf", "gpt-oss", shapes("gpt-oss"), **{field.replace(".", "__"): value})
    limited(OPEN, str(path)).refused(str(path), "lacks blk.2.ffn_gate_exps" if field == "block_count" else field)


def test_experts_behind_the_last_layer(tmp_path: Path, limited: Limited) -> None:
    path = write(tmp_path / "model.gguf", "qwen3moe", shapes("qwen3moe", layers=3))
    limited(OPEN, str(path)).refused(str(path), "blk.2.ffn_", "block_count")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.1.ffn_up_exps.weight", None), ("blk.1.ffn_up_exps.bias", None), ("blk.0.ffn_down_exps.weight", None),
        ("blk.0.ffn_gate_exps.weight", (EXPERTS * INNER, WIDTH)), ("blk.0.ffn_gate_exps.weight", (WIDTH,)),
        ("blk.0.ffn_gate_exps.weight", (1, EXPERTS, INNER, WIDTH)), ("blk.0.ffn_down_exps.weight", (3, WIDTH, INNER)),
        ("blk.0.ffn_down_exps.weight", (EXPERTS, INNER, WIDTH)), ("blk.1.ffn_down_exps.bias", (EXPERTS, INNER)),
        ("blk.1.ffn_gate_exps.bias", (EXPERTS * INNER,)), ("blk.0.ffn_gate_inp.weight", (EXPERTS + 1, WIDTH)),
        ("blk.0.ffn_gate_inp.bias", None), ("blk.1.attn_sinks.weight", (HEADS + 1,)), ("blk.1.attn_sinks.weight", None),
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_is_missing_or_of_another_shape(
    name: str, shape: tuple[int, ...] | None, tmp_path: Path, limited: Limited
) -> None:
    path = write(tmp_path / "model.gguf", "gpt-oss", {**shapes("gpt-oss"), name: shape})
    where = name if "exps" in name else {"ffn_gate_inp": "router", "attn_sinks": "sinks"}[name.split(".")[2]]
    limited(OPEN, str(path)).refused(str(path), where)


def test_more_experts_than_any_model_has(tmp_path: Path, limited: Limited) -> None:
    """Each would become modules of its own; they are counted before a name is made for one."""
    tensors = {name: shape for name, shape in shapes("qwen3moe", layers=5).items() if "_exps" not in name}
    for layer in range(5):
        tensors |= dict.fromkeys((f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")), (1 << 14, 1, 8))
        tensors[f"blk.{layer}.ffn_down_exps.weight"] = (1 << 14, 8, 1)
    changes = dict(expert_count=1 << 14, expert_feed_forward_length=1, block_count=5, embedding_length=8)
    path = write(tmp_path / "model.gguf", "qwen3moe", tensors, **changes)
    limited(OPEN, str(path)).refused(str(path), "5 layers of 16384 experts")
