"""Round linears, head and embeddings to the block formats of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from quantkit.algorithms.gptq import Loops, proxy_loss
from quantkit.algorithms.kquant import joined, kquant
from quantkit.algorithms.kquant_feedback import kquant_feedback
from quantkit.checkpoint.source import all_finite
from quantkit.checkpoint.writer import tensor_sha256
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import BlockResult, InputGroup, LayerReport
from quantkit.core.blocks import BlockCodes, block_kind
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import NumericsError
from quantkit.formats.ggml.blocks import encode
from quantkit.formats.gguf import BLOCKS

PIECE = 1 << 22  # weights that are encoded and measured at a time
Weighing = Callable[[str], Tensor | None]
"""The importance of a weight's inputs from a file, by its name in the checkpoint; None if the file has none."""


def round_block(
    options: ConvertOptions,
    loops: Loops,
    targets: Sequence[tuple[str, Target]],
    block: nn.Module,
    groups: Sequence[InputGroup],
    result: BlockResult,
    weighing: Weighing | None = None,
) -> None:
    """Round the linears of a block and fill ``result``; the block computes with the rounded weights from now on.

    options: of the conversion.
    loops: the kernel of GPTQ's loop over columns.
    targets: names inside the block, with the formats.
    block: float32 weights on the device; changed in place.
    groups: statistics of each input, with the names of the linears that read it.
    weighing: importance from a file.

    Raises NumericsError for a weight that is not finite.
    """
    by_name = {name: group for group in groups for name in group.names}
    for name, target in targets:
        raise_if_interrupted()
        linear: nn.Linear = block.get_submodule(name)  # type: ignore[assignment]
        group = by_name.get(name, InputGroup((name,)))
        weight = linear.weight.detach()
        if not all_finite(weight):
            raise NumericsError(f"{target.name}: the weight holds NaN or infinite values. Use a sound model.")
        found, damping, trouble = _round(options, loops, target, weight, group, weighing)
        rounded = found.dequantize()
        keep(target, found, weight, result, group=group, damping=damping, trouble=trouble)
        linear.weight = nn.Parameter(rounded, requires_grad=False)


def _round(
    options: ConvertOptions,
    loops: Loops,
    target: Target,
    weight: Tensor,
    group: InputGroup,
    weighing: Weighing | None,
) -> tuple[BlockCodes, float | None, str | None]:
    """Return the rounded weight, the damping it took, and what went otherwise than asked."""
    kind = block_kind(str(target.blocks))
    if weighing is not None:
        importance = weighing(target.name)
        lost = None if importance is not None else "the importance matrix has no entry for it: all inputs count alike"
        return kquant(weight, kind, importance), None, lost
    if options.method == "gptq" and group.hessian is not None:
        found, damping = kquant_feedback(weight, group.hessian, kind, options.damping, loops.columns)
        if damping is None:
            return found, None, "the Hessian could not be factorised even with full damping: no error feedback"
        return found, damping, None
    missing = options.calibrated and group.squares() is None
    lost = "no calibration token reached this layer: all inputs count alike" if missing else None
    return kquant(weight, kind, group.squares() if options.method != "rtn" else None), None, lost


def keep(
    target: Target,
    found: BlockCodes,
    weight: Tensor,
    result: BlockResult,
    *,
    group: InputGroup,
    damping: float | None = None,
    trouble: str | None = None,
) -> None:
    """Encode a rounded weight and report it, some rows at a time.

    target: what was rounded. found: the codes. weight: the original. group: its inputs' statistics.
    """
    packed = torch.empty(len(weight), found.kind.row_bytes(weight.shape[1]), dtype=torch.uint8)
    lost, energy, output_lost, output_energy = 0.0, 0.0, 0.0, 0.0
    measured = group.hessian is not None or group.root is not None
    step = max(1, PIECE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        part, original = found.rows(rows), weight[rows].float()
        rounded, packed[rows] = part.dequantize(), encode(part).cpu()
        lost += float((rounded - original).square().sum(dtype=torch.float64))
        energy += float(original.square().sum(dtype=torch.float64))
        if measured:
            loss, whole = proxy_loss(original, rounded, group.hessian, group.root)
            output_lost, output_energy = output_lost + loss, output_energy + whole
    reasons = [reason for reason in (target.fallback, trouble) if reason]
    result.parts[f"{target.name}.{BLOCKS}"] = packed
    result.digests[target.name] = f"{found.kind.name} {tensor_sha256(packed)}"
    result.layers.append(
        LayerReport(
            name=target.name,
            scheme=found.kind.name,
            relative_weight_error=(lost / max(energy, 1e-30)) ** 0.5,
            relative_output_error=(max(output_lost, 0.0) / max(output_energy, 1e-30)) ** 0.5 if measured else None,
            weights=weight.numel(),
            bits=8 * packed.numel(),
            damping=damping,
            fallback="; ".join(reasons) or None,
            tokens=group.tokens,
            dropped_tokens=group.dropped,
        )
    )


def round_matrix(target: Target, stored: Tensor, result: BlockResult, device: torch.device) -> None:
    """Round a head or an embedding, whose inputs have no statistics, and fill ``result``.

    target: what is rounded. stored: its values, finite. device: where rows are rounded.
    """
    kind, step = block_kind(str(target.blocks)), max(1, PIECE // stored.shape[1])
    found = joined([kquant(rows.to(device).float(), kind).to("cpu") for rows in stored.split(step)])
    keep(target, found, stored, result, group=InputGroup((target.name,)))
