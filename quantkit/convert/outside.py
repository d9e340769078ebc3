"""Quantize what lies outside the blocks (head, embeddings, or the one matrix that is both) by searched rounding.

A lookup has no statistic of inputs, so embeddings are rounded without data; the head gets the same treatment. Rows are
independent, so a vocabulary of any size is worked through a few rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.algorithms import Scales
from quantkit.algorithms.rtn import rtn
from quantkit.checkpoint.source import finite
from quantkit.convert.block import BlockResult
from quantkit.convert.memory import CHUNK
from quantkit.convert.plan import Plan
from quantkit.convert.report import LayerReport
from quantkit.convert.targets import Target, second_copy
from quantkit.convert.verify import decision_sha256
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.core.qtensor import QuantTensor
from quantkit.errors import NumericsError, SourceError


def quantize_outside(plan: Plan, target: Target, result: BlockResult) -> None:
    """Quantize one such weight and fill ``result``. Raises NumericsError (NaN, overflow), SourceError (a false tie)."""
    q, error = _round(plan, target)
    result.decisions[target.name] = decision_sha256(q)
    result.parts.update({f"{target.name}.{part}": value for part, value in plan.format.encode(q).items()})
    result.layers.append(
        LayerReport(
            name=target.name,
            scheme=q.scheme.describe(),
            relative_weight_error=error,
            relative_output_error=None,
            weights=q.codes.numel(),
            bits=q.bits_stored,
            damping=None,
            fallback=None,
            raised_scales=int((q.scales.float() <= SMALLEST_SCALE).sum()),
            tokens=0,
            dropped_tokens=0,
        )
    )


def _round(plan: Plan, target: Target) -> tuple[QuantTensor, float]:
    """The quantized weight and its relative error."""
    name = plan.weights.stored(target.parameter)
    stored = plan.source.read(name)
    twin = second_copy(plan.weights, target)
    if twin is not None and not torch.equal(plan.source.read(twin), stored):
        raise SourceError(
            f"{plan.source.path}: config.json ties {twin!r} to {name!r}, but the file stores two different matrices. "
            'Set "tie_word_embeddings": false in config.json; then give each its own rule.'
        )
    scheme, groups = target.scheme, target.scheme.groups(target.in_features)
    codes = torch.empty(stored.shape, dtype=torch.uint8)
    steps = torch.empty(target.out_features, groups, dtype=scheme.torch_scale_dtype)
    zeros = None if scheme.symmetric else torch.empty(target.out_features, groups, dtype=torch.int16)
    lost, energy = 0.0, 0.0
    size = max(1, CHUNK // target.in_features)
    for start in range(0, target.out_features, size):
        rows = slice(start, start + size)
        weight = finite(stored[rows].to(plan.device).float(), plan.source.path, name)
        q = _chunk(plan, target, weight)
        host = q.to("cpu")
        codes[rows], steps[rows] = host.codes, host.scales
        if zeros is not None and host.zeros is not None:
            zeros[rows] = host.zeros
        lost += float((q.dequantize() - weight).square().sum(dtype=torch.float64))
        energy += float(weight.square().sum(dtype=torch.float64))
    return QuantTensor(codes, steps, zeros, scheme), (lost / max(energy, 1e-30)) ** 0.5


def _chunk(plan: Plan, target: Target, weight: Tensor) -> QuantTensor:
    scales: Scales = "minmax" if plan.options.scales == "minmax" else "search"
    try:
        return rtn(weight, target.scheme, scales).quantized
    except NumericsError as error:
        raise NumericsError(f"{target.name}: {error}") from error
