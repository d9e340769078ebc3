"""GGUF files read as Hugging Face models: values, names, row orders, configs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from quantkit.checkpoint.gguf_files import source as source_module
from quantkit.checkpoint.gguf_files.source import GGUFSource
from quantkit.checkpoint.open import open_source
from quantkit.errors import SourceError, UnsupportedModel

Write = Callable[..., Path]
QUANTIZED = ("Q8_0", "Q5_0", "Q4_1", "Q4_K", "Q6_K", "Q4_0", "Q5_1", "Q5_K")
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def llama_cpp_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The permutation that llama.cpp's convert_hf_to_gguf.py applies to q and k of a Llama."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def stored(model: torch.nn.Module, layer: dict[str, str], *, permute: bool, plus_one: bool) -> dict[str, Any]:
    """A transformers model's tensors as llama.cpp's converter stores them, in F32."""
    back = {hf: name for name, hf in layer.items()}
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, suffix = name.rsplit(".", 1)
        if plus_one and stem.endswith("norm"):
            value = value + 1
        if permute and stem.endswith("q_proj"):
            value = llama_cpp_rows(value, model.config.num_attention_heads)
        if permute and stem.endswith("k_proj"):
            value = llama_cpp_rows(value, model.config.num_key_value_heads)
        outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        if stem in outer:
            key = outer[stem]
        else:
            _, _, number, rest = stem.split(".", 3)
            key = f"blk.{number}.{back[rest]}"
        tensors[f"{key}.{suffix}"] = (value.numpy(), "F32")
    return tensors


def one_tensor(write: Write, metadata: dict[str, Any], values: np.ndarray, kind: str) -> GGUFSource:
    tensors = {"token_embd.weight": (np.zeros((3, 64)), "F32"), "blk.0.ffn_down.weight": (values, kind)}
    return GGUFSource(write("llama", metadata, tensors))


def random_blocks(kind: str, rows: int, width: int) -> np.ndarray:
    """Random bytes of a packed type, with scales that are ordinary float16 numbers."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    scale = rng.uniform(1e-4, 1e-2, (rows, width // block, 1)).astype(np.float16).view(np.uint8)
    at = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(kind, (0,))
    for start in at:
        packed[:, :, start : start + 2] = scale
    return packed.reshape(rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_values_are_the_librarys_in_float16(
    kind: str, write_gguf: Write, llama_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CHUNK_VALUES", 2 * 512)  # several pieces, the last one shorter
    packed = random_blocks(kind, 5, 512)
    source = one_tensor(write_gguf, llama_metadata, packed, kind)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    got = source.read("model.layers.0.mlp.down_proj.weight")
    assert got.dtype == source.info("model.layers.0.mlp.down_proj.weight").dtype == torch.float16
    assert torch.equal(got, torch.from_numpy(expected).half())


def test_q4_k_blocks_follow_their_definition(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    # An independent reading of one block: d, dmin, eight 6-bit scales and minima in 12 bytes, 128 bytes of nibbles.
    packed = random_blocks("Q4_K", 1, 256)
    block = packed[0]
    d, dmin = block[:4].view(np.float16).astype(np.float64)
    expected = []
    for j in range(8):
        if j < 4:
            scale, low = block[4 + j] & 63, block[8 + j] & 63
        else:
            scale = (block[8 + j] & 15) | ((block[j] >> 6) << 4)
            low = (block[8 + j] >> 4) | ((block[4 + j] >> 6) << 4)
        part = block[16 + 32 * (j // 2) : 48 + 32 * (j // 2)]
        code = (part & 15) if j % 2 == 0 else (part >> 4)
        expected += [d * int(scale) * int(q) - dmin * int(low) for q in code]
    source = one_tensor(write_gguf, llama_metadata, packed, "Q4_K")
    torch.testing.assert_close(
        source.read("model.layers.0.mlp.down_proj.weight")[0].double(), torch.tensor(expected), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float16), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_plain_values_keep_sixteen_bits(
    kind: str, dtype: torch.dtype, write_gguf: Write, llama_metadata: dict[str, Any]
) -> None:
    values = np.random.default_rng(0).standard_normal((4, 96)).astype(np.float32)
    source = one_tensor(write_gguf, llama_metadata, values, kind)
    got = source.read("model.layers.0.mlp.down_proj.weight")
    assert source.info("model.layers.0.mlp.down_proj.weight").dtype == got.dtype == dtype
    assert torch.equal(got, torch.from_numpy(values).to(dtype))


def test_value_too_large_for_float16_is_named(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    values = np.ones((4, 96), np.float32)
    values[2, 5] = -1e6
    source = one_tensor(write_gguf, llama_metadata, values, "F32")
    with pytest.raises(SourceError, match=r"down_proj.*1e\+06, more than float16"):
        source.read("model.layers.0.mlp.down_proj.weight")


@pytest.mark.parametrize("tied", [True, False])
def test_llama_computes_the_same_logits(tied: bool, write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # not model.half(): that rounds the rotary frequencies too
            parameter.copy_(parameter.half().float())
    path = write_gguf("llama", llama_metadata, stored(model, LAYER, permute=True, plus_one=False))
    source = open_source(path)
    assert source.config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in source.names()) is not tied
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.float32).eval()
    again.load_state_dict({name: source.read(name).float() for name in source.names()}, strict=not tied)
    again.tie_weights()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_gemma_norms_lose_the_stored_one(write_gguf: Write) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    layers = ["full_attention" if i == 5 else "sliding_attention" for i in range(7)]
    config = Gemma3TextConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=128, sliding_window=8, layer_types=layers,
        query_pre_attn_scalar=16,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.randint(-64, 64, parameter.shape) / 256 if "norm" in name else parameter.half().float()
            )
    layer = LAYER | {
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    metadata = {
        "gemma3.context_length": 128, "gemma3.embedding_length": 32, "gemma3.block_count": 7,
        "gemma3.feed_forward_length": 48, "gemma3.attention.head_count": 2, "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 16, "gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    source = GGUFSource(write_gguf("gemma3", metadata, stored(model, layer, permute=False, plus_one=True)))
    assert source.config["layer_types"] == layers
    again = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.float32).eval()
    again.load_state_dict({name: source.read(name).float() for name in source.names()}, strict=False)
    again.tie_weights()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize(("arch", "kind"), [("qwen2", "qwen2"), ("qwen3", "qwen3"), ("phi3", "phi3")])
def test_config_of_other_architectures(arch: str, kind: str, write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    from transformers import AutoConfig

    metadata = {key.replace("llama.", f"{arch}."): value for key, value in llama_metadata.items()}
    metadata[f"{arch}.attention.key_length"] = 32
    path = write_gguf(arch, metadata, {"token_embd.weight": (np.zeros((50, 64)), "F32")})
    config = AutoConfig.for_model(**GGUFSource(path).config)
    assert (config.model_type, config.vocab_size, config.num_key_value_heads) == (kind, 50, 2)
    assert config.rms_norm_eps == 1e-5  # not 9.999999747378752e-06
    assert arch != "qwen3" or config.head_dim == 32


def test_config_agrees_with_transformers_own_reader(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    from transformers import AutoConfig

    path = write_gguf("llama", llama_metadata, {"token_embd.weight": (np.zeros((3, 64)), "F32")})
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    ours = AutoConfig.for_model(**GGUFSource(path).config).to_dict()
    for key in ("_name_or_path", "architectures", "dtype", "unk_token_id", "use_cache"):  # nothing about structure
        theirs.pop(key, None), ours.pop(key, None)
    assert theirs.pop("rms_norm_eps") == pytest.approx(ours.pop("rms_norm_eps"))
    assert {key: ours.get(key) for key in theirs} == theirs


def test_llama3_rotary_factors_become_config_values(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=64, rope_theta=500000.0, rope_scaling=dict(scaling), max_position_embeddings=131072)
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    tensors = {"token_embd.weight": (np.zeros((3, 64)), "F32"), "rope_freqs.weight": (factors.numpy(), "F32")}
    metadata = llama_metadata | {"llama.rope.freq_base": 500000.0}
    source = GGUFSource(write_gguf("llama", metadata, tensors))
    assert source.config["rope_scaling"] == scaling
    assert source.names() == ["model.embed_tokens.weight"]
    tensors["rope_freqs.weight"] = (factors.numpy() + 1, "F32")
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        GGUFSource(write_gguf("llama", metadata, tensors))


def test_unknown_architecture_is_refused_by_name(write_gguf: Write) -> None:
    path = write_gguf("mamba", {"mamba.block_count": 1}, {"token_embd.weight": (np.zeros((3, 64)), "F32")})
    with pytest.raises(
        UnsupportedModel, match=r"'mamba' is not read; these are: gemma3, gpt-oss, granite, llama, olmo2,"
    ):
        GGUFSource(path)


def test_tensor_without_a_place_is_refused_by_name(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    tensors = {
        "token_embd.weight": (np.zeros((3, 64)), "F32"),
        "blk.0.ffn_gate_exps.weight": (np.zeros((2, 64)), "F32"),
    }
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_gate_exps\.weight"):
        GGUFSource(write_gguf("llama", llama_metadata, tensors))


@pytest.mark.parametrize("keep", [3, 30, 200, -200])
def test_truncated_file_is_an_error_at_opening(keep: int, write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    path = write_gguf("llama", llama_metadata, {"token_embd.weight": (np.zeros((3, 64)), "F32")})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"(?s)model\.gguf.*ownload"):
        GGUFSource(path)


def test_other_file_with_the_suffix_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"<html>not found</html>" * 10)
    with pytest.raises(SourceError, match="not a GGUF file"):
        GGUFSource(tmp_path / "x.gguf")


def test_digest_is_of_the_content(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    tensors = {"token_embd.weight": (np.zeros((3, 64)), "F32")}
    first = GGUFSource(write_gguf("llama", llama_metadata, tensors)).digest()
    assert first == GGUFSource(write_gguf("llama", llama_metadata, tensors, name="other.gguf")).digest()
    tensors["token_embd.weight"][0][0, 0] = 1
    assert first != GGUFSource(write_gguf("llama", llama_metadata, tensors)).digest()


def test_a_packing_that_the_library_cannot_undo_is_refused_by_name(
    write_gguf: Write, llama_metadata: dict[str, Any]
) -> None:
    packed = np.zeros((2, 2 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_1][1]), np.uint8)
    with pytest.raises(
        UnsupportedModel, match=r"tensor 'blk\.0\.ffn_down\.weight' is packed as Q8_1, which the gguf library"
    ):
        one_tensor(write_gguf, llama_metadata, packed, "Q8_1")


def test_unknown_tensor_name_is_an_error(write_gguf: Write, llama_metadata: dict[str, Any]) -> None:
    source = GGUFSource(write_gguf("llama", llama_metadata, {"token_embd.weight": (np.zeros((3, 64)), "F32")}))
    with pytest.raises(SourceError, match="no tensor named 'nope'"):
        source.read("nope")
