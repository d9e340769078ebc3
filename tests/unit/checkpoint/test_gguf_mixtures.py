"""GGUF files of mixtures of experts, written as llama.cpp's converter writes them, read one expert at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from architectures import tiny_model

from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.errors import SourceError, UnsupportedModel

Write = Callable[..., Path]
Tensors = dict[str, tuple[np.ndarray, str]]
HIDDEN, INNER, EXPERTS, LAYERS, HEADS, DIM, VOCAB = 64, 32, 4, 2, 4, 16, 50
YARN = dict(
    rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=16.0, beta_slow=2.0, truncate=False,
    original_max_position_embeddings=16,
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
    head_dim=DIM, num_experts_per_tok=2, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": dict(
        name="qwen3_moe", num_experts=EXPERTS, moe_intermediate_size=INNER, intermediate_size=96, mlp_only_layers=[],
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "gpt-oss": dict(
        name="gpt_oss", num_local_experts=EXPERTS, intermediate_size=INNER, sliding_window=4, rope_parameters=YARN,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
PLACES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
}  # fmt: skip
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IDS = torch.arange(5, 45)[None] % VOCAB


def metadata(arch: str) -> dict[str, Any]:
    said = {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": 96,
        "attention.head_count": HEADS, "attention.head_count_kv": 2, "attention.key_length": DIM,
        "attention.value_length": DIM, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e6,
        "rope.dimension_count": DIM, "expert_count": EXPERTS, "expert_used_count": 2,
        "expert_feed_forward_length": INNER,
    }  # fmt: skip
    if arch == "gpt-oss":
        said |= {
            "feed_forward_length": INNER, "attention.sliding_window": 4, "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
        }  # fmt: skip
    return {f"{arch}.{key}": value for key, value in said.items()}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    made = {}
    for arch, changes in MODELS.items():
        given = {**SIZES, **copy.deepcopy(changes)}
        model = tiny_model(given.pop("name"), **given)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        made[arch] = model
    return made


def stored(arch: str, model: Any) -> dict[str, np.ndarray]:
    """The tensors as conversion/gpt_oss.py and conversion/qwen.py of llama.cpp name and lay them out."""
    after = "post_attention_norm" if arch == "gpt-oss" else "ffn_norm"
    places = PLACES | {"post_attention_layernorm": after}
    found = {}
    for name, value in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if stem in OUTER:
            found[f"{OUTER[stem]}.{suffix}"] = value
            continue
        block = f"blk.{name.split('.')[2]}"
        local = name.split(".", 3)[3]
        if local == "self_attn.sinks":
            found[f"{block}.attn_sinks.weight"] = value
        elif ".experts." in local:
            part, bias = local.rpartition(".")[2].removesuffix("_bias"), local.endswith("_bias")
            kind = "bias" if bias else "weight"
            if arch == "gpt-oss":
                value = value if bias else value.transpose(1, 2)
                halves = (value[:, ::2], value[:, 1::2])
            else:
                halves = (value[:, :INNER], value[:, INNER:])
            names = ("ffn_gate_exps", "ffn_up_exps") if part == "gate_up_proj" else ("ffn_down_exps",)
            for stack, each in zip(names, halves if len(names) == 2 else (value,), strict=True):
                found[f"{block}.{stack}.{kind}"] = each
        else:
            found[f"{block}.{places[local.rpartition('.')[0]]}.{suffix}"] = value
    return {name: value.contiguous().numpy() for name, value in found.items()}


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.BF16)


def file_of(arch: str, model: Any, write: Write, **changes: Any) -> Path:
    """A BF16 file; changes: metadata (after the architecture), None takes a field out."""
    tensors: Tensors = {
        name: (as_bfloat16(value), "BF16") if value.ndim > 1 and "gate_inp" not in name and "bias" not in name
        else (value, "F32")
        for name, value in stored(arch, model).items()
    }  # fmt: skip
    given = metadata(arch) | {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return write(arch, {key: value for key, value in given.items() if value is not None}, tensors)


def rebuilt(source: GGUFSource) -> Any:
    """The model that transformers builds, with the file's weights: experts fused by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.float32).eval()
    left = set(source.names())
    state = {}

    def take(name: str) -> torch.Tensor:
        left.discard(name)
        return source.read(name).float()

    for name in model.state_dict():
        if ".experts." not in name:
            state[name] = take(name)
            continue
        owner, _, part = name.rpartition(".")
        kind, part = ("bias", part[:-5]) if part.endswith("_bias") else ("weight", part)
        projections = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        each = []
        for index in range(EXPERTS):
            halves = [take(f"{owner}.{index}.{projection}.{kind}") for projection in projections]
            if source.config["model_type"] == "gpt_oss":
                both = torch.stack(halves, 1).flatten(0, 1)
                each.append(both.t() if kind == "weight" else both)
            else:
                each.append(torch.cat(halves))
        state[name] = torch.stack(each)
    model.load_state_dict(state)
    assert not left
    return model


@pytest.mark.parametrize("arch", MODELS)
def test_a_bfloat16_file_is_the_original_bit_by_bit(arch: str, models: dict[str, Any], write_gguf: Write) -> None:
    source = GGUFSource(file_of(arch, models[arch], write_gguf))
    assert {source.info(name).dtype for name in source.names()} == {torch.bfloat16}
    again, original = rebuilt(source), models[arch]
    for (name, one), (_, other) in zip(again.state_dict().items(), original.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, original(IDS).logits)


@pytest.mark.parametrize("arch", MODELS)
def test_the_config_is_the_originals(arch: str, models: dict[str, Any], write_gguf: Write) -> None:
    from transformers import AutoConfig

    ours = AutoConfig.for_model(**GGUFSource(file_of(arch, models[arch], write_gguf)).config).to_dict()
    theirs = models[arch].config.to_dict()
    for key in ("architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"):  # nothing about structure
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs


def test_gpt_oss_without_stretched_positions_is_not_stretched(models: dict[str, Any], write_gguf: Write) -> None:
    from transformers import AutoConfig

    path = file_of("gpt-oss", models["gpt-oss"], write_gguf, rope__scaling__type=None)
    config = AutoConfig.for_model(**GGUFSource(path).config)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 150000.0}


def packed(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks of a type, of numbers that float16 holds."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(116, 124, raw.shape[:-1])
    else:
        scales = rng.uniform(1e-4, 1e-2, (*raw.shape[:-1], 1)).astype(np.float16).view(np.uint8)
        for start in (0, 2) if kind == "Q4_K" else (0,):
            raw[..., start : start + 2] = scales
    return raw.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0", "Q4_K"])
def test_an_expert_is_what_the_library_dequantizes(
    kind: str, models: dict[str, Any], write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, hidden = (256, HIDDEN) if kind == "Q4_K" else (INNER, HIDDEN)
    tensors: Tensors = {name: (value, "F32") for name, value in stored("gpt-oss", models["gpt-oss"]).items()}
    for name, (value, _) in list(tensors.items()):
        if "_exps.bias" in name and "down" not in name:
            tensors[name] = (np.zeros((EXPERTS, inner)), "F32")
        if "_exps.weight" in name:
            shape = (EXPERTS, hidden, inner) if "down" in name else (EXPERTS, inner, hidden)
            tensors[name] = (
                (packed(kind, shape), kind) if "down" in name or kind != "Q4_K" else (np.zeros(shape), "F32")
            )
            assert value.ndim == 3
    source = GGUFSource(write_gguf("gpt-oss", metadata("gpt-oss") | {"gpt-oss.expert_feed_forward_length": inner},
                                   tensors))  # fmt: skip
    whole = gguf.quants.dequantize(tensors["blk.1.ffn_down_exps.weight"][0], gguf.GGMLQuantizationType[kind])
    read = []
    fromfile = np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *given, **more: read.append(given[2]) or fromfile(*given, **more))
    for index in range(EXPERTS):
        name = f"model.layers.1.mlp.experts.{index}.down_proj.weight"
        dtype = source.info(name).dtype
        assert dtype == (torch.bfloat16 if kind == "MXFP4" else torch.float16)
        assert torch.equal(source.read(name), torch.from_numpy(whole[index]).to(dtype))
        assert torch.equal(source.read_as(name, torch.float32)[0], torch.from_numpy(whole[index]))
    one = tensors["blk.1.ffn_down_exps.weight"][0].nbytes // EXPERTS
    assert sum(read) == 2 * EXPERTS * one  # never the whole stack
    if kind == "MXFP4":
        name = "model.layers.1.mlp.experts.3.down_proj.weight"
        assert torch.equal(source.read(name).float(), source.read_as(name, torch.float32)[0])


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("qwen3moe", dict(expert_weights_norm=False), "expert_weights_norm is False"),
        ("qwen3moe", dict(expert_weights_scale=2.5), r"expert_weights_scale is 2\.5"),
        ("qwen3moe", dict(expert_shared_count=1), "expert_shared_count is 1"),
        ("qwen3moe", dict(expert_gating_func=2), "expert_gating_func is 2"),
        ("qwen3moe", dict(leading_dense_block_count=1), "leading_dense_block_count is 1"),
        ("gpt-oss", dict(attention__sliding_window_pattern=3), "sliding_window_pattern is 3"),
        ("gpt-oss", dict(rope__freq_base_swa=1e4), "freq_base_swa"),
        ("gpt-oss", dict(rope__dimension_count=8), "dimension_count is 8"),
        ("gpt-oss", dict(rope__scaling__yarn_attn_factor=1.5), "YaRN with yarn_attn_factor"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
def test_a_variant_that_llama_cpp_would_not_compute_is_refused_by_field(
    arch: str, changes: dict[str, Any], words: str, models: dict[str, Any], write_gguf: Write
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        GGUFSource(file_of(arch, models[arch], write_gguf, **changes))


def test_mixtures_inside_other_architectures_are_refused_by_name(
    write_gguf: Write, llama_metadata: dict[str, Any]
) -> None:
    tensors = {"token_embd.weight": (np.zeros((3, 64)), "F32")}
    with pytest.raises(UnsupportedModel, match=r"8 experts in architecture 'llama'.*qwen3moe and gpt-oss are read"):
        GGUFSource(write_gguf("llama", llama_metadata | {"llama.expert_count": 8}, tensors))
    for arch in ("qwen2moe", "deepseek2"):
        with pytest.raises(UnsupportedModel, match=f"'{arch}' is not read"):
            GGUFSource(write_gguf(arch, {f"{arch}.expert_count": 8}, tensors))


def test_a_stack_beside_the_table_is_refused_by_name(models: dict[str, Any], write_gguf: Write) -> None:
    tensors: Tensors = {name: (value, "F32") for name, value in stored("qwen3moe", models["qwen3moe"]).items()}
    for name in ("blk.0.ffn_gate_exps.bias", "blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_up_shexp.weight"):
        with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
            GGUFSource(write_gguf("qwen3moe", metadata("qwen3moe"), {**tensors, name: (np.zeros((4, 32)), "F32")}))


def test_attention_with_some_biases_is_refused(models: dict[str, Any], write_gguf: Write) -> None:
    tensors: Tensors = {name: (value, "F32") for name, value in stored("gpt-oss", models["gpt-oss"]).items()}
    del tensors["blk.0.attn_k.bias"]
    with pytest.raises(UnsupportedModel, match="bias on attn_q, attn_v, attn_output only"):
        GGUFSource(write_gguf("gpt-oss", metadata("gpt-oss"), tensors))


def test_an_expert_beyond_the_last_is_unknown(models: dict[str, Any], write_gguf: Write) -> None:
    source = GGUFSource(file_of("qwen3moe", models["qwen3moe"], write_gguf))
    with pytest.raises(SourceError, match="no tensor named"):
        source.read(f"model.layers.0.mlp.experts.{EXPERTS}.up_proj.weight")
