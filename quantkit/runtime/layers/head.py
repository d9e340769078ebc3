"""The head at run time: the largest matrix of a small model, read whole for every token."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.core import affine
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError, UnsupportedModel
from quantkit.model.language import name_of, output_embeddings, trunk
from quantkit.runtime.kernels.cpu_layouts import HalfWeight
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.kernels.reference import PackedWeight
from quantkit.runtime.layers.embedding import QuantEmbedding
from quantkit.runtime.layers.linear import QuantLinear, pack

GROUPS = (64, 32)  # of a rounded head: small groups cost little where there is one such matrix


def check_head_bits(bits: int, dequantize: bool) -> None:
    """Check the number of bits of a rounded head.

    bits: 8 or 4 have a kernel.
    dequantize: weights are held as floats.

    Raises RequestError for other bits, and with ``dequantize``.
    """
    if bits not in (4, 8):
        raise RequestError(f"head_bits={bits}: expected 8 or 4.")
    if dequantize:
        raise RequestError("head_bits rounds the head of a packed model; dequantize holds floats. Leave one out.")


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
    if not isinstance(head, nn.Linear):
        what = "is quantized in the checkpoint already" if isinstance(head, QuantLinear) else "is no linear layer"
        raise RequestError(f"head_bits={bits}: the head of this model {what}. Leave the option out.")
    weight = head.weight.detach().float().cpu()
    group = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
    scheme = Scheme(bits, group, False)
    scales, zeros = affine.minmax_params(weight, scheme)
    q = QuantTensor(affine.quantize(weight, scales, zeros, scheme), scales, zeros, scheme)
    _replace(module, head, pack(q, device=device, kernel=kernel), dtype, kernel)


def compact_head(module: Any, dtype: torch.dtype, kernel: str | None = None) -> None:
    """Hold a float32 head in the 16 bits of its source, where that is exact and a kernel reads it (extra ``[cpu]``).

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


def _replace(module: Any, head: nn.Linear, packed: PackedWeight, dtype: torch.dtype, kernel: str | None) -> None:
    embedding = module.get_input_embeddings()
    tied = isinstance(embedding, nn.Embedding) and embedding.weight.data_ptr() == head.weight.data_ptr()
    for name, owner in list(module.named_modules()):
        if owner is head:
            _set(module, name, QuantLinear(packed, head.bias, kernel, dtype))
        elif owner is embedding and tied:
            _set(module, name, QuantEmbedding(packed, embedding, dtype))


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
