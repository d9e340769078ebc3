"""A checkpoint in any format we read -> a model ready to run. Weights are streamed tensor by tensor into the skeleton."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.source import Source, TensorInfo, open_source, read_json
from quantkit.core.activations import round_input
from quantkit.core.host import release_free_memory
from quantkit.core.kvscheme import Scales
from quantkit.core.precision import cpu_has_bfloat16
from quantkit.core.qtensor import BlockTensor, QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RequestError, SourceError
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.formats.reader import QuantizedReader
from quantkit.model.naming import Naming
from quantkit.model.skeleton import Weights, build_skeleton, tied_parameters
from quantkit.runtime.embedding import QuantEmbedding
from quantkit.runtime.head import check_head_bits, compact_head, round_head
from quantkit.runtime.kernels.cpu_packed import HalfWeight
from quantkit.runtime.kv_plan import kv_plan, tell_of_foreign_scales
from quantkit.runtime.linear import KERNELS, QuantLinear, pack
from quantkit.runtime.model import Model
from quantkit.runtime.siblings import join_siblings

__all__ = ["Model", "load"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Unpacking leaves holes in the heap: 350 MB for SmolLM2-135M if nothing is done. Trimmed after this many weights.
TRIM_WEIGHTS = 1 << 24


def load(
    ref: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kv_bits: int | str | None = None,
    kv_scales: Scales | None = None,
    dequantize: bool = False,
    kernel: str | None = None,
    head_bits: int | None = None,
    keep_dense: bool = False,
    graphs: bool = True,
) -> Model:
    """Load a model to run it: floating point, or quantized in any format that quantkit reads.

    ref: named model, folder or GGUF file. device: "auto" (a GPU if there is one), "cpu", "cuda". dtype of activations and of
    weights that are not quantized: "auto", "float32", "bfloat16", "float16" (never on a CPU). kv_bits: None for what the
    checkpoint was calibrated for (16 if it was not), or 16, 8, 4, 3, 2, "fp8", or keys and values apart: "k4v2". kv_scales: "online", which any
    model can have, or "static", which ``convert`` calibrates; None for what the checkpoint says, else online. dequantize: hold quantized weights as floats instead of packed
    (for evaluation). kernel: None for the measured choice, or a name from ``runtime.linear.KERNELS`` for every layer.
    head_bits: 8 or 4 rounds a head that is stored dense (and the embedding tied to it) to groups of that many bits as it is loaded:
    the largest matrix of a small model; None keeps it exact. keep_dense: hold a float copy of every packed layer beside it, for
    prompts; costs the memory of the original. graphs: on a GPU, capture decode steps in CUDA graphs that run ahead of the host where the model
    allows it; False launches them kernel by kernel.

    Raises RequestError for a bad option, SourceError or CheckpointError for a model that cannot be read whole.
    """
    where = choose_device(device)
    number = choose_dtype(dtype, where)
    if kernel is not None and kernel not in KERNELS:
        raise RequestError(f"kernel={kernel!r}: known kernels are {', '.join(KERNELS)}.")
    if head_bits is not None:
        check_head_bits(head_bits, dequantize)
    if keep_dense and (dequantize or kernel is not None or where.type != "cpu"):
        raise RequestError(
            "keep_dense serves packed layers of a CPU, each with its own choice of kernel. Leave it out here."
        )
    if not graphs and where.type != "cuda":
        raise RequestError(
            f"graphs=False (--no-graphs) has no effect on {where}: only a GPU captures graphs. Leave it out."
        )
    source = open_source(ref)
    plan = kv_plan(read_kv_plan(source.path) if source.path.is_dir() else None, kv_bits, kv_scales)
    reader = QuantizedReader(source)
    tell_of_foreign_scales(reader, plan)
    module = build_skeleton(source.config, number)
    if keep_dense and head_bits is None and not reader.modules:
        raise RequestError(
            f"keep_dense (--keep-dense) has no effect: no weight of {source.path} is quantized. Leave it out."
        )
    fill(module, source, reader, device=where, dtype=number, dequantize=dequantize, kernel=kernel)
    if head_bits is not None:
        round_head(module, head_bits, device=where, dtype=number, kernel=kernel)
    elif not dequantize and where.type == "cpu" and kernel in (None, "numba"):
        compact_head(module, number, kernel)
    if keep_dense:
        _hold_dense(module, number)
    if where.type == "cuda":
        join_siblings(module, where)
    return Model(
        module,
        source.config,
        device=where,
        dtype=number,
        read_tokenizer=lambda: _tokenizer(source),
        end_tokens=end_tokens(source),
        kv_plan=plan,
        graphs=graphs,
    )


def _hold_dense(module: nn.Module, dtype: torch.dtype) -> None:
    for layer in module.modules():
        # a head kept in 16 bits becomes float32 for next to nothing, and reads one token of each prompt
        if isinstance(layer, QuantLinear) and not isinstance(layer.packed, HalfWeight):
            layer.hold_dense(dtype)


def choose_device(device: str | torch.device) -> torch.device:
    """Resolve "auto". Raises RequestError for a device that is unknown or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise RequestError(f"device={device!r}: expected auto, cpu or cuda.") from None
    if found.type not in ("cpu", "cuda"):
        raise RequestError(f"device={device!r}: expected auto, cpu or cuda.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RequestError("device='cuda': torch sees no CUDA device. Use --device cpu, or install torch with CUDA.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise RequestError(
            f"device='{found}': torch sees {torch.cuda.device_count()} CUDA devices, counted from cuda:0."
        )
    return found


def choose_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve "auto": bf16 on a GPU and where the processor multiplies it (AVX512-BF16, AMX), else float32.

    Raises RequestError for an unknown dtype, and for float16 on a CPU: it overflows at 65504, and no CPU kernel is faster for it.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or cpu_has_bfloat16() else torch.float32
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise RequestError(f"dtype={dtype!r}: expected auto, {', '.join(DTYPES)}.")
    if found == torch.float16 and device.type == "cpu":
        raise RequestError(
            "dtype=float16 on a CPU: large activations overflow and nothing gets faster. Use float32 or bfloat16."
        )
    return found


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
    """Give every parameter of a skeleton its stored value, one tensor in memory at a time; tied weights stay one tensor.

    Raises SourceError naming what is missing or left over, CheckpointError for a quantized module that does not fit.
    """
    places = place_modules(module, reader, str(source.path))
    shared = {} if dequantize else tied_heads(module, source, places)
    if not dequantize:
        for name in [*places.values(), *shared.values()]:  # before Weights looks for names: they have no dense weight
            module.get_submodule(name)._parameters.pop("weight")
    weights = Weights(module, _Plain(source, reader, places, module, dequantize), dtype)
    if dequantize:
        _round_inputs(module, reader, places)
    else:
        load_packed(module, source, reader, places, shared, device, dtype, kernel)
    _load_dense(module, weights, {f"{name}.weight" for name in places.values()}, device)
    for name, buffer in list(module.named_buffers()):
        owner, _, local = name.rpartition(".")
        module.get_submodule(owner)._buffers[local] = buffer.to(device)
    left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
    if left:
        raise SourceError(
            f"{source.path}: {len(left)} tensors got no value, first {left[0]!r}. The checkpoint is incomplete."
        )


def load_packed(
    module: Any, source: Source, reader: QuantizedReader, places: dict[str, str], shared: dict[str, str],
    device: torch.device, dtype: torch.dtype, kernel: str | None,
) -> None:  # fmt: skip
    """Pack every quantized module for the device. shared: packed embedding -> the head that reads it too."""
    unpacked = 0
    for stored, name in places.items():
        owner: Any = module.get_submodule(name)
        packed = pack(read_module(source, reader, stored, _shape(owner)), device=device, kernel=kernel)
        if isinstance(owner, nn.Embedding):
            _replace(module, name, QuantEmbedding(packed, owner, dtype))
        else:
            _replace(module, name, QuantLinear(packed, owner.bias, kernel))
        if name in shared:
            head: Any = module.get_submodule(shared[name])
            _replace(module, shared[name], QuantLinear(packed, head.bias, kernel))
        unpacked += packed.in_features * packed.out_features
        if unpacked >= TRIM_WEIGHTS:
            release_free_memory()
            unpacked = 0


def read_module(
    source: Source, reader: QuantizedReader, name: str, shape: tuple[int, int]
) -> QuantTensor | BlockTensor:
    """One quantized weight. Raises CheckpointError if its shape is not the model's."""
    value = reader.module(name)
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{source.path}: {name} holds a weight of {list(value.shape)}; config.json implies {list(shape)}. "
            "The weights and the config belong to different models."
        )
    return value


def tied_heads(module: Any, source: Source, places: dict[str, str]) -> dict[str, str]:
    """Packed embedding -> the head that reads the same matrix, because it is tied and the file stores none of its own."""
    taken = {*places.values(), *(name.removesuffix(".weight") for name in source.names())}
    tied = {
        first.removesuffix(".weight"): twin.removesuffix(".weight") for twin, first in tied_parameters(module).items()
    }
    return {name: tied[name] for name in places.values() if name in tied and tied[name] not in taken}


def _shape(owner: Any) -> tuple[int, int]:
    """``(out_features, in_features)`` of a linear, ``(num_embeddings, embedding_dim)`` of an embedding."""
    if isinstance(owner, nn.Embedding):
        return owner.num_embeddings, owner.embedding_dim
    return owner.out_features, owner.in_features


def _load_dense(module: nn.Module, weights: Weights, separate: set[str], device: torch.device) -> None:
    """Parameters that are not packed. Those that are tied share one tensor, also if the file stores both.

    separate: parameters that were quantized apart from their twin (a quantized head), and so are not tied any more.
    """
    load_parameters(module, weights, weights.names, device, separate)


def load_parameters(
    module: nn.Module, weights: Weights, names: Iterable[str], device: torch.device, separate: Collection[str] = ()
) -> None:
    """Give these parameters their values; those that are tied, and equal in the file, share one tensor."""
    shared: dict[str, nn.Parameter] = {}
    for name in names:
        twin = weights.tied.get(name)
        first = name
        if twin in weights.names and name not in separate and _equal(weights, name, str(twin)):
            first = str(twin)
        if first not in shared:
            shared[first] = nn.Parameter(weights.read(first).to(device), requires_grad=False)
        owner, _, local = name.rpartition(".")
        module.get_submodule(owner)._parameters[local] = shared[first]


def dense_weights(module: nn.Module, source: Source, dtype: torch.dtype) -> tuple[Weights, set[str]]:
    """Every parameter of a skeleton as float weights, read (and dequantized) one at a time, whatever the format; and the
    names of those that are stored quantized. Raises SourceError and CheckpointError as ``fill`` does."""
    reader = QuantizedReader(source)
    places = place_modules(module, reader, str(source.path))
    _round_inputs(module, reader, places)
    return Weights(module, _Plain(source, reader, places, module, True), dtype), {
        f"{name}.weight" for name in places.values()
    }


def _round_inputs(module: nn.Module, reader: QuantizedReader, places: dict[str, str]) -> None:
    """Give every float linear whose activations are quantized what its packed twin computes with."""
    for stored, name in places.items():
        scheme = reader.scheme(stored)
        if isinstance(scheme, Scheme) and scheme.activations is not None:
            module.get_submodule(name).register_forward_pre_hook(round_input)


def _equal(weights: Weights, name: str, twin: str) -> bool:
    """Whether a tied parameter really is its twin. A file may store both, and differ: transformers then unties them."""
    own, other = weights.stored(name), weights.stored(twin)
    return own == other or torch.equal(weights.source.read(own), weights.source.read(other))


def place_modules(module: nn.Module, reader: QuantizedReader, where: str) -> dict[str, str]:
    """Quantized module of the file -> the module of the model that it belongs to.

    Raises CheckpointError if the model has no linear layer or embedding for one. Call it while each still has its weight.
    """
    naming = Naming(module)
    places: dict[str, str] = {}
    for stored in reader.modules:
        name = naming.module(stored)
        if name is None or not isinstance(module.get_submodule(name), (nn.Linear, nn.Embedding)):
            raise CheckpointError(
                f"{where}: holds a quantized weight for {stored!r}, but the model has no linear layer of that name."
            )
        places[stored] = name
    return places


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, local = name.rpartition(".")
    setattr(module.get_submodule(owner), local, layer)


def _tokenizer(source: Source) -> Any:
    from quantkit.checkpoint.tokenizer import load_tokenizer

    return load_tokenizer(source)


def end_tokens(source: Source) -> tuple[int, ...]:
    """Tokens that end an answer: ``eos_token_id`` (one or a list) of generation_config.json, else of config.json."""
    file = source.path / "generation_config.json"  # a GGUF file has none: what lies beside it belongs to another model
    stored = read_json(file).get("eos_token_id") if file.exists() else None
    value = source.config.get("eos_token_id") if stored is None else stored
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


class _Plain:
    """A source seen without the packed tensors of its quantized modules, which are offered as float weights if ``dense``.

    Old gptq files hold a bias of zeros for layers that have none (AutoGPTQ wrote one for every layer): left out.
    """

    def __init__(
        self, source: Source, reader: QuantizedReader, places: dict[str, str], module: Any, dense: bool
    ) -> None:
        self.source, self.reader = source, reader
        self.path, self.config = source.path, source.config
        owners = {stored: module.get_submodule(name) for stored, name in places.items()}
        biases = {f"{stored}.bias" for stored, owner in owners.items() if getattr(owner, "bias", None) is None}
        self._plain = [name for name in reader.plain_names() if name not in biases or bool(source.read(name).any())]
        self._dense: dict[str, tuple[int, int]] = {}
        if dense:
            self._dense = {f"{stored}.weight": _shape(owner) for stored, owner in owners.items()}

    def names(self) -> list[str]:
        return [*self._plain, *self._dense]

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(torch.float32, self._dense[name]) if name in self._dense else self.source.info(name)

    def read(self, name: str) -> Tensor:
        if name not in self._dense:
            return self.source.read(name)
        return read_module(self.source, self.reader, name.removesuffix(".weight"), self._dense[name]).dequantize()

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
