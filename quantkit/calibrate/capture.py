"""Run one block over all stored states: observe its linears' inputs (and keys and values), or advance the states."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.calibrate.stats import Hessian
from quantkit.errors import UnsupportedModel
from quantkit.model.stepper import Call, run_block


class KeyValueSink(Protocol):
    """Receives keys and values [batch, kv_heads, tokens, head_dim] as the cache would: after rotary."""

    def add(self, keys: Tensor, values: Tensor) -> None: ...


class _Done(Exception):
    """Every input of the block has been seen; what follows the last linear's input need not run."""


class _ObservingCache:
    """Stands in for the KV cache: hands keys and values on, unchanged (the seam is ``Cache.update`` of transformers)."""

    def __init__(self, sink: KeyValueSink) -> None:
        self.sink = sink
        self.called = False

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.sink.add(keys, values)
        self.called = True
        return keys, values


@torch.no_grad()
def observe(
    block: nn.Module,
    states: Sequence[Tensor],
    call: Call,
    groups: Sequence[tuple[str, ...]],
    kv: KeyValueSink | None = None,
) -> list[Hessian]:
    """One Hessian per input group, over all states ([batch, tokens, hidden] each). kv: also observe keys and values."""
    firsts = [block.get_submodule(names[0]) for names in groups]
    hessians = [Hessian(linear.in_features) for linear in firsts]  # type: ignore[arg-type]
    cache = _ObservingCache(kv) if kv is not None else None
    seen: set[int] = set()

    def hook(index: int) -> Callable[..., None]:
        def pre(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            hessians[index].add(args[0])
            seen.add(index)
            if len(seen) == len(groups) and (cache is None or cache.called):
                raise _Done

        return pre

    handles = [linear.register_forward_pre_hook(hook(i)) for i, linear in enumerate(firsts)]
    if cache is not None:
        taken = next((key for key in ("past_key_values", "layer_past") if key in call.kwargs), None)
        if taken is None:
            raise UnsupportedModel(
                f"{type(block).__name__}: takes no past_key_values; its KV cache cannot be calibrated."
            )
        call = dataclasses.replace(call, kwargs={**call.kwargs, taken: cache})
    try:
        for state in states:
            seen.clear()
            if cache is not None:
                cache.called = False
            with contextlib.suppress(_Done):
                run_block(block, state, call)
    finally:
        for handle in handles:
            handle.remove()
    if cache is not None and not cache.called:
        raise UnsupportedModel(f"{type(block).__name__}: never hands its keys and values to the cache.")
    return hessians


@torch.no_grad()
def advance(block: nn.Module, states: list[Tensor], call: Call) -> None:
    """Replace each state by the block's output, in place (one batch of outputs is alive at a time)."""
    for state in states:
        state.copy_(run_block(block, state, call))
