"""A GGUF file seen as a Hugging Face model: config rebuilt, tensors renamed, dequantized one at a time.

Names, row orders and offsets that llama.cpp's converter changed are changed back, by one explicit table per
architecture (below); an architecture or tensor that is not in the tables is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.gguf_header import Header, StoredTensor, gguf_library, read_header
from quantkit.checkpoint.source import TensorInfo
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import SourceError, UnsupportedModel

# Values dequantized at once: bounds the float32 scratch memory to tens of megabytes for any tensor.
CHUNK_VALUES = 1 << 22

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA = COMMON | {"ffn_norm": "post_attention_layernorm"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What llama.cpp's converter did to one architecture, and the config that undoes it."""

    model_type: str
    class_name: str
    layer_names: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    rotary_rows_interleaved: bool = False  # q/k rows stored as (pair, half) instead of (half, pair)
    norms_plus_one: bool = False  # norms stored as 1 + w


ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        LLAMA,
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        rotary_rows_interleaved=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA, {"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        LLAMA | QK_NORMS,
        {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        COMMON
        | QK_NORMS
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "rope_local_base_freq": 10000.0},
        norms_plus_one=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        {"hidden_act": "silu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    ),
}

# Tensors that are no parameters: Llama 3's rotary factors become config values, after a check that these say the same.
ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource:
    """One GGUF file as a Source.

    Tensors come out as float16 (bfloat16 where stored so), whatever they were packed in.
    """

    def __init__(self, path: Path) -> None:
        """Read the header only. Raises SourceError for a damaged file, UnsupportedModel for what the tables lack."""
        self.path = path
        self.header: Header = read_header(path)
        name = self.header.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise UnsupportedModel(
                f"{path}: GGUF architecture {name!r} is not read; these are: {', '.join(sorted(ARCHITECTURES))}. "
                "Use the model's Hugging Face folder instead."
            )
        self.architecture = ARCHITECTURES[name]
        self._stored = {self._hf_name(key): key for key in self.header.tensors if key != ROPE_FACTORS}
        self._check_kinds()
        self.config: dict[str, Any] = _config(name, self.architecture, self)

    def names(self) -> list[str]:
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        stored = self._entry(name)
        return TensorInfo(torch.bfloat16 if stored.kind == "BF16" else torch.float16, stored.shape)

    def read_entry(self, name: str, index: int) -> Tensor:
        return self.read(name)[index]

    def read(self, name: str) -> Tensor:
        """Read one tensor, dequantized in float32 and cast.

        Raises SourceError if a value does not fit float16.
        """
        stored = self._entry(name)
        dtype = self.info(name).dtype
        out = torch.empty(stored.shape, dtype=dtype)
        rows = out.view(-1, stored.shape[-1])
        shift = 1.0 if self.architecture.norms_plus_one and name.endswith("norm.weight") else 0.0
        for start, values in self._chunks(stored, len(rows)):
            part = values - shift if shift else values
            cast = part.to(dtype)
            if not torch.isfinite(cast).all() and torch.isfinite(part).all():
                largest = part.abs().max().item()
                raise SourceError(
                    f"{self.path}: tensor {name!r} holds {largest:.4g}, more than float16 can. "
                    "Use the model's BF16 or FP32 original instead of this GGUF file."
                )
            rows[start : start + len(cast)] = cast
        return self._rows_in_order(name, out)

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        with self.path.open("rb") as stream:
            while block := stream.read(1 << 20):
                raise_if_interrupted()
                digest.update(block)
        return digest.hexdigest()

    def kinds(self) -> list[str]:
        return [f"GGUF {kind}" for kind in sorted({stored.kind for stored in self.header.tensors.values()})]

    def file_bytes(self) -> int:
        return self.path.stat().st_size

    def digest(self) -> str:
        """Return the sha256 of the file."""
        return self._digest

    def quantization(self) -> dict[str, Any] | None:
        """Return None: what comes out of ``read`` is floating point."""
        return None

    def stored(self, name: str) -> StoredTensor | None:
        """Return the table entry of a tensor by its GGUF name, None if the file has none."""
        return self.header.tensors.get(name)

    def raw(self, name: str) -> Tensor:
        """Read a stored tensor's float32 values by its GGUF name, as they are in the file."""
        stored = self.header.tensors[name]
        rows = torch.Size(stored.shape).numel() // stored.shape[-1]
        return torch.cat([values for _, values in self._chunks(stored, rows)]).reshape(stored.shape)

    def _entry(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise SourceError(f"{self.path}: no tensor named {name!r}")
        return self.header.tensors[self._stored[name]]

    def _hf_name(self, stored: str) -> str:
        """Translate ``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
        stem, _, suffix = stored.rpartition(".")
        if suffix in ("weight", "bias"):
            if stem in OUTER:
                return f"{OUTER[stem]}.{suffix}"
            head, _, rest = stem.partition(".")
            layer, _, part = rest.partition(".")
            if head == "blk" and layer.isdigit() and part in self.architecture.layer_names:
                return f"model.layers.{layer}.{self.architecture.layer_names[part]}.{suffix}"
        raise UnsupportedModel(
            f"{self.path}: tensor {stored!r} has no place in a {self.architecture.model_type} model. "
            "This is another variant of the architecture; use the model's Hugging Face folder instead."
        )

    def _check_kinds(self) -> None:
        """Refuse, before any work, a packing that the gguf library cannot undo, and one file of several."""
        gguf = gguf_library()
        if self.header.metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(
                f"{self.path}: one of {self.header.metadata['split.count']} files of a split model. "
                "Join them first with llama.cpp's llama-gguf-split --merge."
            )
        for kind in sorted({stored.kind for stored in self.header.tensors.values()} - {"F32", "F16", "BF16"}):
            code = gguf.GGMLQuantizationType[kind]
            try:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[code][1]), np.uint8), code)
            except NotImplementedError:
                name = next(n for n, stored in self.header.tensors.items() if stored.kind == kind)
                raise UnsupportedModel(
                    f"{self.path}: tensor {name!r} is packed as {kind}, which the gguf library does not dequantize."
                ) from None

    def _chunks(self, stored: StoredTensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, float32 values [rows, width]) pieces.

        Read with plain reads: a mapping would keep its pages in memory.
        """
        width = stored.shape[-1]
        step = max(1, CHUNK_VALUES // width)
        row_bytes = stored.nbytes // rows
        with self.path.open("rb") as stream:
            stream.seek(stored.offset)
            for start in range(0, rows, step):
                raise_if_interrupted()
                count = min(step, rows - start)
                data = np.fromfile(stream, np.uint8, count * row_bytes)
                if data.size != count * row_bytes:
                    raise SourceError(
                        f"{self.path}: ended while a tensor was read. The file changed; download it again."
                    )
                yield start, torch.from_numpy(_dequantize(data.reshape(count, row_bytes), stored.kind))

    def _rows_in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Undo the row order of llama.cpp's rotary embedding (pairs interleaved) for q and k."""
        part = name.rsplit(".", 2)[-2]
        if not self.architecture.rotary_rows_interleaved or part not in ("q_proj", "k_proj"):
            return tensor
        heads = self.config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        half = tensor.shape[0] // heads // 2
        return tensor.view(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _dequantize(data: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    """Turn rows of packed bytes into rows of float32."""
    if kind == "F32":
        return data.view("<f4")
    if kind == "F16":
        return data.view("<f2").astype(np.float32)
    gguf = gguf_library()
    values: np.ndarray[Any, Any] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values


def _config(name: str, architecture: Architecture, source: GGUFSource) -> dict[str, Any]:
    """Rebuild the config.json that the original had, as far as the file tells.

    Nothing is guessed from a class's defaults.
    """
    metadata, path = source.header.metadata, source.path

    def need(key: str) -> Any:
        if f"{name}.{key}" not in metadata:
            raise SourceError(
                f"{path}: the metadata lacks {name}.{key}. The file is damaged, or made by another converter."
            )
        return metadata[f"{name}.{key}"]

    def may(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if may("expert_count"):
        raise UnsupportedModel(f"{path}: a mixture of {may('expert_count')} experts; GGUF files of those are not read.")
    embedding = source.stored("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{path}: lacks token_embd.weight. This file holds no whole model; download it again.")
    heads, hidden, layers = need("attention.head_count"), need("embedding_length"), need("block_count")
    if not isinstance(heads, int) or not isinstance(need("feed_forward_length"), int):
        raise UnsupportedModel(f"{path}: layers differ in heads or width; such models are not read from GGUF.")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **architecture.extra,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": need("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": may("attention.head_count_kv", heads),
        "rms_norm_eps": _decimal(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": _decimal(may("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(source, may),
        "tie_word_embeddings": source.stored("output.weight") is None,
        "torch_dtype": "bfloat16" if embedding.kind == "BF16" else "float16",
        "use_cache": True,
        "initializer_range": 0.02,
    }
    config |= _tokens(metadata)
    config |= _of_architecture(name, source, config, may)
    return config


def _tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{role}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _of_architecture(name: str, source: GGUFSource, config: dict[str, Any], may: Any) -> dict[str, Any]:
    """Return the config values that only some architectures have."""
    head_dim = may("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    layers = config["num_hidden_layers"]
    if name == "llama":
        biased = [f"attn_{p}" for p in ("q", "k", "v", "output") if source.stored(f"blk.0.attn_{p}.bias")]
        if biased and len(biased) < 4:
            raise UnsupportedModel(f"{source.path}: bias on {', '.join(biased)} only, which no Llama has.")
        return {
            "head_dim": may("attention.key_length", may("rope.dimension_count", head_dim)),
            "attention_bias": bool(biased),
            "mlp_bias": source.stored("blk.0.ffn_down.bias") is not None,
        }
    if name == "gemma3":
        # llama.cpp scales by 1/sqrt(head_dim), except in the 27B model (the one of 62 layers), by 1/sqrt(hidden/heads).
        scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
        return {
            "head_dim": head_dim,
            "query_pre_attn_scalar": scalar,
            "sliding_window": may("attention.sliding_window", 512),
            "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)],
            "final_logit_softcapping": may("final_logit_softcapping"),
            "attn_logit_softcapping": None,
        }
    if name == "phi3":
        return {
            "sliding_window": may("attention.sliding_window") or None,
            "original_max_position_embeddings": may(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
        }
    return {"head_dim": head_dim} if name == "qwen3" else {}


def _rope_scaling(source: GGUFSource, may: Any) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` entry, None if positions are not stretched."""
    if source.stored(ROPE_FACTORS):
        return _llama3_scaling(source, may)
    kind = may("rope.scaling.type")
    if kind in (None, "none"):
        return None
    factor = may("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": _decimal(factor)} if factor != 1.0 else None
    if kind == "yarn":
        original = may("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": _decimal(factor), "original_max_position_embeddings": original}
    raise UnsupportedModel(
        f"{source.path}: rotary scaling {kind!r} is not read from GGUF; use the Hugging Face folder."
    )


def _llama3_scaling(source: GGUFSource, may: Any) -> dict[str, Any]:
    """Return Llama 3.1's scaling.

    The file stores its result, one factor a frequency; the parameters are tried and must give it.
    """
    stored = source.raw(ROPE_FACTORS).double()
    theta, dims = float(may("rope.freq_base", 10000.0)), 2 * stored.numel()
    frequency = theta ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    original, low, high = 8192, 1.0, 4.0
    factor = float(
        f"{stored.max().item():.4g}"
    )  # the lowest frequency's factor is the whole one, up to float32 rounding
    turns = original * frequency / (2 * torch.pi)  # how often each frequency turns within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(expected, stored, rtol=1e-4):
        raise UnsupportedModel(
            f"{source.path}: {ROPE_FACTORS} are not Llama 3's factors; this rotary scaling is not read from GGUF."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _decimal(value: float) -> float:
    """Return the short decimal that a float32 was written as: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
