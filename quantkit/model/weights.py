"""The weights of a skeleton: where each parameter is stored, and the loading of one module at a time."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.names import TensorRef, match_names
from quantkit.checkpoint.source import Source, finite
from quantkit.core.mapped import View, owned
from quantkit.errors import SourceError, UnsupportedModel
from quantkit.model.language import output_embeddings, towers
from quantkit.model.linears.transposed import TransposedLinear
from quantkit.model.mixture.experts import Experts
from quantkit.model.naming import Naming
from quantkit.model.naming.converted import Converted, find_converted
from quantkit.model.skeleton import Blocks

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """Where each parameter of a skeleton comes from, and the loading of one module at a time.

    Buffers that checkpoints store (a router's correction, a layer's scalar) are read and written like parameters.

    parameters: by name, as the skeleton has them.
    stored_buffers: the buffers that this source stores, by name.
    converted: how parameters of towers are computed that are not stored as they are, by name.

    Raises SourceError / UnsupportedModel at construction if names or shapes do not fit (everything is checked from
    headers, before any weight is read).
    """

    def __init__(self, model: nn.Module, source: Source, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.source, self.dtype = model, source, dtype
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self.tied = tied_parameters(model)
        naming = Naming(model)
        self.converted: dict[str, Converted] = find_converted(model, source, naming)
        taken = {name for one in self.converted.values() for name in one.names}
        self.sources: dict[str, TensorRef] = {
            name: TensorRef(one.names[0], joined=one.names) for name, one in self.converted.items()
        }
        self.sources |= match_names(
            [name for name in self.parameters if name not in self.converted],
            [name for name in source.names() if name not in taken],
            self.tied, naming.parts_of, str(source.path), naming.beside,
            lambda name: 0 if naming.converter(name) is None else prod(source.info(name).shape),
        )  # fmt: skip
        buffers = persistent_buffers(model)
        self.stored_buffers = {name: buffers[name] for name in self.sources if name in buffers}
        self.names = self._written_names(naming)
        for name in self.sources:
            if name not in self.converted:
                self._check(name)

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or a stored buffer of the skeleton (its shape; parameters may be on meta)."""
        return self.parameters[name] if name in self.parameters else self.stored_buffers[name]

    def _written_names(self, naming: Naming) -> dict[str, str]:
        """The name under which each parameter is written: as the source calls it.

        If the source has fused experts, it is laid out as transformers' modules are; the experts need names of their
        own, and the others the ones that go with them.
        """
        if all(stored.index is None for stored in self.sources.values()):
            return {name: stored.name for name, stored in self.sources.items()}
        # what is joined is copied as it is stored, tensor by tensor
        names = {name: stored.name if stored.joined else naming.written(name) for name, stored in self.sources.items()}
        for name, twin in self.tied.items():
            if self.sources[name] == self.sources[twin]:
                names[name] = names[twin]
        return names

    def _check(self, name: str) -> None:
        stored = self.sources[name]
        info = self.source.info(stored.name)
        tensor = self.tensor(name)
        if info.dtype not in FLOATS and tensor.is_floating_point():
            raise SourceError(
                f"{self.source.path}: tensor {stored.name!r} is stored as {info.dtype}, but config.json names no "
                "quantization that explains it. Give the 16-bit original."
            )
        expected, actual = tuple(tensor.shape), info.shape[::-1] if self.transposed(name) else info.shape
        if stored.joined:
            rows = sum(self.source.info(part).shape[0] for part in stored.joined)
            actual = (rows, *actual[1:])
            self._refuse_joined_linear(name)
        if stored.alone:
            expected = (len(self._expert(name)[0]), *expected)
        elif stored.index is not None:
            experts, local = self._expert(name)
            whole = experts.shapes[experts.layout.fused_name(local)]
            actual = expected if info.shape == whole else info.shape
            expected = expected if info.shape == whole else whole
        if expected != actual:
            raise SourceError(
                f"{self.source.path}: tensor {stored.name!r} has shape {list(actual)}; config.json implies"
                f" {list(expected)}. The weights and the config belong to different models."
            )

    def _refuse_joined_linear(self, name: str) -> None:
        """Raise UnsupportedModel for a matrix that would have to be quantized, and is stored in several tensors."""
        if isinstance(self.model.get_submodule(name.rpartition(".")[0]), nn.Linear):
            raise UnsupportedModel(
                f"{self.source.path}: {name} is stored in {len(self.sources[name].joined)} tensors, first"
                f" {self.sources[name].name!r}; linears that are joined on loading are not supported."
            )

    def _expert(self, name: str) -> tuple[Experts, str]:
        """The experts that a parameter belongs to, and its name inside one of them (``up_proj.weight``)."""
        owner, _, projection = name.rpartition(".")[0].rpartition(".")
        experts: Any = self.model.get_submodule(owner.rpartition(".")[0])
        return experts, f"{projection}.{name.rpartition('.')[2]}"

    def stored(self, name: str) -> str:
        """Name the stored tensor that a parameter is, or is cut from.

        A tensor that belongs to no parameter (a layer that predicts further tokens) is stored under its own name.
        """
        return self.sources[name].name if name in self.sources else name

    def stored_alike(self, name: str, twin: str) -> bool:
        """Tell whether a tied parameter really is its twin.

        A file may store both, and differ: transformers then unties them.
        """
        own, other = self.stored(name), self.stored(twin)
        return own == other or torch.equal(self.source.read(own), self.source.read(other))

    def read_module(self, module_name: str) -> dict[str, Tensor]:
        """Read every parameter below a module in its stored dtype, by full name. Raises NumericsError as ``raw``."""
        parameters = self.model.get_submodule(module_name).named_parameters()
        return {name: self.raw(name) for name in (f"{module_name}.{local}" for local, _ in parameters)}

    def load(
        self, module_name: str, device: torch.device | str = "cpu", read: Mapping[str, Tensor] | None = None
    ) -> None:
        """Read every parameter below a module (``""`` = none but its own) onto a device, and move its buffers there.

        read: parameters that were read before (``read_module``).

        Raises NumericsError for NaN or inf.
        """
        module = self.model.get_submodule(module_name)
        prefix = f"{module_name}." if module_name else ""
        for name in self.stored_buffers:
            if name.startswith(prefix):
                self.place(name, self.read(name))
        _move_buffers(module, device)
        for local, _ in list(module.named_parameters()):
            name = f"{prefix}{local}"
            value = None if read is None else read.get(name)
            if value is None:
                self.load_parameter(name, device)
            else:
                self.place(name, value.to(device).to(self.dtype))  # as stored: half the bytes travel

    def load_parameter(self, name: str, device: torch.device | str = "cpu") -> None:
        """Read one parameter or stored buffer onto a device, in the working dtype."""
        self.place(name, self.read(name, device))

    def transposed(self, name: str) -> bool:
        """Tell whether a parameter is stored as its transpose (GPT-2's matrices)."""
        owner, _, local = name.rpartition(".")
        return local == "weight" and isinstance(self.model.get_submodule(owner), TransposedLinear)

    def as_stored(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter's value as checkpoints of this family store it."""
        return value.t().contiguous() if self.transposed(name) else value

    def place(self, name: str, value: Tensor) -> None:
        """Give a parameter or stored buffer of the skeleton its value."""
        owner_name, _, local = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        if name in self.stored_buffers:
            owner._buffers[local] = value
        else:
            owner._parameters[local] = nn.Parameter(value, requires_grad=False)

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Read one parameter or stored buffer in the working dtype.

        Buffers of whole numbers keep their dtype; those that transformers always keeps in float32 are float32.

        Raises NumericsError, naming it, if it holds NaN or inf.
        """
        value = self.raw(name, device)
        if name not in self.stored_buffers:
            return value.to(self.dtype)
        exact = any(part in name for part in getattr(self.model, "_keep_in_fp32_modules_strict", None) or ())
        return value.to(torch.float32 if exact else self.dtype) if value.is_floating_point() else value

    def raw(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Read one parameter in its stored dtype. Raises NumericsError, naming it, if it holds NaN or inf."""
        stored = self.sources[name]
        if name in self.converted:
            value = self.converted[name].values(self.model, self.source.read)[name]
        elif stored.joined:
            value = torch.cat([self.source.read(part) for part in stored.joined])
        elif stored.index is None:
            value = self.as_stored(name, self.source.read(stored.name))  # and back again
        elif stored.alone:
            value = self.source.read_entry(stored.name, stored.index)
        else:
            experts, local = self._expert(name)
            value = experts.layout.pick(self._entry(stored, experts, local), local)
        value = value.to(device)  # as stored: half the bytes travel
        return finite(value, self.source.path, stored.name)

    def view(self, name: str) -> View:
        """Return one parameter in its stored dtype, as it lies in the file where that can be had.

        Raises NumericsError, naming it, if it holds NaN or inf.
        """
        stored = self.sources[name]
        if name in self.converted or stored.joined or stored.index is not None or self.transposed(name):
            return owned(self.raw(name))
        view = self.source.view(stored.name)
        finite(view.value, self.source.path, stored.name)
        view.forget()
        return view

    def _entry(self, stored: TensorRef, experts: Experts, local: str) -> Tensor:
        """Read one expert's entry of a fused tensor."""
        index = stored.index or 0
        if not experts.layout.holder(local).flat:
            return self.source.read_entry(stored.name, index)
        rows = self.source.info(stored.name).shape[0] // len(experts)
        return torch.stack([self.source.read_entry(stored.name, index * rows + row) for row in range(rows)])

    def raw_as_stored(self, name: str) -> Tensor:
        """Read one parameter as checkpoints of this family store it. Raises NumericsError as ``raw`` does."""
        return self.as_stored(name, self.raw(name))

    def release(self, module_name: str) -> None:
        """Put a module's parameters back on meta, so that their memory is free; its buffers come back to the host."""
        _move_buffers(self.model.get_submodule(module_name), "cpu")
        for module in self.model.get_submodule(module_name).modules():
            for local, param in list(module._parameters.items()):
                if param is not None:
                    module._parameters[local] = nn.Parameter(param.detach().to("meta"), requires_grad=False)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of this model stores, by name."""
    return {
        f"{prefix}.{local}" if prefix else local: buffer
        for prefix, module in model.named_modules()
        for local, buffer in module._buffers.items()
        if buffer is not None and local not in module._non_persistent_buffers_set
    }


def _move_buffers(module: nn.Module, device: torch.device | str) -> None:
    for owner in module.modules():
        for local, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[local] = buffer.to(device)


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Map each tied parameter to the one whose tensor it shares, as transformers ties them.

    E.g. ``lm_head.weight`` -> ``model.embed_tokens.weight``.
    """
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: twin for name, twin in tied.items() if name in known and twin in known}


def before_blocks(weights: Weights, blocks: Blocks) -> list[str]:
    """List the parameters that embedding tokens needs: those outside the blocks but the head and the towers.

    The head (tied or not) runs after the blocks, and towers run on images and sounds only.
    """
    head = output_embeddings(weights.model)
    beside = tuple(f"{tower}." for tower in towers(weights.model))
    return [
        name
        for name in outside_blocks(weights, blocks)
        if weights.model.get_submodule(name.rpartition(".")[0]) is not head and not name.startswith(beside)
    ]


def outside_blocks(weights: Weights, blocks: Blocks) -> list[str]:
    """List the parameters outside the blocks (embeddings, final norm, head); of tied ones the one that is stored.

    Stored buffers outside the blocks are among them.
    """
    return [
        name
        for name in (*weights.parameters, *weights.stored_buffers)
        if not name.startswith(f"{blocks.prefix}.") and name not in weights.tied
    ]
