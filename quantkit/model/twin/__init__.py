"""Build a small random twin of a model: same architecture, every kind of layer, same head structure, few weights.

What is proved on the twin (stepping, folds, input groups) holds for the model: both are the same code, and the code
does not look at the values of weights. Norm weights and biases are random too, or a proof would miss them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quantkit.errors import UnsupportedModel
from quantkit.model.language import text_config, towers
from quantkit.model.skeleton import build_skeleton
from quantkit.model.twin.shrink import (
    HEAD_DIM,
    SAME_WIDTH,
    fewer_layers,
    sections,
    shrink_experts,
    shrink_latent_heads,
    shrink_states,
)

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_decoder_layers", "layers")
# Lists with an entry for each layer, where a config gives no number.
LAYER_LISTS = ("layers_block_type", "layer_types")
HEADS = (
    "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads", "num_decoder_attention_heads",
    "attention_heads",
)  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim")
POSITIONS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")
VOCAB, WINDOW, MAX_GROUPED = 128, 4, 8
MAX_WEIGHTS = 300_000_000  # of a twin with its model's widths or layers, made only where a smaller one does not run
# What a forward raises over sizes that do not fit each other.
MISFIT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def small_twin(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Build the model of a shrunken config with random weights, in eval mode; the smallest one that runs.

    Raises UnsupportedModel as ``build_skeleton`` does.
    """
    first: nn.Module | None = None
    trouble: UnsupportedModel | None = None
    # the last two: layers or widths fit each other in a way unknown here
    for plan in ({}, {"least_heads": 4}, {"every_layer": True}, {"only_depth": True}):
        try:
            model = build_skeleton(small_config(config, **plan), dtype)
        except UnsupportedModel as error:
            trouble = error
            continue
        if _weights(model) > MAX_WEIGHTS:
            trouble = trouble or UnsupportedModel(f"{config['model_type']}: no small model of its kind could be made.")
            continue
        fill_random(model, dtype, seed)
        if _runs(model):
            return model
        first = first or model
    if first is None:
        assert trouble is not None
        raise trouble
    return first


def _weights(model: nn.Module) -> int:
    """Count the weights that a twin fills: without the towers, which take no memory."""
    beside = tuple(f"{tower}." for tower in towers(model))
    return sum(each.numel() for name, each in model.named_parameters() if not name.startswith(beside))


@torch.no_grad()
def _runs(model: nn.Module) -> bool:
    """Tell whether a model computes something from a few tokens."""
    try:
        model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]]), use_cache=False)
    except MISFIT:
        return False
    return True


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


def small_config(
    config: Mapping[str, Any], *, every_layer: bool = False, only_depth: bool = False, least_heads: int = 2
) -> dict[str, Any]:
    """Shrink a config of the same model type: one or two layers of every kind, few small heads.

    The heads keep their proportion.

    every_layer: keep the depth. only_depth: keep the widths. least_heads: that keys and values keep, if the model has
    so many.
    """
    full, part, unlisted = _complete(config)
    language = full if part is None else full[part]
    small = _shallow(language, sys.maxsize if every_layer else unlisted)
    if not only_depth:
        _shrink_widths(language, small, least_heads)
    return small if part is None else {**full, part: small}


def _shallow(full: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Shrink depth and vocabulary of a language model's config. first: so many of the first layers stay."""
    layers = next((key for key in LAYERS if full.get(key) is not None), None)
    lists = [full[key] for key in LAYER_LISTS if isinstance(full.get(key), (list, tuple))]
    count = int(full[layers]) if layers else len(lists[0]) if lists else int(full[_first_key(full, LAYERS)])
    step = next((int(full[k]) for k in ("decoder_sparse_step", "first_k_dense_replace") if full.get(k)), 1)
    small, chosen = fewer_layers(full, count, max(2, step + 1, first))
    if layers:
        small[layers] = len(chosen)
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(small.get(key), int):
            small[key] = min(VOCAB, small[key])
    for key in [k for k in small if k.endswith("_token_id")]:
        if isinstance(small[key], (list, tuple)) or (small[key] or 0) >= VOCAB:
            small[key] = 0 if key == "pad_token_id" else 1
    return small


def _complete(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, int]:
    """With the defaults of its class, as the model will see it, and the key of the part that describes its language.

    Last: how many first layers show every kind, if the config computes its kinds from periods and stores no list.
    """
    model_config: Any = build_skeleton(config).config
    data: dict[str, Any] = {**model_config.to_dict(), "model_type": config["model_type"]}
    for key in ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "quantization_config"):
        data.pop(key, None)
    language = text_config(model_config)
    parts = (key for key, value in data.items() if isinstance(value, dict) and getattr(model_config, key) is language)
    part = next(parts, None)
    stored = data if part is None else data[part]
    computed = [getattr(language, key, None) for key in LAYER_LISTS if key not in stored]
    kinds = [list(each) for each in computed if isinstance(each, (list, tuple))]
    return data, part, max((max(map(each.index, each)) + 1 for each in kinds if each), default=0)


def _first_key(data: Mapping[str, Any], names: tuple[str, ...]) -> str:
    for name in names:
        if data.get(name) is not None:
            return name
    raise UnsupportedModel(f"config.json of this {data.get('model_type')} has none of {', '.join(names)}.")


def _shrink_widths(full: Mapping[str, Any], small: dict[str, Any], least_heads: int) -> None:
    heads_key, width_key = _first_key(full, HEADS), _first_key(full, WIDTHS)
    heads, width = int(full[heads_key]), int(full[width_key])
    kv_key = next((k for k in KV_HEADS if full.get(k) is not None), None)
    kv = int(full[kv_key]) if kv_key else heads
    per_kv = max(1, heads // kv)
    grouped = per_kv if per_kv <= MAX_GROUPED else MAX_GROUPED
    new_kv = min(kv, least_heads)
    new_heads = new_kv * grouped
    own_head_dim = full.get("head_dim") not in (None, 0, width // heads)
    new_width = 96 if own_head_dim else new_heads * HEAD_DIM
    if new_width < 32 and not own_head_dim:  # one or two heads: keep enough channels for norms and experts
        new_heads, new_kv, new_width = 4 * grouped, 4 * new_kv if kv > 1 else new_kv, 4 * grouped * HEAD_DIM
    small.update({heads_key: new_heads, width_key: new_width})
    if kv_key:
        small[kv_key] = new_kv
    shrink_latent_heads(small)
    if full.get("head_dim") is not None and small["head_dim"] == full["head_dim"]:
        small["head_dim"] = HEAD_DIM
    if isinstance(full.get("rotary_dim"), int):
        small["rotary_dim"] = max(2, full["rotary_dim"] * HEAD_DIM * heads // width // 2 * 2)
    for key, value in full.items():
        if isinstance(value, int) and not isinstance(value, bool):
            small[key] = _small_size(key, value, width, new_width, small[key])
    small.update(_per_layer(full, small, heads_key, kv_key))
    shrink_experts(small)
    if isinstance(full.get("attention_head_dim"), int):
        small["attention_head_dim"] = full["attention_head_dim"] * heads * new_width // (width * new_heads)
    shrink_states(full, small, width, new_width)
    _shrink_rope(small, small.get("head_dim") or HEAD_DIM)


def _small_size(key: str, value: int, width: int, new_width: int, now: int) -> int:
    """Return what a number of the config becomes. now: what it is in the small one, if nothing here speaks of it."""
    if "intermediate_size" in key or "ffn_hidden_size" in key or key.endswith("ffn_dim") or key == "n_inner":
        return 2 * new_width + 16 if value >= 32 else value
    if key in POSITIONS:
        return min(value, 256)
    if "sliding_window" in key and "pattern" not in key:
        return min(value, WINDOW)
    return value // width * new_width if value % width == 0 and SAME_WIDTH.search(key) else now


def _per_layer(full: Mapping[str, Any], small: Mapping[str, Any], heads: str, kv: str | None) -> dict[str, Any]:
    """Return ``per_layer_config`` with heads as small as those of the other layers, in their proportion."""
    found: dict[str, Any] = {}
    for index, fields in (small.get("per_layer_config") or {}).items():
        own, both = dict(fields), {**full, **fields}
        shrink_latent_heads(both)
        own.update({key: both[key] for key in fields})
        if "head_dim" in fields and own["head_dim"] == fields["head_dim"]:
            own["head_dim"] = max(HEAD_DIM, HEAD_DIM * fields["head_dim"] // int(full.get("head_dim") or HEAD_DIM))
        if heads in fields:
            own[heads] = small[heads]
        if kv is not None and kv in fields:
            alike = fields[kv] == fields.get(heads, full[heads])
            own[kv] = small[heads] if alike else min(small[kv], fields[kv])
        found[index] = own
    return {"per_layer_config": found} if found else {}


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
        elif isinstance(value, (list, tuple)) and key == "mrope_section":
            out[key] = sections(value, int(head_dim * share) // 2)
        elif key in POSITIONS:
            out[key] = min(value, 128)
        else:
            out[key] = value
    return out
