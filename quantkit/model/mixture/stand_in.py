"""Stand in for a fused parameter: where a module multiplies with an expert's entry of it, that expert's linears run.

So a module's own forward computes with linears, however it is called and whatever it does around them. Exact by
construction: what is not a product with one expert's matrix, or with each expert's in turn, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class NotOneExpert(TypeError):
    """A fused parameter was used in another way than one expert at a time."""


class WrongWay(NotOneExpert):
    """A fused parameter is stored the other way round than its layout says."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is used transposed")
        self.name = name


# Runs the projections of an expert's entry: (expert, input) -> [rows, out].
Run = Callable[[int, Tensor], Tensor]


class StandIn:
    """A fused parameter ``[E, a, b]`` (or ``[E * a, b]``), of which only shapes and entries can be read.

    name: of the parameter.
    shape: as stored.
    transposed: an entry is ``[in, out]``.
    run: runs an expert's linears.
    like: for dtype and device.
    """

    def __init__(self, name: str, shape: tuple[int, ...], transposed: bool, run: Run, like: Tensor) -> None:
        self.name, self.shape, self.transposed, self.run = name, torch.Size(shape), transposed, run
        self.like = like

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: Any) -> StandIn:
        """Return the same with the experts in a dimension of their own."""
        wanted = sizes[0] if len(sizes) == 1 else sizes
        shape = torch.empty(self.shape, device="meta").view(*wanted).shape
        if len(shape) != 3 or shape[2] != self.shape[-1]:
            raise NotOneExpert(f"{self.name} is seen as {list(shape)}")
        return StandIn(self.name, tuple(shape), self.transposed, self.run, self.like)

    reshape = view

    def transpose(self, first: int, second: int) -> StandIn:
        if len(self.shape) != 3 or {first % 3, second % 3} != {1, 2}:
            raise NotOneExpert(f"{self.name} is transposed in its dimensions {first} and {second}")
        count, a, b = self.shape
        return StandIn(self.name, (count, b, a), not self.transposed, self.run, self.like)

    @property
    def mT(self) -> StandIn:  # noqa: N802 - as tensors call it
        return self.transpose(-1, -2)

    def __getitem__(self, index: Any) -> Entry:
        if len(self.shape) != 3 or not isinstance(index, (int, Tensor)) or torch.as_tensor(index).dim():
            raise NotOneExpert(f"{self.name} is read at {index!r}")
        return Entry(self, int(index), self.transposed)

    def each(self, x: Tensor) -> Tensor:
        """Multiply ``x [E, rows, in]`` with every expert's matrix; rows of zeros are of tokens that go elsewhere."""
        if not self.transposed:
            raise WrongWay(self.name)
        if x.shape[0] != self.shape[0]:
            raise NotOneExpert(f"{self.name} multiplies {list(x.shape)}")
        out = x.new_zeros(*x.shape[:-1], self.shape[2])
        for index in range(self.shape[0]):
            rows = (x[index] != 0).any(-1)
            if bool(rows.any()):
                out[index, rows] = self.run(index, x[index][rows])
        return out

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self.each(x)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        name = getattr(func, "__name__", "")
        if name in ("bmm", "matmul", "__matmul__") and isinstance(args[0], Tensor) and args[0].dim() == 3:
            product: Tensor = args[1].each(args[0])
            return product
        raise NotOneExpert(f"{args!r} meet in {name}")


class Entry:
    """One expert's entry of a fused parameter: a matrix to multiply with.

    turned: it is ``[in, out]`` as it stands.
    """

    def __init__(self, whole: StandIn, index: int, turned: bool) -> None:
        self.whole, self.index, self.turned = whole, index, turned

    @property
    def shape(self) -> torch.Size:
        a, b = self.whole.shape[1:]
        return torch.Size((a, b) if self.turned == self.whole.transposed else (b, a))

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def t(self) -> Entry:
        return Entry(self.whole, self.index, not self.turned)

    def transpose(self, first: int, second: int) -> Entry:
        return self.t()

    @property
    def T(self) -> Entry:  # noqa: N802 - as tensors call it
        return self.t()

    @property
    def mT(self) -> Entry:  # noqa: N802 - as tensors call it
        return self.t()

    def times(self, x: Tensor, turned: bool) -> Tensor:
        """Multiply ``x [..., in]``; turned: as ``x @ self`` instead of ``linear(x, self)``."""
        if turned != self.turned:
            raise WrongWay(self.whole.name)
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.shape[1 if turned else 0])
        return self.whole.run(self.index, x)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return self.times(x, True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        name = getattr(func, "__name__", "")
        bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        product = func is functional.linear or name in ("matmul", "__matmul__", "mm")
        if not product or bias is not None or not isinstance(args[0], Tensor) or not isinstance(args[1], cls):
            raise NotOneExpert(f"an entry meets {name}")
        return args[1].times(args[0], func is not functional.linear)
