"""The quantized model as it was written, and its scales and norms that learn in the end-to-end pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.algorithms import distil as algorithm
from quantkit.algorithms.distil import LearnedNorm, LearnedScales
from quantkit.checkpoint.writer import CheckpointWriter, tensor_sha256
from quantkit.convert.plan.memory import CHUNK
from quantkit.convert.plan.targets import Target, head_embeddings
from quantkit.convert.results import BlockResult, decision_sha256
from quantkit.core import affine
from quantkit.core.host import available_bytes
from quantkit.core.qtensor import QuantTensor
from quantkit.formats.interface import Format
from quantkit.model.arguments import BlockArguments
from quantkit.model.skeleton import Blocks
from quantkit.model.stepper import forward_block, given
from quantkit.model.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Written:
    """The quantized model as it was written, and the original that it came from.

    weights: the source's tensors.
    blocks: the blocks of the model.
    targets: quantized weights, by module name of the skeleton.
    format: the format that was written.
    device: where blocks run.
    writer: has every tensor that was written.
    """

    weights: Weights
    blocks: Blocks
    targets: Mapping[str, Target]
    format: Format
    device: torch.device
    writer: CheckpointWriter

    @property
    def model(self) -> nn.Module:
        """The skeleton."""
        return self.weights.model

    def head_embeddings(self) -> list[Target]:
        """Return the quantized weights outside the blocks: head and embeddings."""
        return head_embeddings(self.targets)


@dataclass
class LearnedBlock:
    """One block's learned parts, by parameter name inside it."""

    scales: dict[str, LearnedScales] = field(default_factory=dict)
    norms: dict[str, LearnedNorm] = field(default_factory=dict)

    def learned(self) -> Iterator[nn.Parameter]:
        """Yield the block's parameters that learn, always in the same order."""
        yield from (learner.delta for learner in self.scales.values())
        yield from (learner.delta for learner in self.norms.values())


class Student:
    """The quantized model as it was written, one block at a time, with scales and norms that learn."""

    def __init__(self, written: Written) -> None:
        self.written, self.writer = written, written.writer
        self.targets = {f"{name}.weight": target for name, target in written.targets.items()}
        total = sum(t.out_features * t.in_features for t in written.targets.values() if t.kind == "linear")
        self._held: dict[int, dict[str, QuantTensor | Tensor]] | None = (
            {} if total < algorithm.RESIDENT * available_bytes() else None
        )
        self.blocks = [self._learned(index) for index in range(len(written.blocks))]
        prefix = f"{written.blocks.prefix}."
        self.norms = {
            name: LearnedNorm(self._plain(name), stored)
            for name, p in written.weights.parameters.items()
            if not name.startswith(prefix) and p.dim() == 1 and is_norm(written.model, name)
            for stored in (self._dtype(name),)
        }

    def parameters(self) -> list[nn.Parameter]:
        """Return everything that learns, always in the same order."""
        return [p for block in self.blocks for p in block.learned()] + [norm.delta for norm in self.norms.values()]

    def forward(self, index: int, hidden: Tensor, call: BlockArguments) -> Tensor:
        """Run one block on the learned scales and norms, with gradients if the caller enabled them.

        index: the number of the block.
        hidden: [windows, tokens, hidden].
        call: the block's arguments for these windows.
        """
        block, values = self.blocks[index], {}
        for name, stored in self._values(index).items():
            if isinstance(stored, QuantTensor):
                values[name] = block.scales[name].weight(stored)
            else:
                values[name] = block.norms[name].value() if name in block.norms else stored
        with given(self.written.blocks.modules[index], values):
            return forward_block(self.written.blocks.modules[index], hidden, call)

    def head_embedding_weights(self) -> dict[str, Tensor]:
        """Return quantized head and embeddings, dequantized to float32, by parameter name."""
        return {t.parameter: self._dequantized(t) for t in self.written.head_embeddings()}

    def _dequantized(self, target: Target) -> Tensor:
        """Dequantize to float32 ``[out, in]``, a few rows at a time.

        The temporaries of a vocabulary's rows would be three times as large.
        """
        q = self._quantized(target.parameter)
        codes = q.codes
        weight = torch.empty(codes.shape, device=codes.device)
        for rows in torch.arange(len(weight)).split(max(1, CHUNK // weight.shape[1])):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            zeros = None if q.zeros is None else q.zeros[part]
            weight[part] = affine.dequantize(codes[part], q.scales[part], zeros, q.scheme)
        return weight

    def round_(self) -> None:
        """Round learned scales and norms to their stored dtype."""
        for index, block in enumerate(self.blocks):
            for name, scales in block.scales.items():
                scales.round_(self.targets[f"{self.written.blocks.name(index)}.{name}"].scheme)
            for norm in block.norms.values():
                norm.round_()
        for norm in self.norms.values():
            norm.round_()

    def collect(self, result: BlockResult) -> None:
        """Add every tensor that differs from the written one to ``result``.

        result: gets the parts and digests.
        """
        for index, block in enumerate(self.blocks):
            values, prefix = self._values(index), self.written.blocks.name(index)
            for name, scales in block.scales.items():
                q, target = scales.result(values[name]), self.targets[f"{prefix}.{name}"]  # type: ignore[arg-type]
                result.digests[target.name] = decision_sha256(q.to("cpu"))
                for part, value in self.written.format.encode(q.to("cpu")).items():
                    self._changed(f"{target.name}.{part}", value, result)
            for name, norm in block.norms.items():
                self._changed(self.written.weights.names[f"{prefix}.{name}"], norm.result().cpu(), result)
        for name, norm in self.norms.items():
            self._changed(self.written.weights.names[name], norm.result().cpu(), result)

    def _changed(self, stored: str, value: Tensor, result: BlockResult) -> None:
        entry = self.writer.entries.get(stored)
        if entry is None or entry.sha256 != tensor_sha256(value):
            result.parts[stored] = value

    def _learned(self, index: int) -> LearnedBlock:
        block, prefix = LearnedBlock(), self.written.blocks.name(index)
        module = self.written.blocks.modules[index]
        for name, value in self._values(index).items():
            if isinstance(value, QuantTensor):
                block.scales[name] = LearnedScales(value.scales)
            elif value.dim() == 1 and is_norm(module, name):
                block.norms[name] = LearnedNorm(value, self._dtype(f"{prefix}.{name}"))
        return block

    def _values(self, index: int) -> dict[str, QuantTensor | Tensor]:
        """Return every written parameter of a block on the device: quantized ones as codes, others in float32."""
        if self._held is not None and index in self._held:
            return self._held[index]
        prefix, values = self.written.blocks.name(index), {}
        for local, _ in self.written.blocks.modules[index].named_parameters():
            name = f"{prefix}.{local}"
            values[local] = self._quantized(name) if name in self.targets else self._plain(name)
        if self._held is not None:
            self._held[index] = values
        return values

    def _quantized(self, name: str) -> QuantTensor:
        target = self.targets[name]
        local = {n.removeprefix(f"{target.name}."): n for n in self.writer.entries if n.startswith(f"{target.name}.")}
        parts = {part: self.writer.read(full) for part, full in local.items()}
        q = self.written.format.decode(parts, target.scheme).to(self.written.device)
        return QuantTensor(q.codes, q.scales, q.zeros, q.scheme)  # unpacked once, not at every step

    def _plain(self, name: str) -> Tensor:
        stored = self.written.weights.names[name]
        if stored in self.writer.entries:
            return self.writer.read(stored).to(self.written.device).float()
        return self.written.weights.read(name, self.written.device)

    def _dtype(self, name: str) -> torch.dtype:
        return self.written.weights.source.info(self.written.weights.stored(name)).dtype


def is_norm(root: nn.Module, parameter: str) -> bool:
    """Tell whether a parameter belongs to a norm, by the name of its module's class.

    A router's bias or an attention sink is a vector, too, and does not learn.

    root: the module that the name is relative to.
    parameter: its name inside ``root``.
    """
    return "norm" in type(root.get_submodule(parameter.rpartition(".")[0])).__name__.lower()
