"""Measure sensitivity: what rounding a weight does to the model's output, nats of KL per token, to second order.

A change D of a linear's weight changes its output by D x and the log-probability of a token by g . D x, where g is the
gradient of that log-probability at the output. For labels drawn from the model itself the mean of (g . D x)^2 / 2 is
the KL divergence between the model and the changed one (the Fisher information is the Hessian of KL; Amari, Natural
Gradient, section 3). g comes from one pass back through the blocks, one block in memory at a time, with one label drawn
per position. Changes at two positions of one linear, and of two linears, are taken for uncorrelated: sums of squares,
not squares of sums (as diagonal Fisher weights do; LeCun et al., Optimal Brain Damage). Linears that read one tensor
and are changed together are summed before the square is taken.

Few tokens decide such a mean, and it differs by a third between two texts. So only what one part has in common over all
its options is taken from it; how the options compare comes from |g|^2 |D x|^2, a mean over all directions, which hardly
varies (``steadied``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import BlockArguments
from quantkit.model.language import output_embeddings
from quantkit.model.skeleton import Blocks
from quantkit.model.stepper import forward_block, forward_tail, gradients_in_order

Rounding = Callable[[Tensor], Tensor]  # rows of a weight [rows, in] -> what rounding makes of them
TAIL_TOKENS = 128  # of which logits are held at a time
# weights by name, root mean square of their inputs [in] -> factors [in], None for no scaling
Scaling = Callable[[Mapping[str, Tensor], Tensor], Tensor | None]
FEWEST = 16  # tokens that tell the size of channels: factors from fewer fit those tokens and flatter (an expert's)
HEAD_TOKENS = 256  # on which a head's sensitivity is measured
STRIDE = 4  # of the tokens that pass, every so manieth is kept
CHUNK = 1 << 21  # elements of a matrix outside the blocks that are rounded at a time


@dataclass
class Read:
    """One tensor that linears read in one window.

    x: the tensor, [tokens, in].
    gradients: by linear, those at its output [tokens, out].
    """

    x: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


def backward(
    block: nn.Module, hidden: Tensor, call: BlockArguments, gradient: Tensor, names: Sequence[str]
) -> tuple[Tensor, list[Read]]:
    """Take one window back through a block: gradients at its output -> those at its input.

    Also returns what ``names`` (linears) read on the way.

    hidden, gradient: ``[1, tokens, hidden]`` on the block's device.
    """
    reads: dict[tuple[int, int], Read] = {}
    alive: list[Tensor] = []  # a freed input's address could be reused by another one

    def hook(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = args[0]
            if not output.requires_grad:
                return
            key = x.data_ptr(), x._version
            if key not in reads:
                alive.append(x)
                reads[key] = Read(_thinned(x))
            read = reads[key]
            output.register_hook(lambda g: read.gradients.__setitem__(name, _thinned(g)))

        return after

    handles = [block.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    try:
        with torch.enable_grad(), gradients_in_order(hidden.device):
            start = hidden.detach().requires_grad_(True)
            out = forward_block(block, start, call)
            (at_input,) = torch.autograd.grad(out, start, gradient)
    finally:
        for handle in handles:
            handle.remove()
    return at_input, list(reads.values())


def _thinned(value: Tensor) -> Tensor:
    return value.detach().flatten(0, -2)[::STRIDE].clone()


@torch.no_grad()
def rounding_sensitivity(
    weights: Mapping[str, Tensor],
    reads: Sequence[Read],
    roundings: Sequence[Rounding],
    tokens: int,
    scaling: Scaling | None = None,
) -> list[float]:
    """Measure the nats of KL per token that each rounding of these linears adds, changed together.

    tokens: how many positions were scored in all.
    scaling: factors of the input channels; what is rounded are the weights times these, as a method does that scales
        channels.

    Raises UnsupportedModel if none of them was seen to run.
    """
    bundles: dict[tuple[str, ...], list[Read]] = {}
    for read in reads:
        mine = tuple(name for name in weights if name in read.gradients)
        if mine:
            bundles.setdefault(mine, []).append(read)
    if not bundles:
        raise UnsupportedModel(
            f"{', '.join(weights)}: what rounding costs cannot be measured, no token passes through."
        )
    direct, rough = ([0.0] * len(roundings) for _ in range(2))
    for names, bundle in bundles.items():
        mine_only = {name: weights[name] for name in names}
        enough = sum(len(read.x) for read in bundle) >= FEWEST
        factors = scaling(mine_only, _size([read.x for read in bundle])) if scaling is not None and enough else None
        for i, rounding in enumerate(roundings):
            changes = {name: _change(weight, rounding, factors) for name, weight in mine_only.items()}
            for read in bundle:
                moved = torch.zeros(len(read.x), dtype=torch.float64, device=read.x.device)
                for name, change in changes.items():
                    out, gradient = read.x @ change.t(), read.gradients[name]
                    moved += (out * gradient).sum(-1)
                    rough[i] += float((out.square().mean(-1) * gradient.square().sum(-1)).sum(dtype=torch.float64))
                direct[i] += float(moved.square().sum())
    return [total * STRIDE / (2 * tokens) for total in steadied(direct, rough)]


def _size(inputs: Sequence[Tensor]) -> Tensor:
    """Root mean square of each channel of [tokens, in]."""
    total = sum((x.float().square().sum(0) for x in inputs), torch.zeros(inputs[0].shape[1], device=inputs[0].device))
    return (total / sum(len(x) for x in inputs)).sqrt()


def _change(weight: Tensor, rounding: Rounding, factors: Tensor | None) -> Tensor:
    if factors is None:
        return rounding(weight) - weight
    return rounding(weight * factors).div_(factors).sub_(weight)


def steadied(direct: Sequence[float], rough: Sequence[float]) -> list[float]:
    """Scale ``rough`` by one factor, the geometric mean of ``direct / rough``."""
    ratios = [math.log(d / r) for d, r in zip(direct, rough, strict=True) if d > 0 and r > 0]
    factor = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
    return [factor * value for value in rough]


def tail_gradient(model: nn.Module, blocks: Blocks, ids: Tensor, hidden: Tensor, draws: Tensor) -> Tensor:
    """Compute the gradients ``[1, tokens, hidden]`` of log-probabilities at the last block's output.

    The labels are drawn from the model.

    ids, hidden: of one window.
    draws: uniform numbers ``[tokens]``, one per label.
    """
    gradients = []
    parts = zip(ids.split(TAIL_TOKENS, 1), hidden.split(TAIL_TOKENS, 1), draws.split(TAIL_TOKENS), strict=True)
    for some_ids, part, uniform in parts:
        with torch.enable_grad():
            start = part.detach().requires_grad_(True)
            logits = forward_tail(model, blocks, some_ids, start)
            push = -torch.softmax(logits.detach().float()[0], -1)
            labels = torch.searchsorted(-push.double().cumsum(-1), uniform.to(push.device, torch.float64)[:, None])
            push.scatter_add_(1, labels.clamp_(max=push.shape[-1] - 1), torch.ones_like(labels, dtype=push.dtype))
            (gradient,) = torch.autograd.grad(logits, start, push[None].to(logits.dtype))
        gradients.append(gradient)
    return torch.cat(gradients, 1)


def channel_shares(gradients: Sequence[Tensor]) -> Tensor:
    """Compute channel importance: each output channel's share of every token's squared gradient, mean over tokens.

    The mean over channels is 1. The gradients' mean square is the diagonal of the Fisher information of that output;
    BRECQ (Li et al., arXiv 2102.05426, section 3.3) weighs by squares of the task's gradient, sample by sample. Here
    each token counts the same, for the first one's gradient can be a hundred times the others'.

    gradients: ``[1, tokens, hidden]`` at the block's output, of labels drawn from the model. Tokens whose gradient is
        zero or not finite are left out.
    Returns float32 ``[hidden]``; ones, if all tokens are left out.
    """
    squares = torch.cat([gradient.flatten(0, -2) for gradient in gradients]).double().square()
    shares = squares / squares.sum(-1, keepdim=True)
    shares = shares[torch.isfinite(shares).all(-1)]
    if not len(shares):
        return torch.ones(squares.shape[-1], device=squares.device)
    mean = shares.mean(0)
    return (mean / mean.mean()).float()


@dataclass
class HeadReads:
    """What a head reads, and its probabilities, on a few tokens.

    x: [tokens, hidden].
    p: probabilities [tokens, vocabulary].
    slope: of the logits in the head's output, elementwise (1 but for soft caps and factors), [tokens, vocabulary].
    """

    x: Tensor
    p: Tensor
    slope: Tensor


def head_reads(model: nn.Module, blocks: Blocks, ids: Tensor, hidden: Tensor) -> HeadReads:
    """Run the tail and record what the head reads.

    ids: ``[1, tokens]``.
    hidden: the last block's output there.
    """
    head: Any = output_embeddings(model)
    seen: list[tuple[Tensor, Tensor]] = []
    handle = head.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    reads = []
    try:
        for some_ids, part in zip(ids.split(TAIL_TOKENS, 1), hidden.split(TAIL_TOKENS, 1), strict=True):
            seen.clear()
            with torch.enable_grad():
                logits = forward_tail(model, blocks, some_ids, part.detach().requires_grad_(True))
                x, out = seen[-1]
                slope = torch.ones_like(logits) if out is logits else torch.autograd.grad(logits.sum(), out)[0]
            reads.append(
                [tensor.detach().float().flatten(0, -2) for tensor in (x, torch.softmax(logits.float(), -1), slope)]
            )
    finally:
        handle.remove()
    return HeadReads(*(torch.cat(parts) for parts in zip(*reads, strict=True)))


@torch.no_grad()
def head_sensitivity(weight: Tensor, reads: HeadReads, rounding: Rounding) -> float:
    """Measure the nats of KL per token that a rounded head ``[vocabulary, hidden]`` adds, to second order.

    Half the variance of the change of the logits under the model's own probabilities. A few rows are rounded at a time.
    """
    first, second = (torch.zeros(len(reads.x), dtype=torch.float64, device=reads.x.device) for _ in range(2))
    start = 0
    for rows in weight.split(max(1, CHUNK // weight.shape[1])):
        rows = rows.to(reads.x.device)
        there = slice(start, start + len(rows))
        change = (reads.x @ (rounding(rows) - rows).t()) * reads.slope[:, there]
        first += (reads.p[:, there] * change).sum(-1)
        second += (reads.p[:, there] * change.square()).sum(-1)
        start += len(rows)
    return float((second - first.square()).clamp(min=0).mean() / 2)
