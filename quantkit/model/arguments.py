"""The arguments of blocks: recorded once for all batches of one shape, or for each where they depend on the tokens."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import UnsupportedModel

BESIDE = "what a block returns beside the hidden state"  # no argument's name


@dataclass(frozen=True)
class Streams:
    """How a model keeps several hidden states at once; handed around here they lie side by side in the last dimension.

    count: how many. axis: 0 for ``[streams, batch, tokens, hidden]`` (gemma3n), 2 for ``[batch, tokens, streams,
    hidden]`` (the hyper-connections of deepseek_v4).
    """

    count: int
    axis: int

    @classmethod
    def of(cls, hidden: Tensor, batch: int, tokens: int) -> Streams | None:
        """Return how a hidden state of four dimensions is laid out, None if it is neither way."""
        for axis, shape in ((2, hidden.shape[:2]), (0, hidden.shape[1:3])):
            if hidden.dim() == 4 and tuple(shape) == (batch, tokens):
                return cls(int(hidden.shape[axis]), axis)
        return None

    def side_by_side(self, hidden: Tensor) -> Tensor:
        """Return ``[batch, tokens, streams * hidden]`` of what the model keeps."""
        states = hidden.permute(1, 2, 0, 3) if self.axis == 0 else hidden
        return states.flatten(2)

    def apart(self, hidden: Tensor) -> Tensor:
        """Return what the model keeps of ``[batch, tokens, streams * hidden]``."""
        split: Tensor = hidden.unflatten(2, (self.count, -1))
        return split.permute(2, 0, 1, 3).contiguous() if self.axis == 0 else split


@dataclass(frozen=True)
class BlockArguments:
    """The arguments one block receives, its hidden state excepted.

    by_batch: those that depend on the tokens (gemma3n's inputs of a layer), for each batch of states; empty if none do.
    streams: how the block takes several hidden states at once; None for one, of three dimensions.
    takes: names of arguments that are what the block before it returned beside the hidden state (the choice of tokens
        that layers of glm_moe_dsa share). It is kept in the mapping ``kwargs[BESIDE]``, one for each batch of states,
        by the number of the block: one that runs again finds what it was given.
    number: of the block.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_batch: tuple[dict[str, Any], ...] = ()
    streams: Streams | None = None
    takes: tuple[str, ...] = ()
    number: int = 0

    def to(self, device: torch.device) -> BlockArguments:
        """Return the same arguments with every tensor on a device."""
        by_batch = tuple(_moved(each, device) for each in self.by_batch)
        return replace(self, args=_moved(self.args, device), kwargs=_moved(self.kwargs, device), by_batch=by_batch)

    def of(self, batch: int) -> BlockArguments:
        """Return the arguments for one batch of states."""
        return replace(self, kwargs={**self.kwargs, **self.by_batch[batch]}, by_batch=()) if self.by_batch else self


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        moved = {key: _moved(item, device) for key, item in value.items()}
        # the same one, if nothing moved: blocks hand things on in it
        return value if all(moved[key] is item for key, item in value.items()) else moved
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    return value


def same_call(a: BlockArguments, b: BlockArguments) -> bool:
    """Tell whether two recordings of one block agree: its arguments then depend on shapes only, not on the tokens."""
    return (
        len(a.args) == len(b.args)
        and a.takes == b.takes
        and a.kwargs.keys() == b.kwargs.keys()
        and _same((a.args, list(a.kwargs.values())), (b.args, list(b.kwargs.values())))
    )


def hands_on(calls: Sequence[BlockArguments]) -> bool:
    """Tell whether blocks hand something on to later ones beside the hidden state, in a mapping that each receives.

    gemma3n's layers that read the keys and values of another one do, and those that return more than a hidden state.
    """
    return any(isinstance(value, MutableMapping) and not value for call in calls for value in call.kwargs.values())


def by_batch(batches: Sequence[Sequence[BlockArguments]], where: str) -> list[BlockArguments]:
    """Return the arguments of every block, given those that it received in each batch.

    where: names the model.

    Raises UnsupportedModel if something other than tensors handed over by name depends on the tokens.
    """
    first = list(batches[0])
    found = []
    for index, call in enumerate(first):
        others = [batch[index] for batch in batches[1:]]
        if all(same_call(call, other) for other in others) and not hands_on([call]):
            found.append(call)
            continue
        names = [name for name, value in call.kwargs.items() if isinstance(value, (Tensor, MutableMapping))]
        varying = [n for n in names if not all(_same(call.kwargs[n], other.kwargs.get(n)) for other in others)]
        varying += [
            n for n in names if n not in varying and isinstance(call.kwargs[n], MutableMapping) and not call.kwargs[n]
        ]
        common = [replace(c, kwargs={n: v for n, v in c.kwargs.items() if n not in varying}) for c in (call, *others)]
        for other in common[1:]:
            require_same_calls(common[:1], [other], where)
        own = tuple({name: c.kwargs[name] for name in varying} for c in (call, *others))
        found.append(replace(call, by_batch=own))
    return found


def require_nothing_handed_on(calls: Sequence[BlockArguments], where: str, option: str) -> None:
    """Raise UnsupportedModel if blocks hand more on than the hidden state, which is kept for one run of them.

    where: names the model. option: what would run them on two states, or in another order.
    """
    if hands_on(calls):
        raise UnsupportedModel(
            f"{where}: its blocks hand something on to later ones beside the hidden state; {option} does not take that."
            " Leave it out (--method gptq and awq take it)."
        )


def require_same_calls(first: Sequence[BlockArguments], calls: Sequence[BlockArguments], where: str) -> None:
    """Raise UnsupportedModel if the arguments of any block differ between two batches; where: names the model."""
    if not all(same_call(a, b) for a, b in zip(first, calls, strict=True)):
        raise UnsupportedModel(
            f"{where}: the arguments of its blocks depend on the tokens, not only on their positions;"
            " what was asked for does not take that. --no-guided, --method gptq or awq without it do."
        )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (type(None), bool, int, float, str, torch.dtype, torch.device)):
        return bool(a == b)
    return type(a) is type(b)  # an object of the model's own: a config, an empty cache
