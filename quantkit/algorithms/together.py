"""Solve many small problems in step: the searches that all of them wait for are made as one.

A search tries dozens of ranges, each with a dozen calls of torch. For an expert of a few thousand weights the calls are
all the time there is; hundreds of experts in one call cost little more than one. Rows do not influence one another, so
the result is the same, to the bit.

A solver is a generator: it yields each search it needs, is sent the ranges, and returns its Solution.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.algorithms import Solution
from quantkit.core import affine
from quantkit.core.scheme import Scheme
from quantkit.errors import NumericsError


@dataclass(frozen=True, slots=True)
class Search:
    """A search for scales and zeros, as ``affine.searched_params`` makes it.

    weight: float ``[out, in]``.
    importance: of the inputs, ``[in]``, or None.
    steps: ranges that are tried.
    """

    weight: Tensor
    scheme: Scheme
    importance: Tensor | None
    steps: int = affine.SEARCH_STEPS


Ranges = tuple[Tensor, Tensor | None]
Solver = Generator[Search, Ranges, Solution]


def together(solvers: Sequence[Solver]) -> list[Solution]:
    """Run solvers in step and return their solutions. Raises what a solver raises."""
    found: dict[int, Solution] = {}
    waiting: dict[int, Search] = {}

    def go_on(index: int, ranges: Ranges | None) -> None:
        try:
            waiting[index] = next(solvers[index]) if ranges is None else solvers[index].send(ranges)
        except StopIteration as stop:
            found[index] = stop.value

    for index in range(len(solvers)):
        go_on(index, None)
    while waiting:
        asked, waiting = waiting, {}
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, search in asked.items():
            weight = search.weight
            layout = (weight.shape[1], weight.stride(0) == 1, weight.dtype)
            alike.setdefault((search.scheme, search.steps, search.importance is None, *layout), []).append(index)
        for members in alike.values():
            answers = _answer([asked[index] for index in members], [solvers[index] for index in members])
            for index, ranges in zip(members, answers, strict=True):
                go_on(index, ranges)
    return [found[index] for index in range(len(solvers))]


def _answer(searches: Sequence[Search], solvers: Sequence[Solver]) -> list[Ranges]:
    try:
        return _search(searches)
    except NumericsError:  # of one of them: that one is told
        answers = []
        for search, solver in zip(searches, solvers, strict=True):
            try:
                answers += _search([search])
            except NumericsError as error:
                solver.throw(error)
                raise
        return answers


def _search(searches: Sequence[Search]) -> list[Ranges]:
    """Make searches of one kind as one."""
    first = searches[0]
    if len(searches) == 1:
        return [affine.searched_params(first.weight, first.scheme, first.importance, steps=first.steps)]
    importance = None
    if first.importance is not None:
        importance = torch.cat([s.importance.expand(len(s.weight), -1) for s in searches if s.importance is not None])
    # laid out as each of them: sums over a row add in the order of the memory
    across = first.weight.stride(0) == 1
    weight = torch.cat([s.weight.t() for s in searches], 1).t() if across else torch.cat([s.weight for s in searches])
    scales, zeros = affine.searched_params(weight, first.scheme, importance, steps=first.steps)
    sizes = [len(search.weight) for search in searches]
    each_zero = [None] * len(sizes) if zeros is None else zeros.split(sizes)
    return list(zip(scales.split(sizes), each_zero, strict=True))
