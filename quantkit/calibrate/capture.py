"""Run one block over all hidden states: observe its linears' inputs (and keys and values), or advance the states."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.calibrate.matmul_precision import model_runs
from quantkit.calibrate.stats import Hessian, InputRoot, InputStatistics
from quantkit.calibrate.transfer import Shuttle
from quantkit.core.precision import exact_products
from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import BlockArguments
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.stepper import run_block


class KeyValueSink(Protocol):
    """Receives keys and values [batch, kv_heads, tokens, head_dim] as the cache would: after rotary."""

    def add(self, keys: Tensor, values: Tensor) -> None: ...


class TokenWeights(Protocol):
    """Predicts token importance (``algorithms.guide.Guide``)."""

    def weights(self, groups: Sequence[Sequence[str]], states: Tensor) -> list[Tensor | None]: ...


class _Done(Exception):
    """Every input of the block has been seen; what follows the last linear's input need not run."""


class _ObservingCache:
    """Stand in for the KV cache: hand keys and values on, unchanged (the seam is ``Cache.update`` of transformers)."""

    def __init__(self, sink: KeyValueSink) -> None:
        self.sink = sink
        self.called = False

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with exact_products():  # the sink's arithmetic is rounding's
            self.sink.add(keys, values)
        self.called = True
        return keys, values


@torch.no_grad()
def observe(
    block: nn.Module,
    states: Sequence[Tensor],
    call: BlockArguments,
    groups: Sequence[tuple[str, ...]],
    kv: KeyValueSink | None = None,
    exact: Sequence[Tensor] = (),
    cross: bool = True,
    guide: TokenWeights | None = None,
    *,
    correlations: bool = True,
) -> list[Hessian | InputRoot]:
    """Collect the statistics of every input group, over all states ([batch, tokens, hidden] each, on the host).

    Runs, and keeps the statistics, on the device that the block is on; ``call`` must be there too.

    kv: also observe keys and values.
    exact: the original model's states beside ``states``, advanced in place: the block still has its original weights.
    cross: collect ``Hessian.cross`` from ``exact``, but for experts, which other tokens reach in the original model.
    guide: token importance, at the inputs of the linears it knows.
    correlations: collect Hessians; False keeps the inputs themselves (``InputRoot``) where those are smaller, but for
        experts, whose statistics are completed from each other's.
    """
    device = device_of(block)
    firsts = [block.get_submodule(names[0]) for names in groups]
    cache = _ObservingCache(kv) if kv is not None else None
    of_experts = expert_linears(block)
    few = 0 if correlations else sum(state.shape[0] * state.shape[1] for state in states)
    found = [_empty(linear, 0 if names[0] in of_experts else few) for names, linear in zip(groups, firsts, strict=True)]
    observer = _Observer(found, cache)
    paired = {i: linear for i, linear in enumerate(firsts) if cross and groups[i][0] not in of_experts}
    usual = call if cache is None else with_cache(block, call, cache)
    originals = Shuttle(exact, device)
    ahead = originals.arriving()
    with model_runs(device):
        for index, hidden in enumerate(Shuttle(states, device).arriving()):
            observer.restart([] if guide is None else guide.weights(groups, hidden))
            if exact:
                with _tapped(paired, observer.see_original):
                    originals.leave(index, run_block(block, next(ahead), call.of(index)))
            if groups or cache is not None:
                with _tapped(dict(enumerate(firsts)), observer.see), contextlib.suppress(_Done):
                    run_block(block, hidden, usual.of(index))
    originals.finish()
    if cache is not None and not cache.called:
        raise UnsupportedModel(f"{type(block).__name__}: never hands its keys and values to the cache.")
    return found


def _empty(linear: nn.Module, few: int) -> Hessian | InputRoot:
    """Return statistics of a linear's input: itself, where ``few`` (0: any number) tokens are no more than inputs."""
    width: int = linear.in_features  # type: ignore[assignment]
    return (InputRoot if 0 < few <= width else Hessian)(width, device_of(linear))


class _Observer:
    """Feeds the inputs of one batch of states, group by group, to the groups' statistics."""

    def __init__(self, statistics: Sequence[InputStatistics], cache: _ObservingCache | None) -> None:
        self.statistics, self.cache = statistics, cache
        self.seen: set[int] = set()
        self.originals: dict[int, Tensor] = {}
        self.importance: dict[int, Tensor | None] = {}

    def restart(self, importance: Sequence[Tensor | None]) -> None:
        """Begin a batch. importance: of its tokens, for each group; empty where all count alike."""
        self.seen.clear()
        self.importance = dict(enumerate(importance))
        if self.cache is not None:
            self.cache.called = False

    def see_original(self, index: int, x: Tensor) -> None:
        """Keep a group's input of the original model for ``see``."""
        self.originals[index] = x.clone()

    def see(self, index: int, x: Tensor) -> None:
        """Add a group's input. Raises _Done once every group and the cache were seen."""
        self.statistics[index].add(x, self.originals.pop(index, None), self.importance.get(index))
        self.seen.add(index)
        if len(self.seen) == len(self.statistics) and (self.cache is None or self.cache.called):
            raise _Done


@contextlib.contextmanager
def _tapped(modules: Mapping[int, nn.Module], see: Callable[[int, Tensor], object]) -> Iterator[None]:
    """Inside: ``see`` gets the key and the input of each of the modules that runs."""

    def tap(index: int) -> Callable[..., None]:
        def pre(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            see(index, args[0])

        return pre

    handles = [module.register_forward_pre_hook(tap(index)) for index, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_cache(block: nn.Module, call: BlockArguments, cache: Any) -> BlockArguments:
    """Return the call with ``cache``, which has the ``update`` of transformers' ``Cache``.

    Raises UnsupportedModel if the block takes none.
    """
    taken = next((key for key in ("cache", "past_key_values", "layer_past") if key in call.kwargs), None)
    if taken is None:
        raise UnsupportedModel(f"{type(block).__name__}: takes no past_key_values; its KV cache cannot be calibrated.")
    return dataclasses.replace(call, kwargs={**call.kwargs, taken: cache})


@torch.no_grad()
def advance(block: nn.Module, states: list[Tensor], call: BlockArguments) -> None:
    """Replace each state by the block's output, in place (a few batches are on the block's device at a time)."""
    device = device_of(block)
    shuttle = Shuttle(states, device)
    with model_runs(device):
        for index, hidden in enumerate(shuttle.arriving()):
            shuttle.leave(index, run_block(block, hidden, call.of(index)))
    shuttle.finish()


def device_of(block: nn.Module) -> torch.device:
    """Return the device of the block's weights."""
    return next(block.parameters()).device
