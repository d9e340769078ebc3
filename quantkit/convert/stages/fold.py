"""The fold stage of the loop: scale a block's channels between observing and quantizing it.

Factors come from AWQ's search, where that costs less error, or from SmoothQuant's formula. Nothing remains to be done
at run time: factors are multiplied into the weights. A norm's weight is rounded to its stored dtype first, and its
consumers are multiplied by the factor that the rounded weight stands for: the written model is the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.algorithms.awq import Consumer, search_factors, thin_stack
from quantkit.algorithms.hqq import search_channel_factors
from quantkit.algorithms.smooth import FoldReader, smooth_factors
from quantkit.calibrate.stats import LARGEST_NORM
from quantkit.convert.plan.targets import Target
from quantkit.convert.results import BlockResult, InputGroup
from quantkit.core.affine import SMALLEST_SCALE
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError
from quantkit.model.arguments import BlockArguments
from quantkit.model.folds import Fold, apply_fold, find_folds, scaled_parameters, shared_modules
from quantkit.model.patterns import short_names
from quantkit.model.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Folding:
    """The channel scaling that all blocks of a conversion share.

    method: the name of the method, which decides how factors are found.
    weights: the source's tensors.
    targets: weights that will be quantized, by module name of the skeleton.
    rewritten: parameters of the blocks that stay at 16 bit and may be scaled.
    """

    method: str
    weights: Weights
    targets: Mapping[str, Target]
    rewritten: Sequence[str]

    def stored_dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype in which the source stores a parameter."""
        return self.weights.source.info(self.weights.stored(parameter)).dtype


@torch.no_grad()
def fold_block(
    folding: Folding,
    prefix: str,
    block: nn.Module,
    groups: Sequence[InputGroup],
    hidden: Tensor,
    call: BlockArguments,
    result: BlockResult,
) -> list[tuple[Fold, Tensor]]:
    """Scale the channels of a block; weights and Hessians change in place.

    Returns the folds that were scaled, with their factors (float32 [channels]).

    folding: method and targets of the conversion.
    prefix: the block's module name in the model.
    block: float32 weights on the device.
    groups: statistics of each input, with the names of the linears that read it.
    hidden: a few tokens to find the folds with, [1, tokens, hidden].
    call: the block's arguments for as many tokens.
    result: gets scaled weights that are not quantized in ``parts``, in their stored dtype, and notes.
    """
    done = []
    search = find_folds(block, hidden, call, shared_modules(folding.weights.model, prefix))
    kinds = dict.fromkeys(short_names(refusal.producer for refusal in search.refused), False)
    result.folds[prefix] = {**kinds, **dict.fromkeys(short_names(fold.producer for fold in search.accepted), True)}
    if not search.accepted:
        reasons = "; ".join(f"{refusal.producer}: {refusal.reason}" for refusal in search.refused)
        result.notes.append(f"{prefix}: no channels can be scaled ({reasons or 'nothing in it scales channels'})")
    for fold in search.accepted:
        stage = _FoldStep(folding, prefix, block, fold)
        factors, trouble = _factors(stage, groups)
        if not bool((factors == 1).all()):
            trouble = stage.apply(factors, groups)
            done.append((fold, factors if trouble is None else torch.ones_like(factors)))
        if trouble is not None:
            result.notes.append(f"{prefix}.{fold.producer}: {trouble}")
    for name in folding.rewritten:
        if name.startswith(f"{prefix}."):
            parameter = block.get_parameter(name.removeprefix(f"{prefix}."))
            value = parameter.to(folding.stored_dtype(name)).cpu()
            result.parts[folding.weights.names[name]] = folding.weights.as_stored(name, value)
    return done


def missing_folds(by_block: Mapping[str, Mapping[str, bool]]) -> list[str]:
    """Return notes on blocks in which a fold was refused that other blocks of the same producers allow.

    by_block: ``BlockResult.folds`` by block. Blocks without any fold have a note already.
    """
    usual: dict[frozenset[str], set[str]] = {}
    for folds in by_block.values():
        usual.setdefault(frozenset(folds), set()).update(kind for kind, scaled in folds.items() if scaled)
    notes = []
    for name, folds in by_block.items():
        missing = sorted(kind for kind in usual[frozenset(folds)] if not folds[kind])
        if missing and any(folds.values()):
            notes.append(f"{name}: the channels of {', '.join(missing)} are not scaled, unlike in other blocks")
    return notes


def take_tokens(states: Sequence[Tensor], tokens: int) -> Tensor:
    """Pick a few finite tokens of the hidden states: [1, tokens, hidden].

    They are the beginning of the first window where all are finite, else the first finite ones. Folds are found by
    comparing outputs: one NaN would refuse them all. With too few finite tokens the first tokens are returned; the
    statistics then refuse such states with the reason (``Hessian.result``).

    states: batches, float32 [windows, tokens, hidden].
    tokens: how many to pick.
    """
    for state in states:
        usable = torch.linalg.vector_norm(state[:, :tokens].float(), dim=-1) < LARGEST_NORM
        for window in usable.all(1).nonzero().flatten().tolist():
            return state[window : window + 1, :tokens].clone()
    rows: list[Tensor] = []
    for state in states:
        flat = state.flatten(0, 1)
        rows += flat[torch.linalg.vector_norm(flat.float(), dim=-1) < LARGEST_NORM][: tokens - len(rows)]
        if len(rows) == tokens:
            return torch.stack(rows)[None]
    return states[0][:1, :tokens].clone()


def _factors(stage: _FoldStep, groups: Sequence[InputGroup]) -> tuple[Tensor, str | None]:
    """Return the method's factors for one fold, float32 [channels], and why it failed, None if not.

    Factors are ones if no quantized linear reads the fold, or if the method failed.
    """
    folding, fold = stage.folding, stage.fold
    ones = torch.ones(fold.channels, device=stage.weight.device)
    if folding.method == "smooth":
        readers = _readers(folding, stage.prefix, stage.block, fold, groups)
        return stage.realise(smooth_factors(readers, fold.channels)) if readers else ones, None
    consumers = _consumers(folding, stage.prefix, stage.block, fold, groups)
    if not consumers:
        return ones, None
    if folding.method == "hqq":
        try:
            return search_channel_factors(consumers, fold.channels, stage.realise), None
        except NumericsError as error:
            return ones, str(error)
    factors = search_factors(consumers, fold.channels, stage.realise)
    return (factors.values, None) if factors.fallback is None else (ones, factors.fallback)


def _readers(
    folding: Folding, prefix: str, block: nn.Module, fold: Fold, groups: Sequence[InputGroup]
) -> list[FoldReader]:
    """Return the quantized linears that read the fold's channels, with the largest input and weight per channel."""
    readers = []
    for group in groups:
        for name in group.names:
            if f"{prefix}.{name}" in folding.targets and name in fold.consumers and group.largest is not None:
                weights = block.get_parameter(f"{name}.weight").abs().amax(0)
                readers.append(FoldReader(group.largest, weights, fold.consumers[name]))
    return readers


def _consumers(
    folding: Folding, prefix: str, block: nn.Module, fold: Fold, groups: Sequence[InputGroup]
) -> list[Consumer]:
    """Return the quantized linears over which the fold's loss is summed, stacked where input and scheme are one."""
    consumers = []
    tokens = max((group.tokens for group in groups), default=0)
    for group in groups:
        by_scheme: dict[Scheme, list[str]] = {}
        for name in group.names:
            target = folding.targets.get(f"{prefix}.{name}")
            if target is not None and name in fold.consumers and group.squares() is not None:
                by_scheme.setdefault(target.scheme, []).append(name)
        for scheme, names in by_scheme.items():
            weight, each = thin_stack([block.get_parameter(f"{name}.weight") for name in names])
            share = max(group.tokens, 1) / max(tokens, 1)  # an expert that no token reached has its layer's statistics
            channels = fold.consumers[names[0]]
            consumers.append(Consumer(weight, group.hessian, channels, scheme, share * each, group.squares()))
    return consumers


class _FoldStep:
    """One fold of one block: the factors that its producer can hold, and the scaling itself."""

    def __init__(self, folding: Folding, prefix: str, block: nn.Module, fold: Fold) -> None:
        self.folding, self.prefix, self.block, self.fold = folding, prefix, block, fold
        self.weight = block.get_parameter(f"{fold.producer}.weight")
        self.largest = self._largest() if self.weight.dim() == 2 else None

    def realise(self, factors: Tensor) -> Tensor:
        """Return the nearest factors that stored weights can stand for, float32 [channels].

        For a norm these are what its rounded weight gives; for a linear to quantize, any that keep the scales of its
        rows above the smallest normal fp16.

        factors: float32 [channels].
        """
        if self.largest is not None:
            return torch.minimum(factors, self.largest)
        offset, dtype = self.fold.offset, self.folding.stored_dtype(f"{self.prefix}.{self.fold.producer}.weight")
        multiplier = self.weight.float() + offset
        rounded = (multiplier / factors - offset).to(dtype).float() + offset
        real = multiplier / rounded
        usable = torch.isfinite(real) & (real > 0) & (rounded.abs() >= torch.finfo(dtype).tiny)
        return torch.where(usable & ((real / factors).log2().abs() < 1), real, torch.ones_like(real))

    def _largest(self) -> Tensor:
        """Return the largest factor per channel: beyond it some group's scale would be raised to the smallest one."""
        target = self.folding.targets.get(f"{self.prefix}.{self.fold.producer}")
        if target is None:
            return torch.full((self.fold.channels,), float("inf"), device=self.weight.device)
        width = target.scheme.width(target.in_features)
        rows = self.weight[self.fold.rows].float()
        spans = torch.stack([part.amax(1) - part.amin(1) for part in rows.split(width, dim=1)], dim=1)
        smallest = torch.where(spans > 0, spans, torch.inf).amin(1)
        if target.scheme.number != "integer":  # these scales reach further than float16's
            return torch.full_like(smallest, float("inf"))
        return (smallest / (target.scheme.levels - 1) / (4 * SMALLEST_SCALE)).clamp(min=1.0)

    def apply(self, factors: Tensor, groups: Sequence[InputGroup]) -> str | None:
        """Scale parameters and statistics; return None, or why nothing was done.

        What stays in 16 bit is rounded to it. If any of it overflows nothing is done: every parameter is tried first,
        one at a time, so that no second copy of the consumers is needed.

        factors: float32 [channels].
        groups: statistics, which are scaled, too.
        """
        if not self._surely_finite(factors):
            for name, value in scaled_parameters(self.block, self.fold, factors):
                if not bool(torch.isfinite(self._as_stored(name, value)).all()):
                    return f"scaling makes {name} overflow its stored dtype; its channels are not scaled"
        apply_fold(self.block, self.fold, factors)
        for name in (*self._producer_names(), *(f"{name}.weight" for name in self.fold.consumers)):
            param = self.block.get_parameter(name)
            if f"{self.prefix}.{name}" in self.folding.rewritten:
                param.copy_(self._as_stored(name, param))
        for group in groups:
            inside = [name for name in group.names if name in self.fold.consumers]
            if inside and group.squares() is not None:
                assert inside == list(group.names)  # who reads one tensor is scaled together
                group.scale(self.fold.columns(group.names[0], factors))
        return None

    def _producer_names(self) -> list[str]:
        producer = self.block.get_submodule(self.fold.producer)
        return [f"{self.fold.producer}.{name}" for name, _ in producer.named_parameters(recurse=False)]

    def _surely_finite(self, factors: Tensor) -> bool:
        """Whether the largest numbers, times the largest factor, fit fp16: then nothing has to be computed to know."""
        low, high = (float(bound) for bound in torch.aminmax(factors))
        params = [self.block.get_parameter(f"{name}.weight") for name in self.fold.consumers]
        params += [self.block.get_parameter(name) for name in self._producer_names()]
        largest = max(abs(float(bound)) for param in params for bound in torch.aminmax(param))
        return (largest + 1.0) * max(high, 1 / low) < torch.finfo(torch.float16).max

    def _as_stored(self, name: str, value: Tensor) -> Tensor:
        full = f"{self.prefix}.{name}"
        return value.to(self.folding.stored_dtype(full)) if full in self.folding.rewritten else value
