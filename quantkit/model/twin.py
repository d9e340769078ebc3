"""Build a small random twin of a model: same architecture, every kind of layer, same head structure, few weights.

What is proved on the twin (stepping, folds, input groups) holds for the model: both are the same code, and the code
does not look at the values of weights. Norm weights and biases are random too, or a proof would miss them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quantkit.errors import UnsupportedModel
from quantkit.model.language import text_config, towers
from quantkit.model.skeleton import build_skeleton

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
# Lists with an entry for each layer, where a config gives no number.
LAYER_LISTS = ("layers_block_type", "layer_types")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
POSITIONS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")
VOCAB, HEAD_DIM, WINDOW, MAX_GROUPED, MAX_EXPERTS = 128, 16, 4, 8, 6


def small_twin(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Build the model of a shrunken config with random weights, in eval mode.

    Raises UnsupportedModel as ``build_skeleton`` does.
    """
    try:
        model = build_skeleton(small_config(config), dtype)
    except UnsupportedModel:
        # widths that must fit each other in a way unknown here
        model = build_skeleton(small_config(config, only_depth=True), dtype)
    fill_random(model, dtype, seed)
    return model


def fill_random(model: nn.Module, dtype: torch.dtype, seed: int = 0) -> None:
    """Fill every parameter with random values.

    Matrices keep the size of their input, scales are around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    done: dict[int, nn.Parameter] = {}
    beside = tuple(f"{tower}." for tower in towers(model))
    for path, module in model.named_modules():
        if f"{path}.".startswith(beside):  # never run on text: zeros, of no memory
            for name, param in list(module._parameters.items()):
                if param is not None:
                    nothing = torch.zeros((), dtype=dtype).expand(param.shape)
                    module._parameters[name] = nn.Parameter(nothing, requires_grad=False)
            continue
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            if id(param) not in done:
                value = torch.randn(param.shape, generator=generator, dtype=torch.float32)
                if param.dim() > 1 and not isinstance(module, nn.Embedding):
                    value /= param.shape[-1] ** 0.5
                elif param.dim() == 1:
                    value = 1 + 0.3 * value.clamp(-2, 2) if name == "weight" else 0.1 * value
                done[id(param)] = nn.Parameter(value.to(dtype), requires_grad=False)
            module._parameters[name] = done[id(param)]
        for name, buffer in list(module._buffers.items()):
            if buffer is None or name in module._non_persistent_buffers_set or not buffer.is_floating_point():
                continue
            noise = torch.rand(buffer.shape, generator=generator)
            # a stored scalar of 1 would hide its factor
            module._buffers[name] = buffer * (1 + 0.3 * noise).to(buffer.dtype)
    if getattr(model.config, "tie_word_embeddings", False):
        model.tie_weights()  # type: ignore[operator]


def small_config(config: Mapping[str, Any], only_depth: bool = False) -> dict[str, Any]:
    """Shrink a config of the same model type: one or two layers of every kind, few small heads.

    The heads keep their proportion.
    """
    full, part = _complete(config)
    if part is None:
        return _shrunk(full, only_depth)
    return {**full, part: _shrunk(full[part], only_depth)}


def _shrunk(full: Mapping[str, Any], only_depth: bool) -> dict[str, Any]:
    """Shrink the config of a language model."""
    small = dict(full)
    layers = next((key for key in LAYERS if full.get(key) is not None), None)
    lists = [full[key] for key in LAYER_LISTS if isinstance(full.get(key), (list, tuple))]
    count = int(full[layers]) if layers else len(lists[0]) if lists else int(full[_first_key(full, LAYERS)])
    chosen = _layers_of_every_kind(full, count)
    if layers:
        small[layers] = len(chosen)
    for key, value in full.items():
        if isinstance(value, (list, tuple)) and len(value) == count and key != "architectures":
            small[key] = [value[i] for i in chosen]
    if "vocab_size" in small:
        small["vocab_size"] = min(VOCAB, small["vocab_size"])
    for key in [k for k in small if k.endswith("_token_id")]:
        if isinstance(small[key], (list, tuple)) or (small[key] or 0) >= VOCAB:
            small[key] = None if key == "pad_token_id" else 1
    if not only_depth:
        _shrink_widths(full, small)
    return small


def _complete(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """With the defaults of its class, as the model will see it, and the key of the part that describes its language."""
    model_config: Any = build_skeleton(config).config
    data: dict[str, Any] = {**model_config.to_dict(), "model_type": config["model_type"]}
    for key in ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "quantization_config"):
        data.pop(key, None)
    language = text_config(model_config)
    parts = (key for key, value in data.items() if isinstance(value, dict) and getattr(model_config, key) is language)
    return data, next(parts, None)


def _first_key(data: Mapping[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if data.get(name) is not None:
            return name
    raise UnsupportedModel(f"config.json of this {data.get('model_type')} has none of {', '.join(names)}.")


def _layers_of_every_kind(config: Mapping[str, Any], count: int) -> list[int]:
    """Layers that differ in a per-layer list of the config, the first of each kind; at least two if there are two."""
    lists = [v for k, v in config.items() if isinstance(v, (list, tuple)) and len(v) == count and k != "architectures"]
    kinds: dict[str, int] = {}
    for index in range(count):
        kinds.setdefault(repr([v[index] for v in lists]), index)
    chosen = set(kinds.values())
    step = next((int(config[k]) for k in ("decoder_sparse_step", "first_k_dense_replace") if config.get(k)), 1)
    chosen |= set(range(min(count, max(2, step + 1))))
    return sorted(chosen)


def _shrink_widths(full: Mapping[str, Any], small: dict[str, Any]) -> None:
    heads_key, width_key = _first_key(full, HEADS), _first_key(full, WIDTHS)
    heads, width = int(full[heads_key]), int(full[width_key])
    kv_key = next((k for k in KV_HEADS if full.get(k) is not None), None)
    kv = int(full[kv_key]) if kv_key else heads
    per_kv = max(1, heads // kv)
    grouped = per_kv if per_kv <= MAX_GROUPED else MAX_GROUPED
    new_kv = min(kv, 2)
    new_heads = new_kv * grouped
    own_head_dim = full.get("head_dim") not in (None, 0, width // heads)
    new_width = 96 if own_head_dim else new_heads * HEAD_DIM
    if new_width < 32 and not own_head_dim:  # one or two heads: keep enough channels for norms and experts
        new_heads, new_kv, new_width = 4 * grouped, 4 * new_kv if kv > 1 else new_kv, 4 * grouped * HEAD_DIM
    small.update({heads_key: new_heads, width_key: new_width})
    if kv_key:
        small[kv_key] = new_kv
    if full.get("head_dim") is not None:
        small["head_dim"] = HEAD_DIM
    for key, value in full.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "intermediate_size" in key or "ffn_hidden_size" in key or key.endswith("ffn_dim") or key == "n_inner":
            small[key] = 2 * new_width + 16 if value >= 32 else value
        elif key in EXPERTS and value > MAX_EXPERTS:
            small[key] = MAX_EXPERTS
        elif key == "num_experts_per_tok":
            small[key] = min(value, MAX_EXPERTS // 2)
        elif key in POSITIONS:
            small[key] = min(value, 256)
        elif "sliding_window" in key and "pattern" not in key:
            small[key] = min(value, WINDOW)
        elif key == "word_embed_proj_dim" and value == width:
            small[key] = new_width
    _shrink_rope(small, HEAD_DIM)


def _shrink_rope(small: dict[str, Any], head_dim: int) -> None:
    """Rotary parameters hold lists as long as half a head (longrope), and the context the model was trained on."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(key), dict):
            small[key] = _shrink_rope_entry(small[key], head_dim)


def _shrink_rope_entry(entry: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    share = float(entry.get("partial_rotary_factor") or 1.0)
    out: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            out[key] = _shrink_rope_entry(value, head_dim)
        elif isinstance(value, (list, tuple)) and key.endswith("_factor"):
            out[key] = list(value)[: int(head_dim * share) // 2]
        elif key in POSITIONS:
            out[key] = min(value, 128)
        else:
            out[key] = value
    return out
