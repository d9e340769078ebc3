"""Decoding without the interpreter: a step of a recognised model in one compiled function (CPU, extra ``[cpu]``).

The transformers definition stays what runs prompts and every other model. A recognised model is taken only after its random twin has
given the same hidden states both ways.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.core.precision import exact_products
from quantkit.errors import QuantkitError, QuantkitWarning
from quantkit.runtime import workers
from quantkit.runtime.cache import PAGE_TOKENS, IntCodec, KVCache, PagedLayer, PlainCodec
from quantkit.runtime.family import MATRICES, Block, Family, recognise
from quantkit.runtime.kernels.cpu_packed import HalfWeight, PlanarWeight, dense_fields
from quantkit.runtime.linear import QuantLinear

MOST_SEQUENCES = 8  # beyond, the matrices are no longer bound by memory and torch's own multiply faster
PROOF_TOKENS = 140  # the twin's longrope, yarn and llama 4 scalings begin at 128
CLOSE = 1e-4  # largest relative difference on the twin; float32 sums in another order give about 1e-6


def lean_step(module: Any, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> LeanStep | None:
    """The compiled step of a model, or None where it is not of the family, or the extra is not there."""
    if device.type != "cpu" or dtype != torch.float32 or not workers.available():
        return None
    family = recognise(module)
    if family is None or not _representable(family) or not proved(json.dumps(dict(config), sort_keys=True)):
        return None
    return LeanStep(family)


Step = Callable[
    [Tensor, KVCache, Tensor | None], Tensor | None
]  # ids [batch, 1], cache, mask -> hidden states, or None


@lru_cache(maxsize=16)
def proved(config: str) -> bool:
    """Whether the compiled step of a config's twin is right: ``prove`` on a CPU."""
    return prove(
        config, torch.device("cpu"), lambda family: LeanStep(family) if _representable(family) else None, CLOSE
    )


def prove(config: str, device: torch.device, make: Callable[[Family], Step | None], close: float) -> bool:
    """Whether the twin of a config gives the same final hidden states by the step that ``make`` gives as by transformers'
    definition, within ``close`` of their norm: a prompt longer than the twin's sliding window and than the context that its positions
    were scaled from, then four steps of two sequences, one of them padded, over float32 pages. That integer pages are read alike depends
    on no model: tests hold it."""
    from quantkit.model.twin import small_twin

    try:
        twin: Any = small_twin(json.loads(config)).to(device)
        family = recognise(twin)
        step = None if family is None else make(family)
        with exact_products():
            return step is not None and _equals_the_definition(twin, step, device, close)
    except QuantkitError as error:  # no twin, no proof: the definition runs
        warnings.warn(f"decoding stays with the transformers definition: {error}", QuantkitWarning, stacklevel=3)
        return False


@torch.inference_mode()
def _equals_the_definition(twin: Any, step: Step, device: torch.device, close: float) -> bool:
    from quantkit.model.twin import VOCAB
    from quantkit.runtime.model import Model

    model = Model(twin, {}, device=device, dtype=torch.float32, read_tokenizer=lambda: None, lean=False)
    count = min(PROOF_TOKENS, model.context or PROOF_TOKENS)
    vocab = min(VOCAB, int(twin.config.vocab_size))
    ids = torch.randint(3, vocab, (2, count), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return all(_agree(model, step, ids, given, close) for given in (None, mask))


def _agree(model: Any, step: Step, ids: Tensor, mask: Tensor | None, close: float) -> bool:
    from quantkit.runtime.attention import transformers_cache

    caches = [model.new_cache(32) for _ in range(2)]
    seams = [transformers_cache(cache) for cache in caches]
    prompt = ids.shape[1] - 4
    for seam in seams:
        model.step(ids[:, :prompt], seam, None if mask is None else mask[:, :prompt])
    for last in range(prompt, ids.shape[1]):
        seen = None if mask is None else mask[:, : last + 1]
        expected = model.step(ids[:, last : last + 1], seams[0], seen)
        found = step(ids[:, last : last + 1], caches[1], seen)
        if found is None or not float((found - expected).norm()) <= close * float(expected.norm()):  # NaN is no proof
            return False
    return True


def _representable(family: Family) -> bool:
    matrices = [m for block in family.blocks for m in block.linears.values()]
    return family.head_dim % 16 == 0 and all(_fields(m) is not None for m in matrices)


def _fields(module: nn.Module) -> Any:
    """A linear module as fields of a job, or None."""
    if isinstance(module, QuantLinear):
        usable = isinstance(module.packed, (PlanarWeight, HalfWeight)) and module.kernel in (None, "numba")
        return module.packed.fields(module.bias) if usable else None  # type: ignore[operator]
    if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_contiguous():
        return dense_fields(module.weight, module.bias)
    return None


class LeanStep:
    """``step(ids [batch, 1], cache, mask) -> [batch, 1, hidden]``, or None where transformers' definition must run.

    Holds addresses of the model's tensors: they must stay where they are.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._codes = workers.compiled("step")
        self._lock = threading.Lock()
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
        self._job = self._template()

    def __call__(self, ids: Tensor, cache: KVCache, mask: Tensor | None) -> Tensor | None:
        batch, length = ids.shape[0], cache.length
        if ids.shape[1] != 1 or batch > self._most or not all(_readable(layer) for layer in cache.layers):
            return None
        pads = left_padding(mask, batch)
        if pads is None:
            return None
        k = self._codes
        embedded = self.family.embedding(ids)[:, 0].float().contiguous()
        result = torch.empty(batch, self.hidden)
        with self._lock:
            self._reach(length + 1)
            job = self._point_at(cache)
            job[k.TOKENS], job[k.EMBEDDED], job[k.RESULT] = batch, embedded.data_ptr(), result.data_ptr()
            job[k.LENGTH], job[k.PADS] = length, pads.ctypes.data
            parts = workers.threads()
            self._lay_out(job, batch, length + 1, parts)
            workers.pool().run(job, parts)
        for layer in cache.layers:
            layer.advance(1)
        return result[:, None]

    def _template(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Everything that does not change from step to step."""
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
        m = workers.compiled()
        for index, name in enumerate(MATRICES):
            fields = layer[k.MATRICES + index * m.FIELDS :][: m.FIELDS]
            fields[:] = _fields(block.linears[name])
            fields[m.OUT] = outs.get(name, self._sent.data_ptr())
            fields[m.OUT_STRIDE] = strides.get(name, self._sent).stride(0) * 4

    def _reach(self, positions: int) -> None:
        """Angles for that many positions at least."""
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
        """The job with the addresses of this cache's pages."""
        k, job = self._codes, self._job
        for index, layer in enumerate(cache.layers):
            layer.reserve(layer.length + 1)
            fields = job[k.FIRST_LAYER + index * k.LAYER :]
            fields[k.KEY_POOL], fields[k.VALUE_POOL] = layer.key_pool.data_ptr(), layer.value_pool.data_ptr()
            fields[k.TABLE], fields[k.TABLE_STRIDE] = layer.table.data_ptr(), layer.table.shape[1]
            fields[k.DROPPED], fields[k.WINDOW] = layer.dropped, layer.spec.window or 0
            keys, values = layer.spec.keys, layer.spec.values
            fields[k.KV_BITS] = 16
            if isinstance(keys, IntCodec) and isinstance(values, IntCodec):
                fields[k.KV_BITS], fields[k.KV_GROUPS] = keys.bits, keys.scale.shape[1]
                fields[k.KEY_SCALE], fields[k.KEY_ZERO] = keys.scale.data_ptr(), keys.zero.data_ptr()
                fields[k.VALUE_SCALE], fields[k.VALUE_ZERO] = values.scale.data_ptr(), values.zero.data_ptr()
        return job

    def _lay_out(self, job: np.ndarray[Any, np.dtype[np.int64]], batch: int, length: int, parts: int) -> None:
        """Each thread's own memory."""
        k, family = self._codes, self.family
        widest = max(self.hidden, self.inner, family.heads * family.head_dim)
        at = 0
        for field, size in (
            (k.S_HIDDEN, batch * self.hidden * 4),
            (k.S_NORM, batch * self.hidden * 4),
            (k.S_QUERY, family.head_dim * 4),
            (k.S_KEY, family.head_dim * 4),
            (k.S_VALUE, family.head_dim * 4),
            (k.S_ENTRY, family.head_dim * 4),
            (k.S_SCORES, length * 4),
            (k.S_QUANT, batch * (widest + 128) * 3),
        ):
            job[field] = at
            at += -(-size // 64) * 64 + 64
        if self._space.numel() < parts * at + 64:
            self._space = torch.empty(2 * parts * at + 64, dtype=torch.uint8)
        job[k.SCRATCH] = self._space.data_ptr() + (-self._space.data_ptr()) % 64
        job[k.SCRATCH_BYTES] = at


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _readable(layer: PagedLayer) -> bool:
    """Whether the step reads this layer's pages: float32 as it comes, or integer codes of 8 or 4 bits."""
    keys, values = layer.spec.keys, layer.spec.values
    if not layer.length or layer.head_dim[0] != layer.head_dim[1] or keys.dtype != values.dtype:
        return False
    if isinstance(keys, IntCodec) and isinstance(values, IntCodec):
        return keys.bits == values.bits and keys.result == values.result == torch.float32
    return isinstance(keys, PlainCodec) and isinstance(values, PlainCodec) and keys.dtype == torch.float32


def left_padding(mask: Tensor | None, batch: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Padded tokens at the front of each sequence; None for a mask with other holes."""
    if mask is None:
        return np.zeros(batch, dtype=np.int64)
    pads = mask.shape[1] - mask.sum(1)
    expected = torch.arange(mask.shape[1])[None] >= pads[:, None]
    return pads.numpy().astype(np.int64) if torch.equal(mask.bool(), expected) else None
