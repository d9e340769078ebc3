"""The engines' verdicts on a plan, or on a quantized folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from quantkit.checkpoint.source import Source
from quantkit.convert.engine_table import bfloat16_scales
from quantkit.convert.engines import Checkpoint, Verdict, lint
from quantkit.convert.targets import Target
from quantkit.formats.reader import QuantizedReader
from quantkit.model.skeleton import build_skeleton, tied_parameters

if TYPE_CHECKING:
    from quantkit.convert.plan import Plan


def lint_plan(plan: Plan) -> list[Verdict]:
    """Which engines will load what this plan writes."""
    return lint(_checkpoint(plan.format.name, list(plan.targets.values()), plan.model.config, plan.source.config))


def casts_scales(plan: Plan) -> bool:
    """True if engines will compute in bfloat16 and the scales are stored finer than that."""
    check = _checkpoint(plan.format.name, list(plan.targets.values()), plan.model.config, plan.source.config)
    return bfloat16_scales(check) is not None


def lint_folder(source: Source) -> list[Verdict]:
    """Which engines load a quantized folder; from headers and config. Empty for formats that quantkit does not write.

    Raises CheckpointError for a folder that is incomplete.
    """
    from quantkit.runtime.load import place_modules

    reader = QuantizedReader(source)
    model: Any = build_skeleton(source.config)
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights, places = [], place_modules(model, reader, str(source.path))
    for name, place in places.items():
        scheme = reader.scheme(name)
        if isinstance(scheme, str):
            return []
        module: Any = model.get_submodule(place)
        kind = "linear"
        if isinstance(module, nn.Embedding) and module is embed:
            kind = "tied" if tied_parameters(model) else "embedding"
        elif module is head:
            kind = "head"
        out_features, in_features = module.weight.shape
        weights.append(Target(name, f"{name}.weight", out_features, in_features, scheme, kind))
    return lint(_checkpoint(str(reader.format), weights, model.config, source.config))


def _checkpoint(form: str, weights: list[Target], config: Any, stored: Any) -> Checkpoint:
    weights = sorted(weights, key=lambda weight: weight.name)  # a file and a plan give the same reasons
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads)
    dtype = str(stored.get("dtype") or stored.get("torch_dtype") or "")
    mixture = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return Checkpoint(
        form, weights, heads, kv_heads, dtype.endswith("bfloat16"), str(getattr(config, "model_type", "")), mixture
    )
