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
from quantkit.convert.plan.memory import CHUNK
from quantkit.convert.plan.targets import Target, second_copy
from quantkit.convert.results import BlockResult, LayerReport, decision_sha256
from quantkit.convert.stages.gguf_blocks import round_matrix
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.core.qtensor import QuantTensor
from quantkit.errors import NumericsError, SourceError
from quantkit.formats.interface import Format
from quantkit.model.weights import Weights


def quantize_head_or_embedding(
    target: Target, result: BlockResult, *, weights: Weights, format: Format, device: torch.device, scales: Scales
) -> None:
    """Quantize one head or embedding and fill ``result``.

    target: the weight and its scheme.
    result: gets the packed tensors, the digest and the report.
    weights: the source's tensors.
    format: the format that is written.
    device: where rows are quantized, a few at a time.
    scales: how ranges are found.

    Raises NumericsError for NaN or overflow, SourceError if a tied matrix is stored twice with different values.
    """
    if target.blocks is not None:
        name = weights.stored(target.parameter)
        stored = finite(weights.source.read(name), weights.source.path, name)
        _require_one_matrix(target, weights, stored)
        round_matrix(target, stored, result, device)
        return
    q, error = _round(target, weights, device, scales)
    result.digests[target.name] = decision_sha256(q)
    result.parts.update({f"{target.name}.{part}": value for part, value in format.encode(q).items()})
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


def _round(target: Target, weights: Weights, device: torch.device, scales: Scales) -> tuple[QuantTensor, float]:
    """Return the quantized weight and its relative error."""
    name = weights.stored(target.parameter)
    stored = weights.source.read(name)
    _require_one_matrix(target, weights, stored)
    scheme, groups = target.scheme, target.scheme.groups(target.in_features)
    codes = torch.empty(stored.shape, dtype=torch.uint8)
    steps = torch.empty(target.out_features, groups, dtype=scheme.torch_scale_dtype)
    zeros = None if scheme.symmetric else torch.empty(target.out_features, groups, dtype=torch.int16)
    lost, energy = 0.0, 0.0
    size = max(1, CHUNK // target.in_features)
    for start in range(0, target.out_features, size):
        rows = slice(start, start + size)
        weight = finite(stored[rows].to(device).float(), weights.source.path, name)
        q = _chunk(target, weight, scales)
        host = q.to("cpu")
        codes[rows], steps[rows] = host.codes, host.scales
        if zeros is not None and host.zeros is not None:
            zeros[rows] = host.zeros
        lost += float((q.dequantize() - weight).square().sum(dtype=torch.float64))
        energy += float(weight.square().sum(dtype=torch.float64))
    return QuantTensor(codes, steps, zeros, scheme), (lost / max(energy, 1e-30)) ** 0.5


def _require_one_matrix(target: Target, weights: Weights, stored: Tensor) -> None:
    """Raise SourceError if a tied matrix is stored a second time, with other values."""
    twin, name = second_copy(weights, target), weights.stored(target.parameter)
    if twin is not None and not torch.equal(weights.source.read(twin), stored):
        raise SourceError(
            f"{weights.source.path}: config.json ties {twin!r} to {name!r}, but the file stores two different"
            ' matrices. Set "tie_word_embeddings": false in config.json; then give each its own rule.'
        )


def _chunk(target: Target, weight: Tensor, scales: Scales) -> QuantTensor:
    try:
        return rtn(weight, target.scheme, scales).quantized
    except NumericsError as error:
        raise NumericsError(f"{target.name}: {error}") from error
