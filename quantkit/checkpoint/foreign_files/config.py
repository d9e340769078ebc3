"""What the fields of a config.json may hold, and what a config may claim of the checkpoint that it lies beside.

Held for every source, a Hugging Face folder or a GGUF file, before anything is built from a config. The limits are far
above every model that exists, and low enough that building the model's structure takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.checkpoint.foreign_files.fields import (
    Flag,
    Real,
    Rule,
    Several,
    Token,
    Whole,
    Word,
    check_field,
    check_table,
)
from quantkit.errors import SourceError

# What a key is called differs between architectures; the rules are by what it means.
LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_decoder_layers",
    "num_blocks", "num_encoder_layers", "num_lstm_layers", "depth",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions")
WIDTHS = ("hidden_size", "n_embd", "d_model")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
INNER = ("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "ffn_hidden_size")
MOST_LAYERS, MOST_WIDTH, MOST_EXPERTS, MOST_EXPERT_MODULES = 512, 1 << 20, 1 << 14, 1 << 16
# Some models compute a table of angles for all positions: of 256 MB in float32 at most.
MOST_ANGLES = 1 << 26
# A byte holds at most four weights, of two bits.
WEIGHTS_PER_BYTE = 4
# Of an expert; narrower ones would be no matrices, and are not quantized.
LEAST_EXPERT, FEW_EXPERTS = 16, 4096
# Up to here a structure is built in a moment, and which tensor is missing is said by name.
FEW_LAYERS, FEW_WEIGHTS = 128, 1 << 30

_SIZE = Several(Whole(1, MOST_WIDTH), alone=True)
_COUNT = Several(Whole(0, MOST_EXPERTS), alone=True)
# GGUF files write -1 as an unsigned number.
_TOKEN = Several(Token((1 << 32) - 1), alone=True)
_EPSILON = Real(0.0, 1e-2)
# The base of a rotary embedding's frequencies. Below 1 later pairs would turn faster than the first; at 1 all turn
# alike, and nothing tells near from far. Models have 10,000 or more.
_BASE = Real(10.0, 1e15)
_FACTOR = Real(1e-2, 1e6)
_SHARE = Real(0.0, 1e6)
_CAP = Real(1e-3, 1e9)

RULES: dict[str, Rule] = {
    **dict.fromkeys(LAYERS, Whole(1, MOST_LAYERS)),
    **dict.fromkeys((*WIDTHS, "word_embed_proj_dim"), Whole(1, MOST_WIDTH)),
    "head_dim": Several(Whole(0, MOST_WIDTH), alone=True),  # 0: latent attention without positions (glm5_next)
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads"), _SIZE),
    **dict.fromkeys(INNER, Several(Whole(0, 1 << 24), alone=True)),
    **dict.fromkeys((*EXPERTS, "num_experts_per_tok", "moe_topk", "num_shared_experts", "n_shared_experts"), _COUNT),
    "vocab_size": Whole(1, 1 << 26),
    # Some models compute a table of all positions; the longest context known has 10 million.
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "n_ctx"), Whole(1, 1 << 27)),
    "n_positions": Whole(1, 1 << 20),
    "rotary_dim": Whole(0, 1 << 14),
    "sliding_window": Several(Whole(0, 1 << 27), alone=True),
    "num_labels": Whole(0, 1 << 17),
    **dict.fromkeys((f"{role}_token_id" for role in ("bos", "eos", "pad", "unk", "sep", "decoder_start")), _TOKEN),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "rope_base"), _BASE),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _FACTOR),
    "attention_factor": Real(0.1, 10.0),
    **dict.fromkeys(("short_factor", "long_factor"), Several(_FACTOR)),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"), _SHARE),
    "partial_rotary_factor": Real(0.0, 1.0),
    **dict.fromkeys(("rope_type", "model_type", "hidden_act", "hidden_activation", "activation_function"), Word()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"), _CAP),
    "query_pre_attn_scalar": _CAP,
    **dict.fromkeys(
        ("attention_multiplier", "residual_multiplier", "embedding_multiplier", "logit_scale", "initializer_range"),
        Real(-1e6, 1e6),
    ),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), Real(0.0, 1.0)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache"), Flag()),
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), Several(Word())),
}  # fmt: skip
# Objects with fields of their own: the format's reader checks the first; labels may be called anything.
NOT_OURS = ("quantization_config", "id2label", "label2id", "task_specific_params", "auto_map")


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Check what a config says, before anything is built from it.

    config: as it was read. where: the file.

    Raises SourceError, naming the field, for a value that no model has.
    """
    check_table(config, RULES, where, NOT_OURS)
    if "tie_word_embeddings" in config:  # null is nothing said elsewhere; of this field every model type asks a word
        check_field(where, "tie_word_embeddings", config["tie_word_embeddings"], Flag())
    _check_head_dim(config, where)
    _check_rope(config, where)
    if config.get("is_causal") is False:
        raise SourceError(
            f"{where}: is_causal is false: each token would see those after it. quantkit runs causal language models."
        )
    if config.get("sliding_window") == 0 and config.get("use_sliding_window") is not False:
        raise SourceError(f"{where}: sliding_window is 0: no token would see another. Download it again, or use null.")
    angles = _largest(config, POSITIONS) * _largest(config, ("rotary_dim",))
    if angles > MOST_ANGLES:
        raise SourceError(
            f"{where}: claims a table of {angles:,} angles (rotary_dim times positions), more than any model has. The"
            " file is damaged: download it again."
        )
    layers, experts = _largest(config, LAYERS), _largest(config, EXPERTS)
    chosen = config.get("num_experts_per_tok")
    if experts and isinstance(chosen, int) and chosen > experts:
        raise SourceError(
            f"{where}: num_experts_per_tok is {chosen}, of {experts} experts. The file is damaged: download it again."
        )
    if layers * experts > MOST_EXPERT_MODULES:
        raise SourceError(
            f"{where}: claims {layers} layers of {experts} experts, more than any model has. The file is damaged:"
            " download it again."
        )


def _check_head_dim(config: Mapping[str, Any], where: str) -> None:
    """Refuse heads of no width, but where latent attention without positions says so (glm5_next)."""
    if config.get("head_dim") == 0 and not config.get("qk_nope_head_dim"):
        raise SourceError(f"{where}: head_dim is 0, heads of no width. The file is damaged: download it again.")
    for part in config.values():
        if isinstance(part, Mapping):
            _check_head_dim(part, where)


def _check_rope(config: Mapping[str, Any], where: str, width: int = 0) -> None:
    """Refuse factors of a rotary embedding that do not fit each other, or the heads; transformers goes on with them.

    width: of what turns in a head, as the config around this part says; 0 where it is not known.
    """
    width = _rotary_width(config) or width
    lists = {name: config[name] for name in ("short_factor", "long_factor") if isinstance(config.get(name), list)}
    for name, factors in lists.items():
        wanted = width // 2 or len(lists.get("short_factor", factors))
        if len(factors) != wanted:
            raise SourceError(
                f"{where}: {name} has {len(factors)} entries, expected {wanted}, one for each pair that turns."
                " Download it again."
            )
    fast, slow = config.get("beta_fast"), config.get("beta_slow")
    if fast is not None and slow is not None and fast <= slow:
        raise SourceError(
            f"{where}: beta_fast is {fast} and beta_slow {slow}, expected more than that. Download it again."
        )
    for part in config.values():
        if isinstance(part, Mapping):
            _check_rope(part, where, width)


def _rotary_width(config: Mapping[str, Any]) -> int:
    """Return the channels of a head that turn, 0 where the config does not say."""
    heads, hidden, width = (config.get(name) for name in ("num_attention_heads", "hidden_size", "qk_rope_head_dim"))
    width = width or config.get("head_dim")
    if not isinstance(width, int) and isinstance(heads, int) and isinstance(hidden, int) and heads:
        width = hidden // heads
    ropes: list[Any] = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    shares = [rope.get("partial_rotary_factor") for rope in ropes if isinstance(rope, Mapping)]
    share = config.get("partial_rotary_factor") or next(filter(None, shares), 1.0)
    return int(width * share) if isinstance(width, int) else 0


def check_claims(config: Mapping[str, Any], sizes: Sequence[int], where: str) -> None:
    """Check that the stored tensors can hold what a config claims.

    config: checked. sizes: bytes of each stored tensor. where: the file or folder.

    Raises SourceError, naming the fields, for one that claims more layers than there are tensors, or a matrix of more
    weights than all tensors hold.
    """
    layers, width = _largest(config, LAYERS), _largest(config, WIDTHS)
    if layers > max(len(sizes), FEW_LAYERS):
        raise SourceError(
            f"{where}: config.json claims {layers} layers (num_hidden_layers), but the checkpoint has {len(sizes)}"
            " tensors. Weights and config belong to different models: download both again."
        )
    _check_experts(config, sum(sizes), where)
    most = max(WEIGHTS_PER_BYTE * sum(sizes), FEW_WEIGHTS)
    for name in ("vocab_size", *INNER, *LAYERS):
        claimed = _largest(config, (name,)) * width
        if claimed > most:
            raise SourceError(
                f"{where}: config.json claims {name} {config[name]} and a width of {width}, {claimed:,} weights; the"
                f" checkpoint holds at most {most:,}. Weights and config belong to different models: download both"
                " again."
            )


def _check_experts(config: Mapping[str, Any], stored: int, where: str) -> None:
    """Refuse more experts than the bytes could hold: each becomes modules of its own, which take a while to build."""
    experts = _largest(config, EXPERTS) * max(1, _largest(config, LAYERS))
    most = max(WEIGHTS_PER_BYTE * stored // (LEAST_EXPERT * max(1, _largest(config, WIDTHS))), FEW_EXPERTS)
    if experts > most:
        raise SourceError(
            f"{where}: config.json claims {experts:,} experts in all its layers ({' or '.join(EXPERTS[:3])}); the"
            f" checkpoint holds at most {most:,}. Weights and config belong to different models: download both again."
        )


def _largest(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the largest of these fields, 0 if none is there; of a list its largest entry."""
    values = [config[name] for name in names if config.get(name) is not None]
    return max((max(value, default=0) if isinstance(value, list | tuple) else value for value in values), default=0)
