"""A device that is not the CPU, without one: tensors say that they are on ``pretend`` and hold a CPU tensor.

What runs on them runs on the held tensors, so results are the CPU's, bit for bit. As on a GPU, an operation that mixes
tensors of both places is an error (numbers and copies excepted), and so is reading a tensor's memory from Python.
Indices that a GPU would take from the host are refused, too: the code under test should not need that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::set_", "aten::is_pinned", "aten::_pin_memory")
_known: list[torch.device] = []


class Mixed(RuntimeError):
    """An operation had tensors of both places."""


class Held(Tensor):
    """A tensor on ``pretend``."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=device(), requires_grad=False,
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def device() -> torch.device:
    """The device; known to torch from the first call on."""
    if not _known:
        _setup_privateuseone_for_python_backend(NAME)
        _known.append(torch.device(NAME, 0))
    return _known[0]


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on what the tensors hold; its results are where it happened."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, Held)]
    wanted = kwargs.get("device")
    away = bool(here) if wanted is None else torch.device(wanted).type == NAME
    if func._schema.name not in _COPIES and here and any(x.dim() for x in tensors if not isinstance(x, Held)):
        raise Mixed(f"{func}: tensors on {NAME} and on the CPU")
    given = {**kwargs, **({} if wanted is None else {"device": torch.device("cpu")})}
    held = tree_map(lambda x: x.held if isinstance(x, Held) else x, (args, given))
    if func._schema.name == "aten::_to_copy" and away != bool(here):  # a real device never shares memory
        held[1].setdefault("dtype", held[0][0].dtype)
    out = func(*held[0], **held[1])
    if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
        return args[0]
    return tree_map(lambda x: Held(x) if isinstance(x, Tensor) and away else x, out)


class _Factories(TorchDispatchMode):
    """Tensors made on ``pretend``, or moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def pretending() -> Iterator[torch.device]:
    """Inside, tensors can be on the device that is given."""
    where = device()
    with _Factories(), torch.no_grad():
        yield where
