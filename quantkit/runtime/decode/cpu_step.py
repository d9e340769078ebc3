"""Decode a token of a recognised model in one compiled function, without the interpreter (CPU, extra ``[cpu]``).

The transformers definition still runs prompts and every other model. A recognised model is taken only after its random
twin has given the same hidden states both ways (``proof.py``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.core.kvscheme import PAGE_TOKENS, KVScheme
from quantkit.runtime.decode.family import MATRICES, Block, Family, recognise
from quantkit.runtime.decode.proof import CLOSE, prove
from quantkit.runtime.kernels.cpu_layouts import HalfWeight, PlanarWeight, dense_fields
from quantkit.runtime.kernels.crew import Crew
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kv_cache.cache import KVCache
from quantkit.runtime.kv_cache.paged_layer import LayerSpec, PagedLayer, SequencePages
from quantkit.runtime.layers.linear import QuantLinear

MOST_GROUPS = 14  # of a value, each with a scale (``numba/step_fields.MOST_GROUPS``)
MOST_SEQUENCES = 8  # beyond, the matrices are no longer bound by memory and torch's own multiply faster


def cpu_step(module: Any, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CpuStep | None:
    """Return the compiled step of a model, None where it is not of the family, or the extra is not installed.

    module: the transformers model.
    config: content of config.json.
    dtype: of activations.
    device: where the model runs.
    """
    if device.type != "cpu" or dtype != torch.float32 or not threads.available():
        return None
    family = recognise(module)
    if family is None or not _representable(family) or not proved(json.dumps(dict(config), sort_keys=True)):
        return None
    return CpuStep(family)


@lru_cache(maxsize=16)
def proved(config: str) -> bool:
    """Tell whether the compiled step of a config's twin is right: ``prove`` on a CPU.

    config: config.json as text.
    """
    return prove(config, torch.device("cpu"), lambda family: CpuStep(family) if _representable(family) else None, CLOSE)


def _representable(family: Family) -> bool:
    matrices = [m for block in family.blocks for m in block.linears.values()]
    return family.head_dim % 16 == 0 and all(_fields(m) is not None for m in matrices)


def _fields(module: nn.Module) -> Any:
    """Return a linear module as fields of a job, None for any other module."""
    if isinstance(module, QuantLinear):
        usable = isinstance(module.packed, (PlanarWeight, HalfWeight)) and module.kernel in (None, "numba")
        return module.packed.fields(module.bias) if usable else None  # type: ignore[operator]
    if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_contiguous():
        return dense_fields(module.weight, module.bias)
    return None


class CpuStep:
    """``step(ids [batch, 1], cache) -> [batch, 1, hidden]``, or None where transformers' definition must run.

    Holds addresses of the model's tensors: they must stay where they are.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._codes = threads.compiled("step_fields")
        self._lock = threading.Lock()
        self._crew = Crew()
        self._angles: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._positions = 0
        self._space = torch.empty(0, dtype=torch.uint8)
        first = family.blocks[0].linears
        self.hidden: int = first["o_proj"].out_features  # type: ignore[assignment]
        self.inner: int = first["gate_proj"].out_features  # type: ignore[assignment]
        self._most = MOST_SEQUENCES
        self._qkv = torch.empty(self._most, (family.heads + 2 * family.kv_heads) * family.head_dim)
        self._mixed = torch.empty(self._most, family.heads * family.head_dim)
        self._sent = torch.empty(self._most, self.hidden)
        self._acted = torch.empty(2, self._most, self.inner)
        self._seen = [_Seen() for _ in family.blocks]
        self._job = self._template()

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor | None:
        batch = ids.shape[0]
        if ids.shape[1] != 1 or batch > self._most or not all(_readable(layer) for layer in cache.layers):
            return None
        k, lengths = self._codes, np.array(cache.lengths, dtype=np.int64)
        embedded = self.family.embedding(ids)[:, 0].float().contiguous()
        result = torch.empty(batch, self.hidden)
        with self._lock:
            self._reach(int(lengths.max()) + 1)
            job = self._point_at(cache)
            job[k.TOKENS], job[k.EMBEDDED], job[k.RESULT] = batch, embedded.data_ptr(), result.data_ptr()
            job[k.LENGTHS] = lengths.ctypes.data
            parts = self._crew.choose(threads.threads(), batch)
            self._lay_out(job, batch, int(lengths.max()) + 1, parts)
            threads.pool().run(job, parts)
            self._crew.done()
            threads.follow(self._crew)
        for layer in cache.layers:
            layer.advance(1)
        return result[:, None]

    @property
    def invariant_batch(self) -> int:
        """How many sequences one call takes without one changing a bit of another's numbers: all that it takes.

        Every thread computes each (row, token) and each (sequence, head) by itself, in an order that does not depend
        on how many there are; ``tests/unit/runtime/test_deterministic.py`` compares them bit by bit.
        """
        return self._most

    def reads(self, specs: Sequence[LayerSpec]) -> bool:
        """Tell whether this step reads a cache of such layers; else the definition decodes."""
        return all(_reads(spec, self.family.head_dim) for spec in specs)

    def _template(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the fields of a job that are equal in every step."""
        k, family = self._codes, self.family
        job = np.zeros(k.FIRST_LAYER + len(family.blocks) * k.LAYER, dtype=np.int64)
        job[k.JOB], job[k.LAYERS], job[k.HIDDEN] = k.JOB_STEP, len(family.blocks), self.hidden
        job[k.HEADS], job[k.KV_HEADS], job[k.HEAD_DIM] = family.heads, family.kv_heads, family.head_dim
        job[k.ACT], job[k.INTERMEDIATE], job[k.PAGE] = family.act, self.inner, PAGE_TOKENS
        job[k.EPS], job[k.SCALING] = _bits(family.eps), _bits(family.scaling)
        job[k.QKV], job[k.MIXED], job[k.SENT] = (t.data_ptr() for t in (self._qkv, self._mixed, self._sent))
        job[k.ACTED], job[k.LAST_NORM] = self._acted.data_ptr(), family.last_norm.data_ptr()
        for index, block in enumerate(family.blocks):
            self._fill_layer(job[k.FIRST_LAYER + index * k.LAYER :][: k.LAYER], block)
        return job

    def _fill_layer(self, layer: np.ndarray[Any, np.dtype[np.int64]], block: Block) -> None:
        k, family = self._codes, self.family
        names = ("norm_in", "norm_mid", "after_attention", "after_mlp", "q_norm", "k_norm")
        for field, name in zip(range(k.NORM_IN, k.NORM_K + 1), names, strict=True):
            weight = getattr(block, name)
            layer[field] = 0 if weight is None else weight.data_ptr()
        qkv, dim = self._qkv, family.head_dim * 4
        outs = {
            "q_proj": qkv.data_ptr(),
            "k_proj": qkv.data_ptr() + family.heads * dim,
            "v_proj": qkv.data_ptr() + (family.heads + family.kv_heads) * dim,
            "gate_proj": self._acted[0].data_ptr(),
            "up_proj": self._acted[1].data_ptr(),
        }
        strides = {"q_proj": qkv, "k_proj": qkv, "v_proj": qkv, "gate_proj": self._acted[0], "up_proj": self._acted[1]}
        m = threads.compiled()
        for index, name in enumerate(MATRICES):
            fields = layer[k.MATRICES + index * m.FIELDS :][: m.FIELDS]
            fields[:] = _fields(block.linears[name])
            fields[m.OUT] = outs.get(name, self._sent.data_ptr())
            fields[m.OUT_STRIDE] = strides.get(name, self._sent).stride(0) * 4

    def _reach(self, positions: int) -> None:
        """Extend the rotary angles to at least that many positions."""
        if positions <= self._positions:
            return
        k, wanted = self._codes, max(1024, 1 << (positions - 1).bit_length())
        self._positions = 0  # until every layer points at the new tables: an interrupt leaves them to be made again
        for kind in {block.rotary for block in self.family.blocks}:
            self._angles[kind] = self.family.angles(kind, wanted)
            self._job[k.ROTARY] = self._angles[kind][0].shape[1]
        for index, block in enumerate(self.family.blocks):
            layer = self._job[k.FIRST_LAYER + index * k.LAYER :]
            layer[k.COS], layer[k.SIN] = (part.data_ptr() for part in self._angles[block.rotary])
        self._positions = wanted

    def _point_at(self, cache: KVCache) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the job with the addresses of this cache's pages."""
        k, job, after = self._codes, self._job, [n + 1 for n in cache.lengths]
        for index, (layer, seen) in enumerate(zip(cache.layers, self._seen, strict=True)):
            layer.reserve(after)
            seen.point(job[k.FIRST_LAYER + index * k.LAYER :], layer, k)
        return job

    def _lay_out(self, job: np.ndarray[Any, np.dtype[np.int64]], batch: int, length: int, parts: int) -> None:
        """Divide the workspace into each thread's own memory and the partial results that all share."""
        k, family = self._codes, self.family
        dim, sharing = family.head_dim * 4, family.heads // family.kv_heads
        chunk = k.CHUNK_PAGES * PAGE_TOKENS
        widest = max(self.hidden, self.inner, family.heads * family.head_dim)
        at = 0
        for field, size in (
            (k.S_HIDDEN, batch * self.hidden * 4),
            (k.S_NORM, batch * self.hidden * 4),
            (k.S_QUERY, sharing * dim),
            (k.S_KEY, dim),
            (k.S_BIAS, 2 * sharing * 4),
            (k.S_SCORES, sharing * chunk * 4),
            (k.S_ROWS, k.ROWS_AT_ONCE * dim),
            (k.S_WEIGHTS, k.MOST_GROUPS * sharing * PAGE_TOKENS * 4),
            (k.S_SCALES, max(2 * dim, 2 * PAGE_TOKENS * 4)),
            (k.S_FOLDED, sharing * dim),
            (k.S_QUANT, batch * (widest + 128) * 3),
        ):
            job[field] = at
            at += -(-size // 64) * 64 + 64
        shared = batch * family.heads * (length // chunk + 2) * (k.HEADER * 4 + 2 * dim)
        if self._space.numel() < parts * at + shared + 64:
            self._space = torch.empty(2 * (parts * at + shared) + 64, dtype=torch.uint8)
        job[k.SCRATCH] = self._space.data_ptr() + (-self._space.data_ptr()) % 64
        job[k.SCRATCH_BYTES] = at
        job[k.PARTIALS] = job[k.SCRATCH] + parts * at


class _Seen:
    """The addresses in a layer's fields of the job, written again when the layer has changed."""

    def __init__(self) -> None:
        self._pages = np.zeros((0, 0), dtype=np.int64)  # [batch, pages]: packed ones first, then exact ones
        self._packed = np.zeros(0, dtype=np.int64)  # pages at the front of each sequence that are packed
        self._rows: list[tuple[int, int, list[int], list[int]]] = []
        self._spec: LayerSpec | None = None
        self._at: list[int] = []

    def point(self, fields: np.ndarray[Any, np.dtype[np.int64]], layer: PagedLayer, k: Any) -> None:
        """Write the addresses of a layer's pages into its fields.

        k: the module that names the fields.
        """
        tensors = list(layer.pool().fields.values())
        if layer.packed is not None and layer.first is not None:
            tensors += [*layer.packed.fields.values(), *layer.first]
        at = [x.data_ptr() for x in tensors]
        rows = [(row.packed, row.dropped, row.packed_pages, row.exact_pages) for row in layer.sequences]
        if rows == self._rows and at == self._at and layer.spec is self._spec:
            return
        self._spec = None  # until all is written: an interrupt leaves it to be written again
        self._show(layer.sequences)
        fields[k.TABLE], fields[k.TABLE_STRIDE] = self._pages.ctypes.data, self._pages.shape[1]
        fields[k.PACKED], fields[k.WINDOW] = self._packed.ctypes.data, layer.spec.window or 0
        scheme = layer.spec.scheme
        names = {
            "keys": k.KEY_CODES,
            "key_scales": k.KEY_SCALES,
            "values": k.VALUE_CODES,
            "value_scales": k.VALUE_SCALES,
        }
        fields[k.GROUPS], fields[k.FIRST_COUNT] = 1, 0
        if layer.packed is not None and layer.first is not None:
            fields[k.KEY_BITS], fields[k.VALUE_BITS] = scheme.keys, scheme.values
            fields[k.GROUPS], fields[k.FIRST_COUNT] = scheme.groups(layer.head_dim[1]), scheme.first
            fields[k.FIRST_KEYS], fields[k.FIRST_VALUES] = (x.data_ptr() for x in layer.first)
            for name, x in layer.packed.fields.items():
                fields[names[name]] = x.data_ptr()
        exact = layer.pool().fields
        fields[k.KEY_POOL], fields[k.VALUE_POOL] = exact["keys"].data_ptr(), exact["values"].data_ptr()
        self._rows = [(packed, dropped, list(old), list(new)) for packed, dropped, old, new in rows]
        self._at, self._spec = at, layer.spec

    def _show(self, rows: Sequence[SequencePages]) -> None:
        width = max(row.base + len(row.exact_pages) for row in rows)
        self._pages = np.zeros((len(rows), width), dtype=np.int64)
        self._packed = np.array([row.packed for row in rows], dtype=np.int64)
        for line, row in zip(self._pages, rows, strict=True):
            line[row.dropped : row.dropped + len(row.packed_pages)] = row.packed_pages
            line[row.base : row.base + len(row.exact_pages)] = row.exact_pages


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _readable(layer: PagedLayer) -> bool:
    """Tell whether the step reads this layer's pages."""
    keys, values = layer.head_dim
    return bool(layer.length) and keys == values and _reads(layer.spec, values)


def _reads(spec: LayerSpec, head_dim: int) -> bool:
    """Tell whether a layer is float32, or has both keys and values packed with online scales."""
    if spec.dtype != torch.float32:
        return False
    return spec.packing is None or _unpackable(spec.packing.scheme, head_dim)


@lru_cache(maxsize=64)
def _unpackable(scheme: KVScheme, head_dim: int) -> bool:
    groups = scheme.groups(head_dim)
    narrow = max(scheme.keys, scheme.values) < 16 and scheme.scales == "online"
    return narrow and groups <= MOST_GROUPS and head_dim // groups % 8 == 0
