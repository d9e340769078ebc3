"""The sensitivity pass: measure, before anything is quantized, how errors change the model's output.

It measures the sensitivity to each choice of bits, channel importance of each block's output, and token importance:
forward through the original model, and back, with one block in memory at a time. Hidden states in front of every
block are kept on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.algorithms.awq import rough_factors
from quantkit.algorithms.guide import Guide, fit_guide
from quantkit.algorithms.kquant import kquant
from quantkit.calibrate import sensitivity
from quantkit.calibrate.gradients import listening
from quantkit.checkpoint.writer import disk
from quantkit.convert.gguf.types import alike
from quantkit.convert.results import TOKENS, WINDOWS, Measured, Unit, Way
from quantkit.convert.stages.device import release_memory
from quantkit.convert.stages.embed import SHORT
from quantkit.convert.stages.loaded_block import loaded
from quantkit.core import affine
from quantkit.core.blocks import BlockKind
from quantkit.core.host import OnStep
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError
from quantkit.model.arguments import BlockArguments, require_nothing_handed_on, require_same_calls
from quantkit.model.folds import find_folds, shared_modules
from quantkit.model.language import towers
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.skeleton import Blocks, block_linears
from quantkit.model.stepper import record, run_block
from quantkit.model.weights import Weights

STEPS = 4  # candidates in the search for ranges: a sixth of what quantizing tries


class SensitivityPass:
    """The original model on a few calibration windows.

    weights: the source's tensors.
    blocks: the blocks of the model.
    ids: int64 ``[windows, tokens]``.
    device: where blocks run.
    folder: gets the file of hidden states, removed afterwards.
    seed: of the drawn targets at the output.
    search: search ranges when rounding, as the method does.
    guided: module names of linears that get token importance.
    folds: the method scales channels where a block allows it.
    """

    def __init__(
        self,
        weights: Weights,
        blocks: Blocks,
        ids: Tensor,
        device: torch.device,
        *,
        folder: Path,
        seed: int,
        search: bool,
        guided: Sequence[str] = (),
        folds: bool = False,
    ) -> None:
        self.model: Any = weights.model
        self.weights, self.blocks, self.device = weights, blocks, device
        self.ids, self.file, self.search = ids[:WINDOWS, :TOKENS], folder / "sensitivity.bin", search
        self.guided, self.folds = frozenset(guided), folds
        self.beside = tuple(f"{tower}." for tower in towers(self.model))
        self.short: list[BlockArguments] = []  # arguments of every block for few tokens, which show what can be scaled
        self.draws = torch.rand(self.ids.shape, generator=torch.Generator().manual_seed(seed))

    def measure(self, units: Sequence[Unit], on_step: OnStep) -> Measured:
        """Measure the sensitivity of every unit, channel importance and token importance.

        units: the units of a bit budget, empty without one.
        on_step: called with the number of steps done and of all steps.

        Raises UnsupportedModel for a model that cannot run block by block, NumericsError if the file of states is
        damaged.
        """
        total = 2 * len(self.blocks)
        with self._outside_loaded():
            states, calls = self._embed()
            try:
                for index in range(len(self.blocks)):
                    on_step(index, total)
                    self._forward(index, states, calls[index].to(self.device))
                gradients, head = self._tail(states, any(unit.kind in ("head", "tied") for unit in units))
                costs: dict[tuple[str, ...], list[float]] = {}
                channels: list[Tensor] = []
                guides: list[Guide | None] = []
                for index in reversed(range(len(self.blocks))):
                    on_step(total - 1 - index, total)
                    channels.insert(0, sensitivity.channel_shares(gradients).cpu())
                    more, guide = self._back(index, gradients, calls[index].to(self.device), units)
                    costs |= more
                    guides.insert(0, guide)
            finally:
                self.file.unlink(missing_ok=True)
            for unit in units:
                if unit.kind != "linear":
                    costs[unit.members] = self._head_or_embedding(unit, gradients, head)
        on_step(total, total)
        return Measured([costs[unit.members] for unit in units], channels, guides if self.guided else None)

    @contextmanager
    def _outside_loaded(self) -> Iterator[None]:
        """Hold embeddings, norm and head on the device while the measurement runs."""
        inside = f"{self.blocks.prefix}."
        for name in self.weights.sources:
            if not name.startswith((inside, *self.beside)) and name not in self.weights.tied:
                self.weights.load_parameter(name, self.device)
        for twin, first in self.weights.tied.items():
            if twin.startswith((inside, *self.beside)):
                continue  # a block's own is loaded with it
            owner = self.model.get_submodule(twin.rpartition(".")[0])
            owner._parameters[twin.rpartition(".")[2]] = self.model.get_parameter(first)
        for name, buffer in list(self.model.named_buffers()):
            owner, _, local = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[local] = buffer.to(self.device)
        try:
            yield
        finally:
            self.weights.release("")
            release_memory(self.device)

    def _window(self, index: int) -> Tensor:
        return self.ids[index : index + 1].to(self.device)

    @torch.no_grad()
    def _embed(self) -> tuple[list[Tensor], list[BlockArguments]]:
        """Return states in front of the first block, ``[1, tokens, hidden]`` each, and the arguments of every block."""
        states: list[Tensor] = []
        calls: list[BlockArguments] = []
        for index in range(len(self.ids)):
            recording = record(self.model, self.blocks, self._window(index))
            states.append(recording.hidden.clone())
            calls = calls or recording.calls
            require_same_calls(calls, recording.calls, str(self.weights.source.path))
        require_nothing_handed_on(calls, str(self.weights.source.path), "--guided (or --target-bpw)")
        if self.folds:
            self.short = record(self.model, self.blocks, self._window(0)[:, :SHORT]).calls
        return states, calls

    def _forward(self, index: int, states: list[Tensor], call: BlockArguments) -> None:
        """Keep the states in front of a block, and replace them by those behind it."""
        with disk(self.file), open(self.file, "ab" if index else "wb") as file:  # not onto what a killed job left
            for state in states:
                state.cpu().numpy().tofile(file)
        with loaded(self.weights, self.blocks, index, self.device) as block:
            for window, state in enumerate(states):
                states[window] = run_block(block, state, call)

    def _kept(self, index: int, window: int, like: Tensor) -> Tensor:
        """Read the states of a window that ``_forward`` kept."""
        state = torch.empty(like.shape)  # torch's own memory: products depend in their last bits on how it is aligned
        with open(self.file, "rb") as file:
            file.seek((index * len(self.ids) + window) * like.nbytes)
            if file.readinto(state.numpy().data.cast("B")) != like.nbytes:
                raise NumericsError(f"{self.file}: shorter than what was written to it. Another program changed it.")
        return state.to(self.device)

    def _tail(self, states: list[Tensor], head: bool) -> tuple[list[Tensor], sensitivity.HeadReads | None]:
        """Return gradients at the last block's output, and what the head reads on the last tokens of each window."""
        gradients = [
            sensitivity.tail_gradient(self.model, self.blocks, self._window(i), state, self.draws[i])
            for i, state in enumerate(states)
        ]
        few = max(1, sensitivity.HEAD_TOKENS // len(states))
        ids = self.ids[:, -few:].reshape(1, -1).to(self.device)
        last = torch.cat([state[:, -few:] for state in states], 1)
        return gradients, sensitivity.head_reads(self.model, self.blocks, ids, last) if head else None

    def _back(
        self, index: int, gradients: list[Tensor], call: BlockArguments, units: Sequence[Unit]
    ) -> tuple[dict[tuple[str, ...], list[float]], Guide | None]:
        """Measure one block: sensitivity of its units, token importance, gradients in front of it (in place)."""
        prefix = self.blocks.name(index)
        mine = [unit for unit in units if unit.kind == "linear" and unit.members[0].startswith(f"{prefix}.")]
        names = [member.removeprefix(f"{prefix}.") for unit in mine for member in unit.members]
        with loaded(self.weights, self.blocks, index, self.device) as block:
            reads: list[sensitivity.Read] = []
            squares: list[dict[str, Tensor]] = []
            experts = expert_linears(block)
            weighed = [n for n in block_linears(block) if f"{prefix}.{n}" in self.guided and n not in experts]
            for window, gradient in enumerate(gradients):
                state = self._kept(index, window, gradient)
                with listening(block, weighed, state.shape[1]) as heard:
                    gradients[window], more = sensitivity.backward(block, state, call, gradient, names)
                reads += more
                squares.append(heard)
            guide = None
            if weighed:
                states = [self._kept(index, window, gradient) for window, gradient in enumerate(gradients)]
                rows = {name: block.get_parameter(f"{name}.weight").shape[0] for name in weighed}
                guide = fit_guide(rows, states, squares)
            measured = self._units(index, mine, reads, gradients[0])
            del reads
        return measured, None if guide is None else guide.on_host()

    def _units(
        self, index: int, units: Sequence[Unit], reads: list[sensitivity.Read], like: Tensor
    ) -> dict[tuple[str, ...], list[float]]:
        """Measure the sensitivity of each option of a block's units.

        like: a gradient, for the shape of the states.
        """
        prefix, block = self.blocks.name(index), self.blocks.modules[index]
        measured = {}
        scaled = self._scaled(index, like) if units and self.folds else {}
        for unit in units:
            weights = {
                local: block.get_parameter(f"{local}.weight")
                for local in (member.removeprefix(f"{prefix}.") for member in unit.members)
            }
            roundings = [self._rounding(scheme) for scheme in unit.options]
            scaling = partial(_factors, scaled=scaled, scheme=_middle(unit)) if scaled else None
            measured[unit.members] = sensitivity.rounding_sensitivity(
                weights, reads, roundings, self.ids.numel(), scaling
            )
        return measured

    def _scaled(self, index: int, like: Tensor) -> dict[str, Tensor]:
        """Find the linears of a block whose input channels can be scaled.

        Returns the fold's channel in each of their columns, int64 [in], by name inside the block.
        """
        state = self._kept(index, 0, like)[:, :SHORT]
        shared, call = shared_modules(self.model, self.blocks.name(index)), self.short[index].to(self.device)
        accepted = find_folds(self.blocks.modules[index], state, call, shared).accepted
        return {name: channels for fold in accepted for name, channels in fold.consumers.items()}

    def _rounding(self, scheme: Way) -> sensitivity.Rounding:
        return partial(rounded, scheme=scheme, search=self.search)

    @torch.no_grad()
    def _head_or_embedding(
        self, unit: Unit, gradients: Sequence[Tensor], head: sensitivity.HeadReads | None
    ) -> list[float]:
        """Measure head, embeddings, or the matrix that is both: the sum over its places."""
        weight = self.model.get_parameter(f"{unit.members[0]}.weight")
        costs = [0.0] * len(unit.options)
        if unit.kind in ("head", "tied"):
            assert head is not None
            costs = [sensitivity.head_sensitivity(weight, head, self._rounding(scheme)) for scheme in unit.options]
        if unit.kind in ("embedding", "tied"):
            more = self._embedding(weight, unit.options, gradients)
            costs = [cost + other for cost, other in zip(costs, more, strict=True)]
        return costs

    def _embedding(self, weight: Tensor, options: Sequence[Way], gradients: Sequence[Tensor]) -> list[float]:
        """Measure the sensitivity of embeddings for each option, in nats per token.

        The rows that the windows look up are rounded, the change of the states in front of the first block is taken,
        and the rows are put back.
        """
        rows = self.ids.unique().to(weight.device)
        original = weight[rows].clone()
        before = [record(self.model, self.blocks, self._window(i)).hidden.clone() for i in range(len(self.ids))]
        direct, rough = ([0.0] * len(options) for _ in range(2))
        for index, scheme in enumerate(options):
            weight[rows] = rounded(original, scheme, self.search)
            for i, (state, gradient) in enumerate(zip(before, gradients, strict=True)):
                moved = record(self.model, self.blocks, self._window(i)).hidden - state
                direct[index] += float((moved * gradient).sum(-1).square().sum(dtype=torch.float64))
                square = moved.square().mean(-1) * gradient.square().sum(-1)
                rough[index] += float(square.sum(dtype=torch.float64))
        weight[rows] = original
        return [total / (2 * self.ids.numel()) for total in sensitivity.steadied(direct, rough)]


def _factors(
    weights: Mapping[str, Tensor], size: Tensor, scaled: Mapping[str, Tensor], scheme: Scheme
) -> Tensor | None:
    """Return the factors for the input channels of linears that read one tensor, None if the block does not allow any.

    Columns of one channel (query heads that share a value head) have one factor, by the mean of their squares.
    """
    if not all(name in scaled for name in weights):
        return None
    channels = scaled[next(iter(weights))].to(size.device)
    count = int(channels.max()) + 1
    square = torch.zeros(count, device=size.device).index_add_(0, channels, size.square())
    each = torch.bincount(channels, minlength=count).clamp(min=1)
    return rough_factors(list(weights.values()), (square / each).sqrt()[channels], scheme)


def _middle(unit: Unit) -> Scheme:
    """Return the option nearest to 4 bits, with the smallest groups, for which factors are found."""
    known = [way for way in unit.options if way is not None]
    schemes = [alike(way.name) if isinstance(way, BlockKind) else way for way in known]
    return min(schemes, key=lambda s: (abs(s.bits - 4), s.group_size or 1 << 30))


@torch.no_grad()
def rounded(weight: Tensor, scheme: Way, search: bool) -> Tensor:
    """Quantize and dequantize rows of a weight.

    weight: [rows, in].
    scheme: how to round; None returns the weight as it is. Scales of block formats are always searched.
    search: search ranges in few steps, else take minimum and maximum.
    """
    if scheme is None:
        return weight
    if isinstance(scheme, BlockKind):
        return kquant(weight, scheme, quick=True).dequantize()
    find = partial(affine.searched_params, steps=STEPS) if search else affine.minmax_params
    scale, zeros = find(weight, scheme)
    return affine.dequantize(affine.quantize(weight, scale, zeros, scheme), scale, zeros, scheme)
