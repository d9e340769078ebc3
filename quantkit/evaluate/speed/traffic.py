"""Count what a decode step must read and what a model keeps in memory; measure how fast this machine's memory is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantkit.model.language import text_config
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear

if TYPE_CHECKING:
    from quantkit.runtime.model import Model

STREAM_BYTES = 256 << 20  # beyond every last-level cache that a decoding process has for itself
# Buffers of a packed weight that are no codes, by the beginning of their names.
SIDE = ("scale", "zero", "shift", "one")
GPU_COPIES = 16  # behind one another: alone, a launch and a wait take a fifth of the time of such a copy
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of the device's memory, best of several runs over 256 MiB.

    read: a sum of float32 (0 where it was not measured). copy: read and write counted.
    """

    read: float
    copy: float

    @property
    def best(self) -> float:
        """What a kernel that only reads can hope for."""
        return max(self.read, self.copy)


def measure_bandwidth(device: torch.device, seconds: float = 0.5) -> Bandwidth:
    """Measure the memory as STREAM does, with the threads torch has.

    On a GPU the copy alone is measured: a sum there is bound by its own launches.
    """
    source = torch.ones(STREAM_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copies = GPU_COPIES if device.type == "cuda" else 1

    def run() -> None:
        for _ in range(copies):
            target.copy_(source)

    copy = 2 * STREAM_BYTES * copies / _best(run, device, seconds)
    read = 0.0 if device.type == "cuda" else STREAM_BYTES / _best(source.sum, device, seconds)
    return Bandwidth(read, copy)


def _best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of the fastest run, of four at least and until ``seconds`` are spent."""
    best, spent, count = float("inf"), 0.0, 0
    while count < 4 or spent < seconds:
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        elapsed = time.perf_counter() - start
        best, spent, count = min(best, elapsed), spent + elapsed, count + 1
    return best


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of a loaded model.

    codes: integer weights (whole blocks for foreign formats). scales: scales, zeros and what a layout derives from
    them. dense: everything in the run-time dtype or 16 bit. kv_per_token: keys and values of all layers, one sequence.
    """

    codes: int
    scales: int
    dense: int
    kv_per_token: int

    def to_json(self) -> dict[str, int]:
        """Return a JSON object with every field."""
        return asdict(self)


def model_memory(model: Model) -> ModelMemory:
    """Count the bytes of the weights by class; a tied matrix counts once."""
    packed = {id(m): m for m in model.module.modules() if isinstance(m, PackedWeight)}
    side = sum(
        buffer.nbytes for weight in packed.values() for name, buffer in weight.named_buffers() if name.startswith(SIDE)
    )
    memory = model.memory()
    return ModelMemory(memory["quantized"] - side, side, memory["dense"], memory["kv_per_token"])


def weight_bytes_per_step(model: Model, batch: int) -> int:
    """Count the bytes of weights that a decode step of ``batch`` sequences reads.

    Every tensor counts once; of an embedding that is no head only the rows looked up, of a mixture's experts the share
    that ``batch`` tokens can reach at most.
    """
    seen = _idle(model.module, batch)
    total = 0.0
    share = _expert_share(text_config(model.module), batch)
    lookups = _lookups(model.module)
    for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]:
        if tensor.data_ptr() in seen or tensor.data_ptr() in lookups:
            continue
        seen.add(tensor.data_ptr())
        total += tensor.nbytes * (share if ".experts." in name else 1.0)
    return int(total) + batch * _row_bytes(lookups)


def _idle(module: nn.Module, tokens: int) -> set[int]:
    """Return the addresses of tensors that a step does not read.

    Of a weight that is held twice, that is the form that is not used for so few tokens.
    """
    addresses: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, QuantLinear) and layer.dense is not None:
            idle = layer.packed.buffers() if layer.takes_dense(tokens) else [layer.dense]
            addresses.update(tensor.data_ptr() for tensor in idle)
    return addresses


def _expert_share(config: Any, batch: int) -> float:
    """Return the share of a mixture's experts that ``batch`` tokens can reach at most; 1 without experts."""
    count = next((int(getattr(config, key)) for key in EXPERT_COUNTS if getattr(config, key, None)), 0)
    chosen = int(getattr(config, "num_experts_per_tok", None) or 0)
    return min(1.0, batch * chosen / count) if count and chosen else 1.0


def _lookups(module: Any) -> dict[int, tuple[int, int]]:
    """Find the tensors that only an embedding uses: address -> (bytes, rows)."""
    heads = {t.data_ptr() for m in module.modules() if not _embeds(m) for t in _own(m)}
    sizes = {}
    for owner in module.modules():
        if _embeds(owner):
            tables = [t for t in _own(owner) if t.dim() > 1]  # not the factor that gemma multiplies by
            sizes.update({t.data_ptr(): (t.nbytes, int(owner.num_embeddings)) for t in tables})
    return {address: size for address, size in sizes.items() if address not in heads}


def _row_bytes(lookups: dict[int, tuple[int, int]]) -> int:
    """Sum up the bytes of one row of each of these embeddings."""
    return sum(size // rows for size, rows in lookups.values())


def _embeds(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, QuantEmbedding))


def _own(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module computes with.

    Its own, and those of a packed weight it holds (shared with the head when tied).
    """
    if isinstance(module, PackedWeight):
        return []  # counted at its owner
    packed = getattr(module, "packed", None)
    own: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return own + (list(packed.buffers()) if isinstance(packed, PackedWeight) else [])


def kv_bytes_per_step(model: Model, cached: float, batch: int) -> int:
    """Count the bytes of keys and values that a step over ``cached`` tokens a sequence reads.

    Sliding layers read their window.
    """
    windows = model.windows()
    layer = model.memory()["kv_per_token"] / len(windows)
    return int(batch * layer * sum(cached if window is None else min(cached, window) for window in windows))
