"""Build the model on the meta device: find its decoder blocks and their linears, load one module's weights at a time.

Structure is found, not listed: decoder blocks are the ModuleList that holds most parameters. There is no file per
family.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quantkit.checkpoint.foreign_files.code_references import without_code
from quantkit.checkpoint.names import TensorRef, match_names
from quantkit.checkpoint.source import Source, finite
from quantkit.errors import SourceError, UnsupportedModel
from quantkit.model.experts import Experts, is_fused, routers, unfuse_experts
from quantkit.model.language import auto_class, language_model, name_of, towers
from quantkit.model.naming import Naming


@dataclass(frozen=True)
class Blocks:
    """The decoder blocks of a model: ``model.layers`` and the like."""

    prefix: str
    modules: nn.ModuleList

    def __len__(self) -> int:
        return len(self.modules)

    def name(self, index: int) -> str:
        return f"{self.prefix}.{index}"


# Keys of config.json that say how weights are stored, not what the model is. How attention runs goes with the keys that
# name code: without a word on it transformers takes torch's where the architecture allows it (not with soft caps or
# sinks: gemma2, gpt_oss).
NOT_STRUCTURE = ("quantization_config", "dtype", "torch_dtype", "transformers_version", "return_dict")


# What transformers' classes raise over a config that they do not understand.
BUILDING = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError,
)  # fmt: skip


def build_skeleton(config: Mapping[str, Any], dtype: torch.dtype = torch.float32, *, unfuse: bool = True) -> nn.Module:
    """Build the transformers model of a config, parameters on the meta device, in eval mode.

    Buffers (rotary tables, scales) are real. No code but that of transformers runs, whatever the config names.

    unfuse: experts become one linear per expert and projection (``model/experts.py``).

    A model with vision or audio towers is built whole.

    Raises UnsupportedModel for a model type that transformers does not know or that is no causal language model.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    data = without_code(config, *NOT_STRUCTURE)
    kind = data.pop("model_type", None)
    if kind is None:
        raise UnsupportedModel(
            "config.json has no model_type: this is no transformers model. Add it, or use another export."
        )
    try:
        hf_config = AutoConfig.for_model(kind, **data)
    except (*BUILDING, ValueError, StrictDataclassError) as error:
        if kind in CONFIG_MAPPING:
            raise UnsupportedModel(
                f"config.json of this {kind} does not fit ({error!r}). Download it again."
            ) from error
        raise UnsupportedModel(
            f"model_type {kind!r} is unknown to the installed transformers. Upgrade transformers."
        ) from None
    try:
        with _parameters_on_meta():
            model = auto_class(kind, data).from_config(hf_config, dtype=dtype, trust_remote_code=False)
    except BUILDING as error:
        raise UnsupportedModel(f"config.json of this {kind} makes no model ({error!r}). Download it again.") from error
    except ValueError as error:
        raise UnsupportedModel(
            f"model_type {kind!r}: transformers has no causal language model of that type"
            + ("." if "configuration class" in str(error) else f" ({_first_sentence(error)}).")
        ) from None
    model.requires_grad_(False)
    if unfuse:
        unfuse_experts(model)
    return model.eval()  # type: ignore[no-any-return]


def _first_sentence(error: Exception) -> str:
    """Without the list of everything that would have been possible."""
    return str(error).partition("\n")[0].partition(". ")[0]


class _LargeOnMeta(TorchFunctionMode):
    """Make large tensors on meta at once: they become parameters, and one layer's experts alone may exceed the memory.

    What is small may be a buffer that holds something, and stays real.
    """

    # elements from which on; a buffer may be filled after torch.empty too, but not one of this size
    LIMITS: ClassVar[dict[Any, int]] = {torch.empty: 1 << 16, torch.zeros: 1 << 24, torch.ones: 1 << 24}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = dict(kwargs or {})
        if func in self.LIMITS and out.get("device") is None:
            sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
            if torch.Size(sizes or out.get("size", ())).numel() >= self.LIMITS[func]:
                out["device"] = "meta"
        return func(*args, **out)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """New parameters go to meta; buffers stay real, because non-persistent ones cannot be read from any file."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def find_blocks(model: nn.Module) -> Blocks:
    """Find the ModuleList of the language model that holds most parameters.

    Raises UnsupportedModel if there is none, or its blocks hold no linears.
    """
    best: tuple[int, str, nn.ModuleList] | None = None
    decoder = language_model(model)
    for name, module in decoder.named_modules(prefix=name_of(model, decoder)):
        if isinstance(module, nn.ModuleList):
            size = sum(p.numel() for p in module.parameters())
            if best is None or size > best[0]:
                best = (size, name, module)
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if best is None or best[0] == 0:
        raise UnsupportedModel(f"{kind}: no list of decoder blocks was found; this architecture is not supported.")
    blocks = Blocks(best[1], best[2])
    for index, block in enumerate(blocks.modules):
        if not block_linears(block):
            raise UnsupportedModel(
                f"{kind}: {blocks.name(index)} ({type(block).__name__}) holds no nn.Linear to quantize (its matrices"
                " may be of another kind, as GPT-2's Conv1D); not supported."
            )
        odd = _odd_weights(block)
        if odd:
            raise UnsupportedModel(
                f"{kind}: {blocks.name(index)}.{odd[0]} is a weight outside an nn.Linear (Conv1D, ...): not supported."
            )
    return blocks


def _odd_weights(block: nn.Module) -> list[str]:
    """Weights of more than one dimension that neither a linear nor a router nor fused experts hold, with shapes."""
    known = routers(block)
    return [
        f"{name}.{local} {list(p.shape)}"
        for name, module in block.named_modules()
        if not isinstance(module, nn.Linear) and name not in known and not is_fused(module)
        for local, p in module.named_parameters(recurse=False)
        if p.dim() > 1
    ]


def block_linears(block: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of one block by their name inside it, in module order. Routers are left as they are."""
    known = routers(block)
    return {
        name: module for name, module in block.named_modules() if isinstance(module, nn.Linear) and name not in known
    }


def widest_input(blocks: Blocks) -> int:
    """Return the most inputs that a linear of any block has; 1 without linears."""
    return max(
        (block_module.in_features for block in blocks.modules for block_module in block_linears(block).values()),
        default=1,
    )


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Weights:
    """Where each parameter of a skeleton comes from, and the loading of one module at a time.

    Buffers that checkpoints store (a router's correction, a layer's scalar) are read and written like parameters.

    parameters: by name, as the skeleton has them.
    stored_buffers: the buffers that this source stores, by name.

    Raises SourceError / UnsupportedModel at construction if names or shapes do not fit (everything is checked from
    headers, before any weight is read).
    """

    def __init__(self, model: nn.Module, source: Source, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.source, self.dtype = model, source, dtype
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        self.tied = tied_parameters(model)
        naming = Naming(model)
        self.sources: dict[str, TensorRef] = match_names(
            self.parameters, source.names(), self.tied, naming.parts_of, str(source.path), naming.beside
        )
        buffers = persistent_buffers(model)
        self.stored_buffers = {name: buffers[name] for name in self.sources if name in buffers}
        self.names = self._written_names(naming)
        for name in self.sources:
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
        names = {name: naming.written(name) for name in self.sources}
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
        expected, actual = tuple(tensor.shape), info.shape
        if stored.index is not None:
            experts, local = self._expert(name)
            actual = tuple(experts.layout.pick(torch.empty(info.shape[1:], device="meta"), local).shape)
            if len(experts) != info.shape[0]:
                actual = info.shape
        if expected != actual:
            raise SourceError(
                f"{self.source.path}: tensor {stored.name!r} has shape {list(actual)}; config.json implies"
                f" {list(expected)}. The weights and the config belong to different models."
            )

    def _expert(self, name: str) -> tuple[Experts, str]:
        """The experts that a parameter belongs to, and its name inside one of them (``up_proj.weight``)."""
        owner, _, projection = name.rpartition(".")[0].rpartition(".")
        experts: Any = self.model.get_submodule(owner.rpartition(".")[0])
        return experts, f"{projection}.{name.rpartition('.')[2]}"

    def stored(self, name: str) -> str:
        """Name the stored tensor that a parameter is, or is cut from."""
        return self.sources[name].name

    def load(self, module_name: str, device: torch.device | str = "cpu") -> None:
        """Read every parameter below a module (``""`` = none but its own) onto a device, and move its buffers there.

        Raises NumericsError for NaN or inf.
        """
        module = self.model.get_submodule(module_name)
        prefix = f"{module_name}." if module_name else ""
        for name in self.stored_buffers:
            if name.startswith(prefix):
                self.place(name, self.read(name))
        _move_buffers(module, device)
        for local, _ in list(module.named_parameters()):
            self.load_parameter(f"{prefix}{local}", device)

    def load_parameter(self, name: str, device: torch.device | str = "cpu") -> None:
        """Read one parameter or stored buffer onto a device, in the working dtype."""
        self.place(name, self.read(name, device))

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
        if stored.index is None:
            value = self.source.read(stored.name)
        else:
            experts, local = self._expert(name)
            value = experts.layout.pick(self.source.read_entry(stored.name, stored.index), local)
        value = value.to(device)  # as stored: half the bytes travel
        return finite(value, self.source.path, stored.name)

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
    head = weights.model.get_output_embeddings()  # type: ignore[operator]
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
