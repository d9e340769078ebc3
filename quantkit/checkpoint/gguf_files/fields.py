"""What the metadata fields of a GGUF file may hold: one table of every field that is read, by its type and range.

Source of names and types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized key-value pairs").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.foreign_files.config import MOST_LAYERS, MOST_WIDTH
from quantkit.checkpoint.foreign_files.fields import Flag, Real, Rule, Several, Whole, Word, check_field

_TOKEN = Whole(-1, (1 << 32) - 1)
# Layers that differ hold a list; those models are refused by name later.
_SIZE = Several(Whole(0, MOST_WIDTH), alone=True)

GENERAL: dict[str, Rule] = {
    "general.architecture": Word(),
    "general.alignment": Whole(1, 1 << 20),
    "general.type": Word(),
    "split.count": Whole(0, 1 << 16),
    "tokenizer.ggml.model": Word(),
    "tokenizer.ggml.pre": Word(),
    "tokenizer.ggml.tokens": Several(Word(1 << 16)),
    "tokenizer.ggml.merges": Several(Word(1 << 17)),
    "tokenizer.ggml.scores": Several(Real(-3.5e38, 3.5e38)),
    "tokenizer.ggml.token_type": Several(Whole(0, 100)),
    **{f"tokenizer.ggml.{role}_token_id": _TOKEN for role in ("bos", "eos", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{what}": Flag() for what in ("bos_token", "eos_token", "space_prefix")},
    "tokenizer.chat_template": Word(1 << 20),
}
# After the architecture's name and a dot.
OF_ARCHITECTURE: dict[str, Rule] = {
    "block_count": Whole(1, MOST_LAYERS),
    "embedding_length": Whole(1, MOST_WIDTH),
    "context_length": Whole(1, 1 << 27),
    "feed_forward_length": _SIZE,
    "expert_count": Whole(0, 1 << 16),
    "expert_used_count": Whole(0, 1 << 16),
    "expert_feed_forward_length": _SIZE,
    "attention.head_count": _SIZE,
    "attention.head_count_kv": _SIZE,
    "attention.key_length": Whole(1, 1 << 14),
    "attention.value_length": Whole(1, 1 << 14),
    "attention.sliding_window": Whole(0, (1 << 32) - 1),
    "attention.layer_norm_rms_epsilon": Real(0.0, 1e-2),
    "final_logit_softcapping": Real(1e-3, 1e9),
    "rope.dimension_count": Whole(1, 1 << 14),
    "rope.freq_base": Real(1.0, 1e15),
    "rope.scaling.type": Word(),
    "rope.scaling.factor": Real(1e-4, 1e6),
    "rope.scaling.original_context_length": Whole(1, 1 << 27),
    "rope.scaling.yarn_beta_fast": Real(1e-3, 1e6),
    "rope.scaling.yarn_beta_slow": Real(1e-3, 1e6),
}


def check_fields(metadata: Mapping[str, Any], where: str) -> None:
    """Check every metadata field that is read anywhere.

    metadata: as the header has it. where: the file.

    Raises SourceError, naming file and field, for a value of another type or outside its range.
    """
    name = metadata.get("general.architecture")
    rules = {**GENERAL, **{f"{name}.{key}": rule for key, rule in OF_ARCHITECTURE.items()}}
    for key, rule in rules.items():
        if key in metadata:
            check_field(where, key, metadata[key], rule)
