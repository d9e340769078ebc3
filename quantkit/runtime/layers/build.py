"""Fill a model skeleton from a checkpoint: packed linears and embeddings, and float parameters, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.source import Source, TensorInfo
from quantkit.core.host import release_free_memory
from quantkit.core.mapped import View, owned
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.rounding.activations import input_hook
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, SourceError, UnsupportedModel
from quantkit.formats.reader import QuantizedReader
from quantkit.model.linears.transposed import TransposedLinear
from quantkit.model.naming import Naming
from quantkit.model.weights import Weights, tied_parameters
from quantkit.runtime.kernels.cpu_layouts import planar_fits
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import NUMBA, QuantLinear, pack
from quantkit.runtime.layers.sixteen_bit import hold_16_bit

# Unpacking leaves holes in the heap: 350 MB for SmolLM2-135M if nothing is done. Trimmed after this many weights.
TRIM_WEIGHTS = 1 << 24
LOADERS = 4  # matrices that are unpacked at the same time, on a CPU


def fill(
    module: nn.Module,
    source: Source,
    reader: QuantizedReader,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dequantize: bool = False,
    kernel: str | None = None,
) -> None:
    """Give every parameter of a skeleton its stored value, a few tensors in memory at a time.

    Tied weights stay one tensor.

    module: the skeleton; changed in place.
    source: the checkpoint.
    reader: of its quantized modules.
    device: where the model will run.
    dtype: of activations and dense weights.
    dequantize: hold quantized weights as floats.
    kernel: a name from ``KERNELS`` for every layer, None for the measured choice.

    Raises SourceError naming what is missing or left over, CheckpointError for a quantized module that does not fit,
    UnsupportedModel for a constant that only the model's own constructor computes.
    """
    module_names = find_modules(module, reader, str(source.path))
    shared = {} if dequantize else tied_heads(module, source, module_names)
    if not dequantize:
        for name in [
            *module_names.values(),
            *shared.values(),
        ]:  # before Weights looks for names: they have no dense weight
            module.get_submodule(name)._parameters.pop("weight")
    weights = Weights(module, _Plain(source, reader, module_names, module, dequantize), dtype)
    if dequantize:
        _round_inputs(module, reader, module_names)
    else:
        load_packed(module, source, reader, module_names, shared, device, dtype, kernel)
    separate = {f"{name}.weight" for name in module_names.values()}
    compact = device.type == "cpu" and not dequantize and kernel in (None, "numba") and dtype == torch.float32
    held = hold_16_bit(module, weights, separate, kernel) if compact and threads.available() else set()
    load_parameters(module, weights, [name for name in weights.names if name not in held], device, separate)
    _move_buffers(module, source, device)
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise SourceError(
            f"{source.path}: {len(left)} tensors got no value, first {left[0]!r}. The checkpoint is incomplete."
        )


def _move_buffers(module: nn.Module, source: Source, device: torch.device) -> None:
    """Bring buffers onto the device. Raises UnsupportedModel for one that has no value, and no place in a file."""
    for name, buffer in list(module.named_buffers()):
        owner, _, local = name.rpartition(".")
        if not buffer.is_meta:
            module.get_submodule(owner)._buffers[local] = buffer.to(device)
        elif local in module.get_submodule(owner)._non_persistent_buffers_set:
            raise UnsupportedModel(
                f"{source.path}: {name} is computed where {type(module.get_submodule(owner)).__name__} is built, which"
                " happens without numbers here, and no checkpoint stores it; not supported."
            )


def load_packed(
    module: Any, source: Source, reader: QuantizedReader, module_names: dict[str, str], shared: dict[str, str],
    device: torch.device, dtype: torch.dtype, kernel: str | None,
) -> None:  # fmt: skip
    """Pack every quantized module for the device.

    module: the skeleton; changed in place.
    source: the checkpoint.
    reader: of its quantized modules.
    module_names: quantized module of the file -> module of the model.
    shared: packed embedding -> the head that reads it too.
    device: where the model will run.
    dtype: of activations.
    kernel: a name from ``KERNELS`` for every layer, None for the measured choice.
    """

    def read(stored: str, name: str) -> PackedWeight:
        shape = _shape(module.get_submodule(name))
        value = read_module(source, reader, stored, shape, view=planar(reader.scheme(stored), shape[1]))
        return pack(value, device=device, kernel=kernel)

    def planar(scheme: Scheme | str, in_features: int) -> bool:
        """Whether the layout copies all it keeps: a view that is kept holds an open file, of which there are few."""
        if device.type != "cpu" or kernel not in (None, *NUMBA) or not isinstance(scheme, Scheme):
            return False
        return scheme.activations is None and scheme.number == "integer" and planar_fits(scheme, in_features)

    unpacked = 0
    for name, packed in zip(module_names.values(), _several(read, module_names.items(), device), strict=True):
        owner: Any = module.get_submodule(name)
        if isinstance(owner, nn.Embedding):
            _replace(module, name, QuantEmbedding(packed, owner, dtype))
        else:
            _replace(module, name, QuantLinear(packed, owner.bias, kernel, dtype))
        if name in shared:
            head: Any = module.get_submodule(shared[name])
            _replace(module, shared[name], QuantLinear(packed, head.bias, kernel, dtype))
        unpacked += packed.in_features * packed.out_features
        if unpacked >= TRIM_WEIGHTS:
            release_free_memory()
            unpacked = 0


def _several(
    read: Callable[[str, str], PackedWeight], names: Iterable[tuple[str, str]], device: torch.device
) -> Iterator[PackedWeight]:
    """Yield weights in order; on a CPU the next ones are read and packed beside, a few at a time."""
    if device.type != "cpu" or threads.threads() == 1:
        yield from (read(stored, name) for stored, name in names)
        return
    with threads.one_thread_each(), ThreadPoolExecutor(min(LOADERS, threads.threads())) as pool:
        waiting = [pool.submit(read, stored, name) for stored, name in names]
        try:
            for index, future in enumerate(waiting):
                waiting[index] = None  # type: ignore[call-overload]  # what was read is the layer's alone
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def read_module(
    source: Source, reader: QuantizedReader, name: str, shape: tuple[int, int], *, view: bool = False
) -> QuantTensor | BlockTensor:
    """Read one quantized weight.

    source: the checkpoint.
    reader: of its quantized modules.
    name: the module's name in the file.
    shape: (out_features, in_features) in the model.
    view: look at the file where it lies, for a reader that copies what it keeps.

    Raises CheckpointError if its shape is not the model's.
    """
    value = reader.module(name, view=view)
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{source.path}: {name} holds a weight of {list(value.shape)}; config.json implies {list(shape)}. "
            "The weights and the config belong to different models."
        )
    return value


def tied_heads(module: Any, source: Source, module_names: dict[str, str]) -> dict[str, str]:
    """Return packed embedding -> the head that is tied to it, where the file stores no matrix for the head.

    module: the skeleton.
    source: the checkpoint.
    module_names: quantized module of the file -> module of the model.
    """
    taken = {*module_names.values(), *(name.removesuffix(".weight") for name in source.names())}
    tied = {
        first.removesuffix(".weight"): twin.removesuffix(".weight") for twin, first in tied_parameters(module).items()
    }
    return {name: tied[name] for name in module_names.values() if name in tied and tied[name] not in taken}


def _shape(owner: Any) -> tuple[int, int]:
    """Return ``(out_features, in_features)`` of a linear, ``(num_embeddings, embedding_dim)`` of an embedding."""
    if isinstance(owner, nn.Embedding):
        return owner.num_embeddings, owner.embedding_dim
    return owner.out_features, owner.in_features


def load_parameters(
    module: nn.Module, weights: Weights, names: Iterable[str], device: torch.device, separate: Collection[str] = ()
) -> None:
    """Give these parameters their values; those that are tied, and equal in the file, share one tensor.

    module: the skeleton; changed in place.
    weights: the source's tensors.
    names: parameters to load.
    device: where the model will run.
    separate: parameters that are not tied, whatever the config says.
    """
    shared: dict[str, nn.Parameter] = {}
    for name in names:
        twin = weights.tied.get(name)
        first = name
        if twin in weights.names and name not in separate and weights.stored_alike(name, str(twin)):
            first = str(twin)
        if name in weights.stored_buffers:
            weights.load_parameter(name, device)
            continue
        if first not in shared:
            shared[first] = nn.Parameter(weights.read(first).to(device), requires_grad=False)
        owner, _, local = name.rpartition(".")
        module.get_submodule(owner)._parameters[local] = shared[first]


def dense_weights(module: nn.Module, source: Source, dtype: torch.dtype) -> tuple[Weights, set[str]]:
    """Return every parameter of a skeleton as float weights, and the names of those that are stored quantized.

    They are read (and dequantized) one at a time, whatever the format.

    module: the skeleton.
    source: the checkpoint.
    dtype: of the weights.

    Raises SourceError and CheckpointError as ``fill`` does.
    """
    reader = QuantizedReader(source)
    module_names = find_modules(module, reader, str(source.path))
    _round_inputs(module, reader, module_names)
    return Weights(module, _Plain(source, reader, module_names, module, True), dtype), {
        f"{name}.weight" for name in module_names.values()
    }


def _round_inputs(module: nn.Module, reader: QuantizedReader, module_names: dict[str, str]) -> None:
    """Round the inputs of every float linear whose activations are quantized, as its packed layer does."""
    for stored, name in module_names.items():
        scheme = reader.scheme(stored)
        if isinstance(scheme, Scheme) and scheme.activations is not None:
            if scheme.activations == "nvfp4":  # what the file fixes for this module is in its tensors
                module_value = reader.module(stored)
                assert isinstance(module_value, QuantTensor)
                scheme = module_value.scheme
            module.get_submodule(name).register_forward_pre_hook(input_hook(scheme))


def find_modules(module: nn.Module, reader: QuantizedReader, where: str) -> dict[str, str]:
    """Return quantized module of the file -> the module of the model that it belongs to.

    Modules of parts that the model does not run (layers that predict further tokens) are left out.

    Call it while each module still has its weight.

    module: the skeleton.
    reader: of the quantized modules.
    where: the checkpoint, as the message names it.

    Raises CheckpointError if the model has no linear layer or embedding for one.
    """
    naming = Naming(module)
    module_names: dict[str, str] = {}
    for stored in reader.modules:
        name = naming.module(stored)
        if name is None and naming.beside(f"{stored}.weight"):
            continue
        if name is None or not isinstance(module.get_submodule(name), (nn.Linear, nn.Embedding)):
            raise CheckpointError(
                f"{where}: holds a quantized weight for {stored!r}, but the model has no linear layer of that name."
            )
        module_names[stored] = name
    return module_names


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, local = name.rpartition(".")
    setattr(module.get_submodule(owner), local, layer)


class _Plain:
    """A source without the packed tensors of its quantized modules, which are offered as float weights if ``dense``.

    Old gptq files hold a bias of zeros for layers that have none (AutoGPTQ wrote one for every layer): left out.
    """

    def __init__(
        self, source: Source, reader: QuantizedReader, module_names: dict[str, str], module: Any, dense: bool
    ) -> None:
        self.source, self.reader = source, reader
        self.path, self.config = source.path, source.config
        owners = {stored: module.get_submodule(name) for stored, name in module_names.items()}
        biases = {f"{stored}.bias" for stored, owner in owners.items() if getattr(owner, "bias", None) is None}
        self._plain = [name for name in reader.plain_names() if name not in biases or bool(source.read(name).any())]
        self._dense: dict[str, Any] = {}
        if dense:
            self._dense = {f"{stored}.weight": owner for stored, owner in owners.items()}

    def names(self) -> list[str]:
        return [*self._plain, *self._dense]

    def info(self, name: str) -> TensorInfo:
        if name not in self._dense:
            return self.source.info(name)
        shape = _shape(self._dense[name])
        return TensorInfo(torch.float32, shape[::-1] if self._transposed(name) else shape)

    def read(self, name: str) -> Tensor:
        if name not in self._dense:
            return self.source.read(name)
        shape = _shape(self._dense[name])
        value = read_module(self.source, self.reader, name.removesuffix(".weight"), shape).dequantize()
        return value.t() if self._transposed(name) else value

    def _transposed(self, name: str) -> bool:
        """Tell whether the original would store this matrix as its transpose."""
        return isinstance(self._dense[name], TransposedLinear)

    def view(self, name: str) -> View:
        return owned(self.read(name)) if name in self._dense else self.source.view(name)

    def read_entry(self, name: str, index: int) -> Tensor:
        return self.source.read_entry(name, index)

    def kinds(self) -> list[str]:
        return self.source.kinds()

    def file_bytes(self) -> int:
        return self.source.file_bytes()

    def digest(self) -> str:
        return self.source.digest()

    def quantization(self) -> dict[str, Any] | None:
        return None
