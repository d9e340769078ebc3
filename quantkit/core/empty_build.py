"""The context in which a model's structure is built: parameters on meta, and what may become real is bounded.

A stranger's config says how large tables and lists are, under whatever name, so that what is bounded is the tensors and
modules themselves.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_module_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from quantkit.errors import UnsupportedModel

# Bytes of one tensor that is computed, and of the buffers that a model keeps. Tables of known models have 64 MB at most
# (masks of 8,192 x 8,192, ids of 10 million positions); a few of the first stand beside each other while one is made.
MOST_TENSOR, MOST_BUFFERS = 128 << 20, 512 << 20
# Parts of a model: twice 128 layers of 512 experts with four modules each.
MOST_MODULES = 1 << 19


class _LargeOnMeta(TorchFunctionMode):
    """Make large tensors on meta at once: they become parameters, and one layer's experts alone may exceed the memory.

    What is small may be a buffer that holds something, and stays real. What is a mask is no parameter.
    """

    # elements from which on; a buffer may be filled after torch.empty too, but not one of this size
    LIMITS: ClassVar[dict[Any, int]] = {torch.empty: 1 << 16, torch.zeros: 1 << 24, torch.ones: 1 << 24}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = dict(kwargs or {})
        if func in self.LIMITS and out.get("device") is None and out.get("dtype") not in (torch.bool, bool):
            sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
            if torch.Size(sizes or out.get("size", ())).numel() >= self.LIMITS[func]:
                out["device"] = "meta"
        return func(*args, **out)


class _Bounded(TorchDispatchMode):
    """Ask of every operation how large its result would be, and refuse what no model has before it takes memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        size = _bytes_of_result(func, args, named)
        if size > MOST_TENSOR:
            raise _too_large("a table", size)
        return func(*args, **named)


def _bytes_of_result(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that an operation would take, 0 where that is little, or where only its values would tell."""
    if func.is_view or func._schema.is_mutable or torch.device(kwargs.get("device") or "cpu").type == "meta":
        return 0
    given = list(_flat((args, kwargs)))
    if any(isinstance(value, Tensor) and value.is_meta for value in given):
        return 0
    # No operation makes more than the product of all sizes and numbers that it is given, or the square of that (eye and
    # diag do); 16 bytes a number.
    if 16 * math.prod(_size(value) for value in given) ** 2 <= MOST_TENSOR:
        return 0
    named = dict(kwargs)
    if "device" in named or not any(isinstance(value, Tensor) for value in given):
        named["device"] = torch.device("meta")
    try:
        results = tree_flatten(func(*tree_map(_on_meta, args), **tree_map(_on_meta, named)))[0]
    except (RuntimeError, TypeError):  # an operation on values (item, nonzero), or one that is always on the CPU
        return 0
    return sum(result.numel() * result.itemsize for result in results if isinstance(result, Tensor))


def _flat(value: Any) -> Iterator[Any]:
    """Yield what stands in lists and mappings."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from _flat(entry)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def _size(value: Any) -> float:
    """Return how many times as large a value may make a result; at least 2, so that a product is above any sum."""
    if isinstance(value, Tensor):
        return max(2, value.numel())
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 1
    return max(2.0, abs(value), 1 / abs(value) if value else 0.0)  # a step of 0.001 makes a thousand numbers of one


def _on_meta(value: Any) -> Any:
    """Return a tensor of the same form without numbers; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _too_large(what: str, size: int) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json asks for {what} of {size:,} bytes (positions, widths or windows), more than any known model"
        " computes. The file is damaged: download it again."
    )


class _Parts:
    """Counts the modules and the real buffers that are registered."""

    def __init__(self) -> None:
        self.modules = 0
        self.bytes = 0
        self.seen: set[int] = set()  # where buffers lie, for one may have several names

    def module(self, owner: nn.Module, name: str, module: nn.Module | None) -> None:
        self.modules += 1
        if self.modules > MOST_MODULES:
            raise UnsupportedModel(
                f"config.json asks for more than {MOST_MODULES:,} modules (layers, experts), more than any known model"
                " has. The file is damaged: download it again."
            )

    def buffer(self, owner: nn.Module, name: str, buffer: Tensor | None) -> None:
        if buffer is None:
            return
        if buffer.is_meta:
            if buffer.nbytes > MOST_TENSOR:
                raise _too_large("a table", buffer.nbytes)
            return
        storage = buffer.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        if self.bytes > MOST_BUFFERS:
            raise _too_large("tables", self.bytes)


@contextlib.contextmanager
def parameters_on_meta(models: Any = None) -> Iterator[None]:
    """New parameters go to meta; buffers stay real, because non-persistent ones cannot be read from any file.

    models: transformers' PreTrainedModel, whose way to fill new modules is kept to those with buffers.

    Raises UnsupportedModel, from where the model is built, for a table, tables in all, or a number of modules that no
    model has.
    """
    fill: Any = getattr(models, "_initialize_weights", None)
    register, parts = nn.Module.register_parameter, _Parts()

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

    def fill_buffers(model: Any, module: nn.Module, *rest: Any) -> None:
        # Nobody will see the numbers of parameters, and some are computed one by one in Python: a table of sines.
        own = list(module.parameters(recurse=False))
        if not own or module._buffers or not all(parameter.is_meta for parameter in own):
            fill(model, module, *rest)

    hooks = [
        register_module_module_registration_hook(parts.module),
        register_module_buffer_registration_hook(parts.buffer),
    ]
    nn.Module.register_parameter = to_meta  # type: ignore[method-assign,assignment]
    if models is not None:
        models._initialize_weights = fill_buffers
    try:
        with _Bounded(), _LargeOnMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        if models is not None:
            models._initialize_weights = fill
        for hook in hooks:
            hook.remove()
