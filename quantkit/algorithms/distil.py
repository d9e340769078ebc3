"""Distil end to end: scales and norms of all blocks learn, the codes stay as they are.

EfficientQAT's second phase (Chen et al., arXiv 2407.11062, section 3.3, E2E-QP) trains the scales of a quantized model
with frozen codes and zeros; here, as in DWQ of mlx-lm, the target is the original's distribution of the next token, not
the text: ``KL(original || quantized)``, mean over tokens. Zeros are integers, which no small step moves; norms learn
beside the scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme

CHUNK_ELEMENTS = 1 << 24  # logits at a time, of each model,
CHUNK_TOKENS = 128  # but those of so many tokens at least: a large head is read anew each time
ADAM_STEP_TOKENS = 2048  # of one step of the whole model: of fewer, the gradient is too noisy for what is nearly right
HELD = 16  # of so many steps' windows one is kept back: what the result is judged by
RESIDENT = 0.25  # of the free memory: codes that take less are held through the pass


def window_batch(windows: int, seq_len: int) -> int:
    """Count the windows of one step: ``ADAM_STEP_TOKENS``, fewer where that would leave less than eight steps."""
    return max(1, min(ADAM_STEP_TOKENS // seq_len, windows // 8))


@dataclass(frozen=True, slots=True)
class DistilOptions:
    """How the distillation learns.

    rate: largest step of Adam, relative to the size of what learns.
    warmup: steps until ``rate`` is reached; then half a cosine to zero.
    betas: of Adam (Kingma and Ba, arXiv 1412.6980), the second smaller than usual because steps are few.
    """

    rate: float = 3e-4
    warmup: int = 5
    betas: tuple[float, float] = (0.9, 0.95)


def rate_at(step: int, steps: int, options: DistilOptions) -> float:
    """Compute Adam's rate in step ``step`` of ``steps``, counted from 0."""
    return options.rate * min(1.0, (step + 1) / options.warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


class LearnedScales:
    """The scales of a quantized weight, learning: ``scale * exp(delta)``, delta float32 ``[out, groups]``, 0 at first.

    Relative steps suit scales, which differ by orders of magnitude and stay positive. The codes are given when they are
    used: they need not be held.
    """

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales.float()
        self.delta = nn.Parameter(torch.zeros_like(self.scales))

    def weight(self, q: QuantTensor) -> Tensor:
        """Compute ``(code - zero) * scale`` with the learned scales, float32 ``[out, in]``.

        Gradients reach ``delta``.
        """
        weight: Tensor = _Dequantize.apply(self.scales * self.delta.exp(), q)  # type: ignore[no-untyped-call]
        return weight

    @torch.no_grad()
    def result(self, q: QuantTensor) -> QuantTensor:
        """Return the same codes with the scales as they are now, rounded to their storage dtype."""
        return QuantTensor(q.codes, affine.store_scale(self.scales * self.delta.exp(), q.scheme), q.zeros, q.scheme)

    @torch.no_grad()
    def round_(self, scheme: Scheme) -> None:
        """Round the learned scales to their storage dtype, in place."""
        self.delta.copy_((affine.store_scale(self.scales * self.delta.exp(), scheme).float() / self.scales).log())


class _Dequantize(torch.autograd.Function):
    """``affine.dequantize`` with a gradient for the scales. Nothing as large as the weight is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, scales: Tensor, q: QuantTensor) -> Tensor:
        ctx.q = q
        return affine.dequantize(q.codes, scales, q.zeros, q.scheme)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        q: QuantTensor = ctx.q
        ones = torch.ones(q.scales.shape, device=grad.device)
        along = affine.dequantize(q.codes, ones, q.zeros, q.scheme).mul_(grad)
        return affine.split_groups(along, q.scheme).sum(-1), None


class LearnedNorm:
    """A norm's weight or bias that learns: ``w + unit * delta``, delta float32 like ``w`` and 0 at first.

    unit: the size of each entry, at least a tenth of the vector's root mean square.
    dtype: what it is stored in.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight.float(), dtype
        self.unit = self.weight.abs() + 0.1 * self.weight.square().mean().sqrt()
        self.delta = nn.Parameter(torch.zeros_like(self.weight))

    def value(self) -> Tensor:
        """Compute the learned values, float32, the shape of ``w``; gradients reach ``delta``."""
        return self.weight + self.unit * self.delta

    @torch.no_grad()
    def result(self) -> Tensor:
        """Return the learned values in the stored dtype."""
        return self.value().to(self.dtype)

    @torch.no_grad()
    def round_(self) -> None:
        """Round the learned values to the stored dtype, in place."""
        self.delta.copy_((self.result().float() - self.weight) / self.unit.clamp(min=1e-30))


Head = Callable[[Tensor], Tensor]  # final hidden states [tokens, hidden] -> logits [tokens, vocab]


def divergence(student: Tensor, teacher: Tensor, head: Head, original: Head, vocab: int) -> tuple[float, Tensor]:
    """Compute the mean of ``KL(original || quantized)`` over tokens, in nats, and its gradient for ``student``.

    Logits of ``chunk_tokens`` are held at a time, four times over. The gradient for logits is the difference of the two
    distributions. What learns inside ``head`` gets its gradient too. With gradients off, the gradient returned is zero.

    student, teacher: float32 ``[tokens, hidden]``, what both heads get.
    """
    count, total = len(student), 0.0
    grad = torch.zeros_like(student)
    for part in torch.arange(count).split(chunk_tokens(vocab)):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        leaf = student[rows].detach().requires_grad_(torch.is_grad_enabled())
        logits = head(leaf).float()
        with torch.no_grad():
            target = original(teacher[rows]).float().log_softmax(-1)
            log_probs, p = logits.log_softmax(-1), target.exp()
            total += float(target.sub_(log_probs).mul_(p).sum()) / count
            slope = log_probs.exp_().sub_(p).div_(count)
        if leaf.requires_grad:
            del target, p
            logits.backward(slope)
            assert leaf.grad is not None
            grad[rows] = leaf.grad
    return total, grad


def chunk_tokens(vocab: int) -> int:
    """Count the tokens whose logits are held at a time."""
    return max(CHUNK_TOKENS, CHUNK_ELEMENTS // vocab)
