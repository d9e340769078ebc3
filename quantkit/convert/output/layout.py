"""The layout of a converted model's modules, from which a format writes its config."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from quantkit.convert.plan.mtp_layers import matrices_without_module
from quantkit.convert.plan.targets import Target, head_embeddings
from quantkit.formats.interface import CheckpointLayout
from quantkit.model.language import language_model, name_of
from quantkit.model.mixture.routers import routers
from quantkit.model.weights import Weights


def checkpoint_layout(weights: Weights, targets: Mapping[str, Target], *, fp8_cache: bool) -> CheckpointLayout:
    """Name the modules that are quantized, with their schemes, and those that stay dense.

    The order is that of a repack's layout, too.

    weights: the source's tensors.
    targets: quantized weights, by module name of the skeleton.
    fp8_cache: the checkpoint stores the scales of an fp8 cache for other engines.
    """
    model, names = weights.model, weights.names
    decoder = language_model(model)
    inside = name_of(model, decoder)
    known = {f"{inside}.{name}" if inside else name for name in routers(decoder)}
    dense = [
        names[f"{name}.weight"].removesuffix(".weight") if f"{name}.weight" not in weights.tied else name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) and name not in targets) or name in known
    ]
    quantized = {target.name for target in targets.values()}
    dense += [name for name in matrices_without_module(weights) if name not in quantized]
    schemes = {target.name: target.scheme for target in targets.values()}
    names_of_head_embeddings = [target.name for target in head_embeddings(targets)]
    stored = weights.source.config
    dtype = stored.get("dtype") or stored.get("torch_dtype")
    return CheckpointLayout(
        dict(sorted(schemes.items())),
        sorted(dense),
        names_of_head_embeddings,
        fp8_cache,
        None if dtype is None else str(dtype),
    )
