"""The data that stages of a conversion pass to each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantkit.algorithms.guide import Guide
from quantkit.algorithms.kv import LayerRanges
from quantkit.checkpoint.storage.record import POSITIVE, Either
from quantkit.checkpoint.writer import tensor_sha256
from quantkit.core.blocks import BlockKind
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme

Way = Scheme | BlockKind | None
"""How a weight may be rounded: by a scheme, to a block format of a GGUF file, or not at all."""


@dataclass
class InputGroup:
    """Linears of a block that read one tensor, and the statistics of that tensor.

    names: of the linears, inside the block.
    hessian: [in, in], the mean of x xᵀ over ``tokens``, on the block's device; None without data, and beside a root.
    root: float32 [tokens, in], R with Rᵀ R the Hessian, where nobody reads correlations and that is smaller; else None.
    tokens: how many were counted.
    dropped: how many were not finite.
    largest: float32 [in], the largest |x| per channel; None without data.
    cross: [in, in], the mean of (y - x) xᵀ, where y is the original model's input in the place of x
        (``algorithms.PAIRED`` methods; never for experts); else None.
    """

    names: tuple[str, ...]
    hessian: Tensor | None = None
    tokens: int = 0
    dropped: int = 0
    largest: Tensor | None = None
    cross: Tensor | None = None
    root: Tensor | None = None

    def squares(self) -> Tensor | None:
        """Return the mean of each input's square, float [in]: the Hessian's diagonal; None without data."""
        if self.root is not None:
            return self.root.square().sum(0)
        return None if self.hessian is None else self.hessian.diagonal()

    def scale(self, columns: Tensor) -> None:
        """Divide the inputs by factors, float [in]."""
        for matrix in (self.hessian, self.cross):
            if matrix is not None:
                matrix.div_(columns.double()[:, None]).div_(columns.double()[None, :])
        for rows in (self.root, self.largest):
            if rows is not None:
                rows.div_(columns)


@dataclass
class BlockResult:
    """The results of one block that checkpoint, verification and report need."""

    # By stored name.
    parts: dict[str, Tensor] = field(default_factory=dict)
    # Module name -> decision_sha256.
    digests: dict[str, str] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    # By attention module.
    kv: dict[str, LayerRanges] = field(default_factory=dict)
    # End in the report, the JSON and the manifest.
    notes: list[str] = field(default_factory=list)
    # Block -> kind of producer -> can be scaled.
    folds: dict[str, dict[str, bool]] = field(default_factory=dict)
    # block -> before, after: ``tune.block_error`` of its output on text held back, weighted by channel; step: of
    # learning that was the best
    tuning: dict[str, dict[str, float]] = field(default_factory=dict)
    # of the end-to-end pass: steps, windows and tokens learned from, windows kept back, divergence on those before and
    # after, whether it stands
    distilled: dict[str, Any] | None = None


@dataclass
class Collected:
    """The results of all blocks that report and verification need, fields as in ``BlockResult``."""

    digests: dict[str, str] = field(default_factory=dict)
    kv: dict[str, LayerRanges] = field(default_factory=dict)
    folds: dict[str, dict[str, bool]] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tuning: dict[str, dict[str, float]] = field(default_factory=dict)
    distilled: dict[str, Any] | None = None

    def add(self, result: BlockResult) -> None:
        """Add a finished block's facts, without its tensors."""
        self.digests.update(result.digests)
        self.kv.update(result.kv)
        self.folds.update(result.folds)
        self.layers += result.layers
        self.notes += result.notes
        self.tuning.update(result.tuning)
        self.distilled = self.distilled if result.distilled is None else result.distilled

    def last_error(self) -> str:
        """Return the last layer's output error, for a progress bar."""
        if not self.layers or self.layers[-1].relative_output_error is None:
            return ""
        return f"{self.layers[-1].name.rpartition('.')[2]} error {self.layers[-1].relative_output_error:.1%}"


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The report of one linear.

    relative_output_error: ``sqrt(tr(D H Dᵀ) / tr(W H Wᵀ))``, None without data (H is then unknown).
    relative_weight_error: None after a repack, which does not see the original.
    """

    name: str
    scheme: str
    relative_weight_error: float | None
    relative_output_error: float | None
    weights: int
    # Stored, scales and zeros counted.
    bits: int
    damping: float | None = None
    fallback: str | None = None
    # Groups whose scale was raised to the smallest normal fp16.
    raised_scales: int = 0
    # Calibration tokens behind its statistics, 0 without data.
    tokens: int = 0
    # Tokens that were left out because they were not finite.
    dropped_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, errors rounded."""
        return {
            "name": self.name,
            "scheme": self.scheme,
            "relative_weight_error": _short(self.relative_weight_error),
            "relative_output_error": _short(self.relative_output_error),
            "bits_per_weight": _short(self.bits / self.weights),
            "damping": self.damping,
            "fallback": self.fallback,
            "raised_scales": self.raised_scales,
            "tokens": self.tokens,
            "dropped_tokens": self.dropped_tokens,
        }


# the records of a LayerReport, of a block in ``BlockResult.tuning`` and of ``BlockResult.distilled``, as
# checkpoint/storage/record.py checks them
LAYER = {
    "name": str, "scheme": str, "relative_weight_error": Either(None, float),
    "relative_output_error": Either(None, float), "weights": POSITIVE, "bits": int, "damping": Either(None, float),
    "fallback": Either(None, str), "raised_scales": int, "tokens": int, "dropped_tokens": int,
}  # fmt: skip
TUNED = {"before": float, "after": float, "step": float}
DISTILLED = {
    "steps": int, "windows_learned": int, "tokens_learned": int, "windows_kept_back": int,
    "kl_before": Either(None, float), "kl_after": Either(None, float), "kept": bool,
}  # fmt: skip


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


SIGN_STEP_TOKENS = 2048  # that a step of tuning learns from: half as many steps of these beat twice as many of 1024
WINDOWS, TOKENS = 8, 512  # of calibration text that sensitivity is measured on


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that get one scheme: fused linears (q/k/v, gate/up), or head or embeddings.

    members: module names of the skeleton.
    kind: "linear", or one of ``targets.HEAD_EMBEDDINGS``.
    options: schemes it may get, or block formats of a GGUF file; None for 16 bit.
    """

    members: tuple[str, ...]
    kind: str
    options: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of the sensitivity pass, on the host.

    sensitivity: for each option of each unit, the KL divergence that rounding it alone adds, in nats per token.
    channels: by block, float32 [hidden], ``sensitivity.channel_shares`` of its output.
    guides: by block, what predicts token-importance weights; None if nothing needs them.
    """

    sensitivity: list[list[float]]
    channels: list[Tensor]
    guides: list[Guide | None] | None = None


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """The options that were chosen for the units of a bit budget.

    taken: the index of each unit's option.
    sensitivity: as in ``Measured``.
    measured_on: name of the text, windows, tokens per window.
    """

    taken: tuple[int, ...]
    sensitivity: list[list[float]]
    measured_on: dict[str, Any]


def packed_sha256(q: QuantTensor | BlockTensor) -> str:
    """Return what ``decision_sha256`` does, of codes as they are packed: half the bytes, and nothing is unpacked."""
    if isinstance(q, BlockTensor):
        return decision_sha256(q)
    parts = [tensor_sha256(q.words), tensor_sha256(q.scales), "" if q.zeros is None else tensor_sha256(q.zeros)]
    return " ".join([*parts, json.dumps([*q.shape]), json.dumps(q.scheme.to_json(), sort_keys=True)])


def decision_sha256(q: QuantTensor | BlockTensor) -> str:
    """Return a SHA-256 of codes, scales, zeros and scheme, which does not depend on the format.

    Of a weight in another number format: of its tensors, by name, and its shape.
    """
    if isinstance(q, BlockTensor):
        named = [f"{name} {tensor_sha256(value)}" for name, value in sorted(q.raw.items())]
        return " ".join([q.kind, *named, json.dumps(q.shape)])
    parts = [tensor_sha256(q.codes), tensor_sha256(q.scales), "" if q.zeros is None else tensor_sha256(q.zeros)]
    return " ".join([*parts, json.dumps(q.scheme.to_json(), sort_keys=True)])
