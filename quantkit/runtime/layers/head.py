"""The head at run time: the largest matrix of a small model, read whole for every token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError, UnsupportedModel
from quantkit.formats.reader import QuantizedReader
from quantkit.model.language import name_of, output_embeddings, trunk
from quantkit.runtime.kernels.cpu_layouts import HalfWeight
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear, pack

GROUPS = (64, 32)  # of a rounded head: small groups cost little where there is one such matrix
ROWS, ROUNDERS = 256, 4  # of a head that are rounded at a time, and by how many threads
LAYOUT_BITS = {"planar4": 4, "int4": 4, "planar8": 8, "int8": 8, "half": 16}
NARROW = 6  # bits of weights, in the mean, beside which a head of 8 is not seen


def check_head_bits(bits: int, dequantize: bool) -> None:
    """Check the number of bits of a head.

    bits: 16 keeps it as it is stored, 8 or 4 have a kernel.
    dequantize: weights are held as floats.

    Raises RequestError for other bits, and with ``dequantize`` for a rounded head.
    """
    if bits not in (4, 8, 16):
        raise RequestError(f"head_bits={bits}: expected 16 (as stored), 8 or 4.")
    if dequantize and bits < 16:
        raise RequestError("head_bits rounds the head of a packed model; dequantize holds floats. Leave one out.")


def default_head_bits(module: Any, reader: QuantizedReader, device: torch.device, best: int) -> int:
    """Return the bits of a head where nobody asks for some: 8 on a CPU beside weights of at most 6, else 16.

    It is the largest matrix that a token reads. What 8 bits of it cost is a three-hundredth of what 4 bits of the other
    weights do (``eval/head_bits.py``); beside weights of 8 bits that would show.

    module: the model, filled.
    reader: of the checkpoint.
    device: where the model runs.
    best: 8 where compiled kernels may be used, else 16.
    """
    head = output_embeddings(module)
    if device.type != "cpu" or not threads.available() or dense_weight(head) is None:
        return 16
    schemes = [reader.scheme(name) for name in reader.modules]
    bits = [scheme.bits for scheme in schemes if isinstance(scheme, Scheme)]
    narrow = bool(bits) and len(bits) == len(schemes) and sum(bits) <= NARROW * len(bits)
    return best if narrow else 16


def head_bits(module: Any) -> int | None:
    """Return in how many bits a model's head is held; None for a packing that has no such number."""
    head = output_embeddings(module)
    if isinstance(head, QuantLinear):
        return LAYOUT_BITS.get(head.packed.layout)
    return 8 * int(head.weight.dtype.itemsize) if isinstance(head, nn.Linear) else None


def round_head(module: Any, bits: int, *, device: torch.device, dtype: torch.dtype, kernel: str | None) -> None:
    """Round a dense head to asymmetric groups of 64 (or 32) by their extremes.

    A tied embedding reads the same rounded matrix.

    module: the model; changed in place.
    bits: 8 or 4.
    device: where it runs.
    dtype: of activations.
    kernel: a name from ``KERNELS``, None for the measured choice.

    Raises RequestError for a head that is quantized already, or missing.
    """
    head = output_embeddings(module)
    weight = dense_weight(head)
    if weight is None:
        what = "is quantized in the checkpoint already" if isinstance(head, QuantLinear) else "is no linear layer"
        raise RequestError(f"head_bits={bits}: the head of this model {what}. Leave the option out.")
    group = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
    forget = head.packed.forget if isinstance(head, QuantLinear) and isinstance(head.packed, HalfWeight) else None
    rounded = _rounded(weight.detach(), Scheme(bits, group, False), forget)
    _replace(module, head, pack(rounded, device=device, kernel=kernel), dtype, kernel)


def _rounded(weight: Tensor, scheme: Scheme, forget: Callable[[], None] | None) -> QuantTensor:
    """Round a matrix by the extremes of its groups, in pieces: a float32 copy would be the largest tensor of loading.

    ``forget`` gives pages of it that were read back to the system, where it lies in a mapped file.
    """
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    groups = weight.shape[0], scheme.groups(weight.shape[1])
    scales, zeros = torch.empty(groups, dtype=scheme.torch_scale_dtype), torch.empty(groups, dtype=torch.int16)

    def piece(first: int) -> None:
        rows = slice(first, first + ROWS)
        part = weight[rows].float().cpu()
        if forget is not None:
            forget()
        scales[rows], asymmetric = affine.minmax_params(part, scheme)
        assert asymmetric is not None
        zeros[rows] = asymmetric
        codes[rows] = affine.quantize(part, scales[rows], zeros[rows], scheme)

    pieces, several = range(0, weight.shape[0], ROWS), min(ROUNDERS, threads.threads())
    if several == 1:
        for start in pieces:
            piece(start)
    else:
        with threads.one_thread_each(), ThreadPoolExecutor(several) as workers:
            list(workers.map(piece, pieces))
    return QuantTensor(codes, scales, zeros, scheme)


def dense_weight(head: Any) -> Tensor | None:
    """Return the matrix of a head that is not quantized, in the dtype in which it is held; None for another."""
    if isinstance(head, QuantLinear):
        return head.packed.weight if isinstance(head.packed, HalfWeight) else None
    return head.weight if isinstance(head, nn.Linear) else None


def compact_head(module: Any, dtype: torch.dtype, kernel: str | None = None) -> None:
    """Hold a float32 head in 16 bits, where that is exact and a kernel reads it (extra ``[cpu]``).

    module: the model; changed in place.
    dtype: of activations.
    kernel: a name from ``KERNELS``, None for the measured choice.
    """
    head = output_embeddings(module)
    if dtype != torch.float32 or not threads.available() or type(head) is not nn.Linear:
        return
    stored = HalfWeight.dtype_of(head.weight)
    if stored is not None:
        _replace(module, head, HalfWeight(head.weight.detach().to(stored)), dtype, kernel)


def _replace(module: Any, head: Any, packed: PackedWeight, dtype: torch.dtype, kernel: str | None) -> None:
    embedding = module.get_input_embeddings()
    for name, owner in list(module.named_modules()):
        if owner is head:
            _set(module, name, QuantLinear(packed, head.bias, kernel, dtype))
        elif owner is embedding and _one_matrix(embedding, head):
            original = embedding.original if isinstance(embedding, QuantEmbedding) else embedding
            _set(module, name, QuantEmbedding(packed, original, dtype))


def _one_matrix(embedding: Any, head: Any) -> bool:
    """Tell whether embedding and head are the same tensor."""
    if isinstance(embedding, QuantEmbedding) or isinstance(head, QuantLinear):
        return getattr(embedding, "packed", None) is getattr(head, "packed", 0)
    return isinstance(embedding, nn.Embedding) and embedding.weight.data_ptr() == head.weight.data_ptr()


def _set(module: Any, name: str, layer: nn.Module) -> None:
    owner, _, local = name.rpartition(".")
    setattr(module.get_submodule(owner), local, layer)


class _Given:
    """A base model that returns the hidden states that it is given.

    Its submodules are it, too (OPT's head calls ``model.decoder``); numbers are the real body's (falcon_h1's factors).
    """

    def __init__(self, body: Any) -> None:
        self.__dict__["body"] = body
        self.__dict__["hidden"] = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["body"], name)
        return self if isinstance(value, nn.Module) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Final(self.__dict__["hidden"])


class _Final:
    """What a base model returns: final hidden states, and None for every other field that a head may pass on."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        return None

    def __getitem__(self, index: int) -> Any:
        return self.last_hidden_state if index == 0 else None


class HeadOnly:
    """A model without its body: it maps final hidden states to logits. Shares all weights.

    The architecture's own code does it, so every scaling and soft cap (gemma, cohere, granite) is right without a list
    of them.
    """

    def __init__(self, module: Any) -> None:
        body = trunk(module)
        self._given = _Given(body)
        self._alone = _with(module, name_of(module, body).split("."), self._given)

    def __call__(self, inputs_embeds: Tensor, use_cache: bool = False) -> Any:
        """Return the model's output, whose ``logits`` are ``[batch, tokens, vocab]``.

        inputs_embeds: final hidden states ``[batch, tokens, hidden]``.

        Raises UnsupportedModel for a head that takes more of its body than these.
        """
        self._given.__dict__["hidden"] = inputs_embeds
        try:
            return self._alone(inputs_embeds=inputs_embeds, use_cache=use_cache)
        except AttributeError as error:
            raise UnsupportedModel(
                f"{type(self._alone).__name__}: its head takes more of the model than final hidden states ({error});"
                " running it is not supported."
            ) from error
        finally:
            self._given.__dict__["hidden"] = None


def _with(module: Any, path: list[str], given: _Given) -> Any:
    """Return a copy of a module in which the submodule at ``path`` is ``given``."""
    alone = copy.copy(module)
    first, *rest = path
    inner = given if not rest else _with(module._modules[first], rest, given)
    alone.__dict__["_modules"] = {**module._modules, first: inner}
    return alone


def head_only(module: Any) -> HeadOnly:
    """Return the model without its body."""
    return HeadOnly(module)
