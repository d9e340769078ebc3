"""Mixtures of experts and layers of other kinds: which engine was shown to load them."""

from __future__ import annotations

from quantkit.convert.engines.conditions import CT, NATIVE
from quantkit.convert.engines.rules import (
    TRANSPOSED,
    Checkpoint,
    Mixtures,
    last_name,
    not_shown,
    quantizes_experts,
    unseen,
)

# Families whose experts transformers was seen to gather from per-expert tensors: symmetric, logits within 6e-4 of
# quantkit's.
TRANSFORMERS_EXPERTS = ("mixtral", "qwen3_moe")


def transformers_experts(c: Checkpoint) -> tuple[str, str] | None:
    """Object to zero points of experts: its conversion of expert tensors collects only packed codes and scales."""
    if c.format == NATIVE:
        return "transformers holds experts as one tensor.", "quantkit/hf.py, _module_names"
    if c.format != CT or not quantizes_experts(c):
        return not_shown(c)
    where = "transformers/integrations/compressed_tensors.py"
    if any(not weight.scheme.symmetric for weight in c.weights):
        return "experts with zero points raise 'Asymmetric quant requires zero-point values'.", f"{where}:128"
    if c.family == "gpt_oss":
        return "the experts' tensors are not recognised: they stay random, with a warning only.", f"{where}:63"
    if len(c.schemes()) > 1:
        return "not shown to load mixtures of experts with several schemes.", ""
    return None if c.family in TRANSFORMERS_EXPERTS else not_shown(c)


def transformers_layers(c: Checkpoint) -> tuple[str, str] | None:
    """Object to layers that quantkit's own reader does not replace, or that no other format was shown with."""
    if c.format == NATIVE and not any(last_name(weight) in TRANSPOSED for weight in c.linears):
        return None
    return unseen(c)


def marlin_experts(reader: str) -> Mixtures:
    """vLLM and SGLang fuse the experts: their methods assert symmetric weights; the symmetric ones were not run."""

    def test(c: Checkpoint) -> tuple[str, str] | None:
        if c.format == CT and quantizes_experts(c) and any(not weight.scheme.symmetric for weight in c.weights):
            return "asserts 'Only symmetric quantization is supported for MoE'.", reader
        return not_shown(c)

    return test
