"""Shrink a config: fewer layers with one of every kind, and sizes that still fit each other where a width is divided.

What fits is read from the names of keys that architectures share, not from a list of architectures.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

HEAD_DIM, MAX_EXPERTS, MAX_RANK, MAX_STATE = 16, 6, 32, 16
NAMED_LAYERS = re.compile(r"(layers|layer_ids|layer_idx|indices|indexes)$")  # lists of numbers of layers
SAME_WIDTH = re.compile(r"(embed_dim|embedding_dim|embedding_size|hidden_size|lru_width|proj_dim)$")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
EXPERT_GROUPS = ("n_group", "num_expert_group")
EXPANSIONS = ("expand", "mamba_expand")
STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
STATE_HEAD_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
STATE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")


def fewer_layers(config: Mapping[str, Any], count: int, first: int = 2) -> tuple[dict[str, Any], list[int]]:
    """Cut a config's lists to the first layer of every kind; return the config and which layers stay.

    A kind is what lists with an entry for each layer, lists of numbers of layers and ``per_layer_config`` say of it.

    count: layers that the config has. first: so many of the first layers stay in any case.
    """
    small = dict(config)
    lists = {key: value for key, value in config.items() if isinstance(value, (list, tuple)) and key != "architectures"}
    named = {key: value for key, value in lists.items() if NAMED_LAYERS.search(key) and _are_indices(value, count)}
    described = {key: value for key, value in lists.items() if len(value) == count and key not in named}
    apart = {int(index): fields for index, fields in (config.get("per_layer_config") or {}).items()}
    kinds: dict[str, int] = {}
    for index in range(count):
        marks: list[Any] = [value[index] for value in described.values()]
        marks += [index in value for value in named.values()]
        kinds.setdefault(repr([*marks, apart.get(index)]), index)
    chosen = sorted({*kinds.values(), *range(min(count, first))})
    small.update({key: [value[index] for index in chosen] for key, value in described.items()})
    small.update({key: [chosen.index(each) for each in value if each in chosen] for key, value in named.items()})
    if apart:
        small["per_layer_config"] = {new: dict(apart[old]) for new, old in enumerate(chosen) if old in apart}
    return small, chosen


def _are_indices(value: Sequence[Any], count: int) -> bool:
    """Tell whether a list holds numbers of layers in ascending order."""
    whole = all(type(entry) is int and 0 <= entry < count for entry in value)
    return whole and all(a < b for a, b in itertools.pairwise(value))


def shrink_latent_heads(small: dict[str, Any]) -> None:
    """Shrink the heads of latent attention, in place: parts with and without positions, ranks."""
    if not isinstance(small.get("qk_nope_head_dim"), int) or not isinstance(small.get("qk_rope_head_dim"), int):
        return
    nope, turned = min(HEAD_DIM, small["qk_nope_head_dim"]), min(HEAD_DIM // 2, small["qk_rope_head_dim"])
    whole = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if isinstance(small.get("head_dim"), int):  # of what turns, in most; of all, in some
        small["head_dim"] = nope + turned if small["head_dim"] == whole else turned
    small.update(qk_nope_head_dim=nope, qk_rope_head_dim=turned)
    if small.get("qk_head_dim") is not None:
        small["qk_head_dim"] = nope + turned
    for key, most in (("v_head_dim", HEAD_DIM), ("q_lora_rank", MAX_RANK), ("kv_lora_rank", MAX_RANK)):
        if isinstance(small.get(key), int):
            small[key] = min(most, small[key])


def shrink_states(full: Mapping[str, Any], small: dict[str, Any], width: int, new_width: int) -> None:
    """Shrink the heads of a state space in place: as many of 16 channels as its expanded width has."""
    expansion = next((full[key] for key in EXPANSIONS if isinstance(full.get(key), int)), None)
    if expansion is None:
        return
    for heads, dim in itertools.product(STATE_HEADS, STATE_HEAD_DIMS):
        if isinstance(full.get(heads), int) and isinstance(full.get(dim), int):
            inner = full[heads] * full[dim]
            if inner in (expansion * width, full.get("mamba_d_ssm")):
                small.update({dim: HEAD_DIM, heads: max(1, inner * new_width // (width * HEAD_DIM))})
                if isinstance(full.get("mamba_d_ssm"), int):
                    small["mamba_d_ssm"] = small[heads] * HEAD_DIM
                for groups in STATE_GROUPS:
                    if isinstance(full.get(groups), int) and small[heads] % full[groups]:
                        small[groups] = 1
                return


def shrink_experts(small: dict[str, Any]) -> None:
    """Leave few experts, in place; two groups of them where they lie in groups."""
    for key in EXPERTS:
        if isinstance(small.get(key), int):
            small[key] = min(MAX_EXPERTS, small[key])
    for key in CHOSEN:
        if isinstance(small.get(key), int):
            small[key] = min(MAX_EXPERTS // 2, small[key])
    for key in EXPERT_GROUPS:
        if isinstance(small.get(key), int) and small[key] > 2:
            small.update({key: 2, "topk_group": 1})


def sections(old: Sequence[int], half: int) -> list[int]:
    """Divide half a head's frequencies among time, height and width, as another number of them was divided."""
    parts = [max(1, part * half // sum(old)) for part in old[:-1]]
    return [*parts, half - sum(parts)]
