"""Decode a token of a recognised model by few GPU kernels, in a step that waits for nothing on the host.

One launch packs the pages that have become old, in all layers. Then come eight launches a layer: norm (with the
addition before it), q/k/v, rotary with the cache write, attention, o, norm, gate/up with the activation, down. Where
linears are not fused (``layers/fused.py``), or are not packed for Triton, there are a few more. The residual is
float32. Positions, padding and the addresses of pages are read from device memory, and nothing that Python does
depends on them: so ``forward`` can be captured (``generate/cuda_graphs.py``).

The transformers definition still runs prompts and every other model; a recognised one is taken only after its random
twin has given the same hidden states both ways (``proof.prove``, on the same device, in float32).
"""

from __future__ import annotations

import copy
import json
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.runtime.decode.family import GELU_TANH, SILU, Block, Family, recognise
from quantkit.runtime.decode.proof import CLOSE, prove
from quantkit.runtime.kernels.decode_reference import Heads
from quantkit.runtime.kernels.reference import BlockWeight, PackedWeight
from quantkit.runtime.kernels.triton.layout import ROWS, TritonWeight
from quantkit.runtime.kernels.triton.tile_table import processors
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.device_tables import DeviceTables
from quantkit.runtime.kv_cache.paged_layer import LayerSpec
from quantkit.runtime.layers.fused import FusedLinear
from quantkit.runtime.layers.linear import KERNELS, linear

ACTIVATIONS = {SILU: "silu", GELU_TANH: "gelu_tanh"}
WIDEST_HEAD = {
    torch.bfloat16: 256,
    torch.float16: 256,
    torch.float32: 128,
}  # a page of keys and values in shared memory
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
MOST_ROWS = 64  # queries of a key head times groups of a packed value
FIRST_POSITIONS = 2048  # angles that are made at first


@dataclass(frozen=True)
class State:
    """The inputs and workspaces of a step, all on the device.

    ids: int64 ``[sequences, 1]``, tokens of this step.
    tables: their positions, and the pages of every layer.
    space: the workspace of attention.
    angles: cos and sin by kind of block, for every position that the state will reach; a captured step of this state
        goes on reading these tables, whatever longer ones the model makes later.
    """

    ids: Tensor
    tables: DeviceTables
    space: Any
    angles: Mapping[str | None, tuple[Tensor, Tensor]]


def gpu_step(
    module: Any, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[GpuStep | None, str]:
    """Return the step of a model and ``""``, or None and the reason.

    module: the transformers model.
    config: content of config.json.
    dtype: of activations.
    device: where the model runs.
    """
    if find_spec("triton") is None:
        return None, "Triton is not installed"
    family = recognise(module)
    if family is None:
        return (
            None,
            f"the blocks of this {config.get('model_type', 'model')} are not those of the common decoder family",
        )
    refused = _refused(family, dtype)
    if refused:
        return None, refused
    if not proved(json.dumps(dict(config), sort_keys=True), device):
        return None, "its random twin did not give the same numbers by the short step as by the transformers definition"
    return GpuStep(family, dtype), ""


@lru_cache(maxsize=16)
def proved(config: str, device: torch.device) -> bool:
    """Tell whether the step is right for a config's twin: ``proof.prove`` on this device.

    config: config.json as text.
    device: where the model runs.
    """
    return prove(
        config,
        device,
        lambda family: None if _refused(family, torch.float32) else GpuStep(family, torch.float32),
        CLOSE,
    )


def _refused(family: Family, dtype: torch.dtype) -> str:
    """Return why the kernels cannot run a family, empty if they can."""
    most = WIDEST_HEAD[dtype]
    if family.head_dim % 2 or family.head_dim > most:
        return f"heads of {family.head_dim} channels are not taken (even numbers up to {most} are, in {dtype})"
    foreign = [
        m
        for block in family.blocks
        for m in block.linears.values()
        if isinstance(getattr(m, "packed", None), BlockWeight)
    ]
    return "weights of a foreign block format are dequantized by code that waits for the device" if foreign else ""


class GpuStep:
    """``step(ids [sequences, 1], cache) -> [sequences, 1, hidden]``, or None where the definition must run.

    A warning gives the reason, once. ``forward(state)`` is the same for a caller who keeps a ``State`` himself: it does
    not read the cache's bookkeeping. ``dtype`` is that of activations; the residual is float32.
    """

    def __init__(self, family: Family, dtype: torch.dtype) -> None:
        self.family, self.dtype = family, dtype
        self.device = family.last_norm.device
        self.heads = Heads(family.heads, family.kv_heads, family.head_dim, family.scaling)
        self._kernels = import_module("quantkit.runtime.kernels.triton.step")
        self._attention = import_module("quantkit.runtime.kernels.triton.attention")
        self._packing = import_module("quantkit.runtime.kernels.triton.pack_page")
        self._dense = [
            [fuse_dense([block.linears[name] for name in names]) for names in (QKV, GATE_UP)] for block in family.blocks
        ]
        self._pairs = [pair_of(block.linears["gate_proj"], block.linears["up_proj"]) for block in family.blocks]
        self._angles: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._positions = 0
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor | None:
        specs = [layer.spec for layer in cache.layers]
        if ids.shape[1] != 1 or not cache.length:
            return None
        refused = next(filter(None, (why_unreadable(spec, self.dtype, self.heads) for spec in specs)), "")
        if refused:
            if refused not in self._warned:
                self._warned.add(refused)
                warnings.warn(f"decoding on the GPU runs the transformers definition: {refused}.", stacklevel=3)
            return None
        if any(layer.head_dim != (self.heads.dim, self.heads.dim) for layer in cache.layers):
            return None
        tables = DeviceTables(len(ids), cache.length + 1, specs, self.heads.dim, self.device)
        tables.fill(cache)
        hidden = self.forward(State(ids, tables, self.workspace(len(ids), specs), self.reach(cache.length + 1)))
        for layer in cache.layers:
            layer.advance(1)
        return hidden

    def workspace(self, sequences: int, specs: Sequence[LayerSpec]) -> Any:
        """Allocate the workspace of attention for that many sequences and such layers."""
        groups = [spec.scheme.groups(self.heads.dim) for spec in specs if spec.packing is not None]
        return self._attention.Workspace(
            sequences, self.heads, processors(self.device), self.device, max(groups, default=0)
        )

    def reads(self, specs: Sequence[LayerSpec]) -> bool:
        """Tell whether the kernels read such pages (``why_unreadable``)."""
        return not any(why_unreadable(spec, self.dtype, self.heads) for spec in specs)

    def reach(self, positions: int) -> Mapping[str | None, tuple[Tensor, Tensor]]:
        """Return rotary angles for at least that many positions, by kind of block."""
        with self._lock:
            if positions > self._positions:
                wanted = max(FIRST_POSITIONS, 1 << (positions - 1).bit_length())
                kinds = {block.rotary for block in self.family.blocks}
                self._angles = {kind: self.family.angles(kind, wanted) for kind in kinds}
                self._positions = wanted
            return self._angles

    def forward(self, state: State) -> Tensor:
        """Write keys and values, and return the final hidden states ``[sequences, 1, hidden]``.

        Waits for nothing on the host, so it can be captured.
        """
        family, add_norm = self.family, self._kernels.add_norm
        for job in state.tables.jobs:
            self._packing.pack(job, self.heads, self.dtype, state.space.turn)
        residual = family.embedding(state.ids)[:, 0].float().contiguous()
        delta: Tensor | None = None
        after: Tensor | None = None
        for index, (block, pages) in enumerate(zip(family.blocks, state.tables.layers, strict=True)):
            x = add_norm(residual, delta, after, block.norm_in, family.eps, self.dtype)
            q, k, v = columns([block.linears[name] for name in QKV], x, self._dense[index][0])
            norms = block.q_norm, block.k_norm
            angles = state.angles[block.rotary]
            q = self._kernels.rotary_and_cache(q, k, v, norms, angles, pages, self.heads, family.eps)
            mixed = block.linears["o_proj"](self._attention.attend(q, pages, self.heads, state.space))
            x = add_norm(residual, mixed, block.after_attention, block.norm_mid, family.eps, self.dtype)
            delta, after = block.linears["down_proj"](self._inner(index, block, x)), block.after_mlp
        hidden: Tensor = add_norm(residual, delta, after, family.last_norm, family.eps, self.dtype)
        return hidden[:, None]

    def _inner(self, index: int, block: Block, x: Tensor) -> Tensor:
        act, pair = ACTIVATIONS[self.family.act], self._pairs[index]
        if pair is not None:
            from quantkit.runtime.kernels.triton.launch import linear_pair

            return linear_pair(x, *pair, act)
        gate, up = columns([block.linears[name] for name in GATE_UP], x, self._dense[index][1])
        acted: Tensor = self._kernels.activated(gate, up, act)
        return acted


def fuse_dense(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None] | None:
    """Stack weights and biases of plain linears; None for any other modules.

    The modules' own parameters become views of the stack: no memory is added.
    """
    if any(type(m) is not nn.Linear for m in modules) or len({(m.bias is None, m.weight.dtype) for m in modules}) > 1:
        return None
    parts = []
    for name in ("weight",) if modules[0].bias is None else ("weight", "bias"):
        whole = torch.cat([getattr(m, name).detach() for m in modules])
        for m, part in zip(modules, whole.split([m.out_features for m in modules]), strict=True):
            m._parameters[name] = nn.Parameter(part, requires_grad=False)
        parts.append(whole)
    return parts[0], parts[1] if len(parts) > 1 else None


def columns(modules: Sequence[Any], x: Tensor, dense: tuple[Tensor, Tensor | None] | None = None) -> list[Tensor]:
    """Return the outputs of linears that read the same tensor; fused ones are computed once.

    modules: the linears.
    x: ``[..., in_features]``.
    dense: all of them as one dense weight and bias (``fuse_dense``), None otherwise.
    """
    if dense is not None:
        return list(nn.functional.linear(x, *dense).split([m.out_features for m in modules], dim=-1))
    joined: dict[int, tuple[Tensor, ...]] = {}
    outputs = []
    for module in modules:
        if not isinstance(module, FusedLinear):
            outputs.append(module(x))
            continue
        together = module.fused
        if id(together) not in joined:
            kernel = KERNELS[module.kernel] if module.kernel else None
            joined[id(together)] = linear(x, together.weight, together.bias, kernel=kernel).split(
                together.splits, dim=-1
            )
        outputs.append(joined[id(together)][module.index])
    return outputs


def pair_of(gate: nn.Module, up: nn.Module) -> tuple[TritonWeight, Tensor | None] | None:
    """Return gate and up as one weight whose kernel applies the activation, with its bias; None if not fused so."""
    if not isinstance(gate, FusedLinear) or not isinstance(up, FusedLinear) or gate.fused is not up.fused:
        return None
    together = gate.fused
    weight: PackedWeight = together.weight
    rows = together.splits[0]
    if type(weight) is not TritonWeight or gate.kernel is not None or (gate.index, up.index) != (0, 1):
        return None
    if together.splits != [rows, rows] or rows % ROWS:
        return None
    pair = copy.copy(weight)  # the same bricks
    pair.pair = rows
    return pair, together.bias


def why_unreadable(spec: LayerSpec, dtype: torch.dtype, heads: Heads) -> str:
    """Return why the kernels cannot read a layer's pages, empty if they can.

    They read exact pages in the step's dtype, and packed ones with online scales.

    spec: of the layer.
    dtype: of the step.
    heads: of the model.
    """
    if spec.dtype != dtype:
        return f"its pages are {spec.dtype}, the step computes in {dtype}"
    if spec.packing is None:
        return ""
    scheme = spec.scheme
    if scheme.scales != "online":
        return f"its packed pages have {scheme.scales} scales (online ones are read)"
    width = scheme.width(heads.dim)
    if heads.dim % 16 or width % 8:
        return f"packed heads of {heads.dim} channels in groups of {width} are not read (multiples of 16 and 8 are)"
    if heads.query // heads.kv * scheme.groups(heads.dim) > MOST_ROWS:
        return (
            f"{heads.query // heads.kv} queries a key head with {scheme.groups(heads.dim)} groups of channels are more"
            f" than {MOST_ROWS}"
        )
    return ""
