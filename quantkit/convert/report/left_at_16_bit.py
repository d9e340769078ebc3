"""What of a model is not quantized, in words: towers, embeddings, gates, convolutions, layers that are only copied."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from torch import nn

from quantkit.checkpoint.names import COMPUTED
from quantkit.convert.plan.mtp_layers import mtp_names
from quantkit.convert.plan.targets import block_targets
from quantkit.model.language import output_embeddings, towers
from quantkit.model.linears.kept_dense import kept_dense
from quantkit.model.skeleton import Blocks
from quantkit.model.weights import Weights

MTP = "predicts further tokens; --quantize-mtp"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class LeftOut:
    """Weights that stay as they are, for one reason.

    name: of the parameters, numbers of layers and experts as ``*``.
    reason: in words.
    tensors: how many.
    weights: in all of them.
    """

    name: str
    reason: str
    tensors: int
    weights: int


def left_at_16_bit(weights: Weights, blocks: Blocks, quantized: Collection[str] | None = None) -> list[LeftOut]:
    """Return what a conversion copies, in the model's order; norms, biases and other vectors as one entry.

    weights: of the skeleton. blocks: its decoder blocks. quantized: parameters that are not copied; None for what is
    quantized without rules, the linears of the blocks.
    """
    if quantized is None:
        quantized = {f"{name}.weight" for name in block_targets(blocks, weights)}
    reasons = _reasons(weights, blocks, quantized)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, (shown, reason, size) in reasons.items():
        if name not in weights.tied:
            counts[shown, reason] += 1
            sizes[shown, reason] += size
    return [LeftOut(shown, reason, count, sizes[shown, reason]) for (shown, reason), count in counts.items()]


def _reasons(weights: Weights, blocks: Blocks, quantized: Collection[str]) -> dict[str, tuple[str, str, int]]:
    """Return name to show, reason and number of weights of everything that is not quantized, by its name."""
    beside = [f"{tower}." for tower in towers(weights.model)]
    kept = {
        f"{blocks.name(index)}.{name}": reason
        for index, block in enumerate(blocks.modules)
        for name, reason in kept_dense(block).items()
    }
    found = {}
    for name in (*weights.parameters, *weights.stored_buffers):
        if name in quantized:
            continue
        tower = next((prefix for prefix in beside if name.startswith(prefix)), None)
        shown, reason = (f"{tower}*", "tower") if tower else _reason(weights, name, kept, blocks.prefix)
        found[name] = (shown, reason, weights.tensor(name).numel())
    used = {name for ref in weights.sources.values() for name in (ref.joined or (ref.name,))}
    further = mtp_names(weights, blocks)
    for name in weights.source.names():
        if name not in used and not name.endswith(COMPUTED) and name not in quantized:
            layer = next((prefix for prefix in further if name.startswith(prefix)), None)
            shown, reason = (f"{layer}*", MTP) if layer else (_outermost(name), "not run: copied")
            found[name] = (shown, reason, prod(weights.source.info(name).shape))
    return found


def _outermost(name: str) -> str:
    return f"{NUMBER.sub('*', name.rpartition('.')[0]).partition('*')[0]}*"


def _reason(weights: Weights, name: str, kept: dict[str, str], prefix: str) -> tuple[str, str]:
    owner, _, local = name.rpartition(".")
    module = weights.model.get_submodule(owner)
    if weights.tensor(name).dim() < 2:
        return "norms, biases, other vectors", ""
    shown = NUMBER.sub("*", name)
    if owner in kept and local == "weight":
        return shown, kept[owner]
    if module is output_embeddings(weights.model):
        return shown, "head"
    if isinstance(module, nn.Embedding):
        return shown, "embedding"
    if name in weights.stored_buffers:
        return shown, "stored buffer"
    if name in weights.tied.values() and isinstance(module, nn.Linear):
        return shown, "shared by several blocks"
    if isinstance(module, nn.Linear):
        return shown, "a rule" if name.startswith(f"{prefix}.") else "outside the decoder blocks"
    return shown, f"no linear ({type(module).__name__})"
