"""Find scaling folds inside one decoder block: proposed by structure, accepted by experiment. No file per model family.

A fold divides the output channels of one module (a norm, or some rows of a linear) by positive factors s and multiplies
the input columns of every linear that reads them by the same s. The block computes what it did before, but the weights
that are quantized have changed (Lin et al., arXiv 2306.00978, section 3.2; Xiao et al., arXiv 2211.10438, section 4).

Who reads whom is found by running the block: a producer's output is divided by random factors, each reader whose input
comes out divided by those factors is a consumer and gets the undisturbed input, and the block's output must then be
undisturbed. Anything else that reads the producer (a residual, another norm, a softmax) changes the output: refused.
What passes is then done to the parameters themselves, and the outputs are compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.arguments import BlockArguments
from quantkit.model.patterns import by_pattern, pattern, renumber, short_names
from quantkit.model.stepper import run_block

TOLERANCE = 1e-4  # relative difference of outputs in float32; blocks in float64 still hold float32 norms inside


@dataclass(frozen=True)
class Fold:
    """One scaling fold: a producer, its channels and the linears that read them. One factor per channel.

    rows: the producer's output channels that are divided, int64 ``[channels]``.
    consumers: module name -> the channel that each of its input columns carries, int64 ``[in_features]`` (query heads
        that share a value head repeat its channels).
    offset: 1 where a norm multiplies by ``1 + weight``, else 0.
    """

    producer: str
    rows: Tensor
    consumers: Mapping[str, Tensor]
    offset: float = 0.0

    @property
    def channels(self) -> int:
        return len(self.rows)

    def columns(self, consumer: str, factors: Tensor) -> Tensor:
        """Return the factor of each input column of a consumer: ``[in_features]``."""
        return factors[self.consumers[consumer]]

    def describe(self) -> str:
        return f"{short_names([self.producer])[0]} -> {', '.join(short_names(self.consumers))}"


@dataclass(frozen=True)
class Refusal:
    """A proposal that the experiment did not confirm."""

    producer: str
    reason: str


@dataclass
class FoldSearch:
    """Every producer of a block is either in ``accepted`` or in ``refused``."""

    accepted: list[Fold] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


@torch.no_grad()
def apply_fold(block: nn.Module, fold: Fold, factors: Tensor) -> None:
    """Divide the producer's channels by ``factors`` and multiply the consumers' columns, in place.

    factors: float ``[channels]``, positive.
    """
    for _, param, scale in _changes(block, fold, factors):
        scale(param)


@torch.no_grad()
def scaled_parameters(block: nn.Module, fold: Fold, factors: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Compute what ``apply_fold`` makes of each parameter, by local name, one at a time; the block is left as it is."""
    for name, param, scale in _changes(block, fold, factors):
        value = param.clone()
        scale(value)
        yield name, value


def _changes(block: nn.Module, fold: Fold, factors: Tensor) -> Iterator[tuple[str, Tensor, Callable[[Tensor], None]]]:
    """Yield every parameter of a fold: its local name, itself, and what scales such a tensor in place."""

    def divide(value: Tensor, offset: float) -> None:
        s = factors.to(value.dtype).reshape(-1, *[1] * (value.dim() - 1))
        if torch.equal(fold.rows, torch.arange(len(value), device=fold.rows.device)):  # all: no second copy
            value.add_(offset).div_(s).sub_(offset)
        else:
            value[fold.rows] = (value[fold.rows] + offset) / s - offset

    for name, param in block.get_submodule(fold.producer).named_parameters(recurse=False):
        yield f"{fold.producer}.{name}", param, partial(divide, offset=fold.offset if name == "weight" else 0.0)
    for name in fold.consumers:
        weight = block.get_parameter(f"{name}.weight")
        columns = fold.columns(name, factors).to(weight.dtype)
        yield f"{name}.weight", weight, lambda value, columns=columns: value.mul_(columns)  # type: ignore[misc]


@torch.no_grad()
def find_folds(
    block: nn.Module, hidden: Tensor, call: BlockArguments, shared: Collection[str] = (), seed: int = 0
) -> FoldSearch:
    """Find all folds of a block by experiment on one hidden state [batch, tokens, hidden]; the block is left as it was.

    The weights must be loaded. Modules that the state does not reach (experts) are treated like their namesakes that it
    does reach.

    shared: modules of the block that other blocks use too; they are not scaled.
    """
    lab = _Laboratory(block, hidden, call, seed)
    search = FoldSearch()
    for names in by_pattern(lab.producers).values():
        barred = [name for name in names if name in shared]
        folds, reason = (None, "other blocks use it too") if barred else lab.examine(names)
        if folds is None:
            search.refused += [Refusal(name, reason) for name in names]
        else:
            search.accepted += folds
    return search


def shared_modules(model: nn.Module, prefix: str) -> set[str]:
    """Find modules below ``prefix`` (local names) that also stand in another place of the model."""
    names_of: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names_of.setdefault(id(module), []).append(name)
    return {
        name.removeprefix(f"{prefix}.")
        for names in names_of.values()
        if len(names) > 1
        for name in names
        if name.startswith(f"{prefix}.")
    }


class _Laboratory:
    """One block, one input, and the undisturbed run that experiments are compared with."""

    def __init__(self, block: nn.Module, hidden: Tensor, call: BlockArguments, seed: int) -> None:
        self.block, self.hidden, self.call = block, hidden, call
        self.device = hidden.device
        self.generator = torch.Generator().manual_seed(seed)
        modules = {name: m for name, m in block.named_modules() if name and [*m.parameters(recurse=False)]}
        self.readers = {name: m for name, m in modules.items() if _is_reader(m)}
        self.inputs: dict[str, list[Tensor]] = {}
        self.order: list[str] = []  # of execution
        self.width: dict[str, int] = {}  # of each producer's output
        self.samples: dict[str, tuple[Any, ...]] = {}
        hooks: list[Any] = [
            m.register_forward_pre_hook(self._see(n), with_kwargs=True) for n, m in self.readers.items()
        ]
        hooks += [m.register_forward_hook(self._measure(n)) for n, m in modules.items()]
        self.output = self._run(hooks)
        self.producers = [n for n in self.order if n in self.readers or _is_scaling(modules[n], self.width[n])]

    def _run(self, hooks: list[Any]) -> Tensor:
        try:
            return run_block(self.block, self.hidden.clone(), self.call).clone()
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, name: str) -> Callable[..., None]:
        def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs.setdefault(name, []).append(_first(args, kwargs).clone())

        return pre

    def _measure(self, name: str) -> Callable[..., None]:
        def post(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if isinstance(out, Tensor) and name not in self.width:
                self.order.append(name)
                self.width[name] = out.shape[-1]
                self.samples[name] = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)

        return post

    def examine(self, names: list[str]) -> tuple[list[Fold] | None, str]:
        """Find the folds of like producers (the same linear of every expert) together; or why there are none."""
        first = names[0]
        norm = first not in self.readers
        if unknown := self._unknown():
            return None, f"{unknown} did not run, so nobody knows what it reads"
        offset = self._offset(first) if norm else 0.0
        if offset is None:
            return None, "its weight does not scale its output"
        row_sets = [torch.arange(self.width[first])] if norm else self._row_choices(first)
        choices = [rows.to(self.device) for rows in row_sets]
        if not choices:
            return None, "no linear after it has inputs that could be its outputs"
        reason = ""
        for rows in choices:
            folds, reason = self._experiment(names, rows, offset)
            if folds is not None:
                folds = self._add_namesakes(folds)
                difference = self._with_scaled_parameters(folds)
                if difference <= TOLERANCE:
                    return folds, ""
                return None, f"scaling the parameters changes the block's output by {difference:.1e}"
        return None, reason

    def _unknown(self) -> str | None:
        """A reader that did not run and has no namesake that did."""
        known = {pattern(name) for name in self.inputs}
        return next((name for name in self.readers if pattern(name) not in known), None)

    def _offset(self, name: str) -> float | None:
        """0 or 1: what is added to a norm's weight before it multiplies; None if scaling follows neither."""
        module, args = self.block.get_submodule(name), self.samples[name]
        before = module(*args)
        saved = {n: p.clone() for n, p in module.named_parameters(recurse=False)}
        s = self._factors(self.width[name], powers=False).to(before.dtype)
        shift = None
        for offset in (0.0, 1.0):
            for n, p in module.named_parameters(recurse=False):
                add = offset if n == "weight" else 0.0
                p.copy_((saved[n] + add) / s.to(p.dtype) - add)
            if _difference(module(*args) * s, before) <= TOLERANCE:
                shift = offset
                break
        for n, p in module.named_parameters(recurse=False):
            p.copy_(saved[n])
        return shift

    def _row_choices(self, name: str) -> Iterator[Tensor]:
        """Rows of a linear that one of the readers after it might read.

        All, one half of a fused pair, the values of a fused query-key-value projection (at the end, or at the end of
        each head's or group's rows).
        """
        rows = self.width[name]
        later = self.order[self.order.index(name) + 1 :]
        done: set[tuple[int, ...]] = set()
        for columns in dict.fromkeys(self.inputs[n][0].shape[-1] for n in later if n in self.readers):
            for choice in _layouts(rows, columns):
                key = tuple(choice.tolist())
                if key not in done:
                    done.add(key)
                    yield choice

    def _experiment(self, names: list[str], rows: Tensor, offset: float) -> tuple[list[Fold] | None, str]:
        """Divide the producers' outputs, see whose input comes out divided, hand it the undisturbed one instead."""
        factors = {name: self._factors(len(rows), powers=False).to(self.output.dtype) for name in names}
        consumers: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        odd: list[str] = []
        calls: dict[str, int] = {}

        def divide(s: Tensor) -> Callable[..., Tensor]:
            def post(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
                out = out.clone()
                out[..., rows] /= s
                return out

            return post

        def watch(name: str) -> Callable[..., Any]:
            def pre(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                k = calls[name] = calls.get(name, -1) + 1
                x = _first(args, kwargs)
                if k >= len(self.inputs.get(name, [])) or x.shape != self.inputs[name][k].shape:
                    odd.append(name)
                    return None
                reference = self.inputs[name][k]
                for producer, s in factors.items():
                    index = _matching(x, reference, s)
                    if index is not None and torch.equal(consumers[producer].setdefault(name, index), index):
                        return _replace_first(args, kwargs, reference)
                if _difference(x, reference) > TOLERANCE:
                    odd.append(name)
                return None

            return pre

        hooks: list[Any] = [self.block.get_submodule(n).register_forward_hook(divide(s)) for n, s in factors.items()]
        hooks += [m.register_forward_pre_hook(watch(n), with_kwargs=True) for n, m in self.readers.items()]
        difference = _difference(self._run(hooks), self.output)
        lonely = not all(consumers.values())
        if difference <= TOLERANCE and not lonely:
            return [Fold(name, rows, consumers[name], offset) for name in names], ""
        if odd and not any(consumers.values()):
            return None, f"{pattern(odd[0])} sees it through more than a scaling"
        if lonely:
            return None, "no linear reads its output"
        return None, f"something besides {', '.join(short_names(consumers[names[0]]))} reads its output"

    def _add_namesakes(self, folds: list[Fold]) -> list[Fold]:
        """Experts that no token reached: what holds for their namesakes holds for them."""
        idle = {name for name in self.readers if name not in self.inputs}
        if not idle:
            return folds
        grown = []
        for fold in folds:
            patterns = {pattern(name): index for name, index in fold.consumers.items()}
            more = (
                {n: patterns[pattern(n)] for n in sorted(idle) if pattern(n) in patterns}
                if fold.producer not in self.readers
                else {}
            )
            grown.append(Fold(fold.producer, fold.rows, {**fold.consumers, **more}, fold.offset))
        model = folds[0]
        for name in sorted(idle):
            if pattern(name) == pattern(model.producer):
                grown.append(
                    Fold(name, model.rows, {renumber(c, name): i for c, i in model.consumers.items()}, model.offset)
                )
        return grown

    def _with_scaled_parameters(self, folds: list[Fold]) -> float:
        """How much the output changes when the folds are done to the parameters.

        The factors are random powers of two: they are exact in floating point, so that undoing them gives the block
        back bit for bit.
        """
        norms = {f.producer for f in folds if f.producer not in self.readers}
        saved = [(p, p.clone()) for name in norms for p in self.block.get_submodule(name).parameters(recurse=False)]
        factors = [self._factors(fold.channels, powers=True) for fold in folds]
        for fold, s in zip(folds, factors, strict=True):
            apply_fold(self.block, fold, s)
        difference = _difference(self._run([]), self.output)
        for fold, s in zip(folds, factors, strict=True):
            apply_fold(self.block, fold, 1 / s)
        for param, value in saved:
            param.copy_(value)
        return difference

    def _factors(self, count: int, powers: bool) -> Tensor:
        if powers:
            return (2.0 ** torch.randint(-2, 3, (count,), generator=self.generator)).to(self.device)
        return (0.5 + 1.5 * torch.rand(count, generator=self.generator)).to(self.device)


def _layouts(rows: int, columns: int) -> Iterator[Tensor]:
    """Which of ``rows`` outputs ``columns`` inputs may carry; see ``_Laboratory._row_choices``."""
    every = torch.arange(rows)
    if columns % rows == 0:
        yield every
    if rows == 2 * columns:
        yield every[columns:]
        yield every[:columns]
        yield every[1::2]
        yield every[::2]
    values, odd = divmod(rows - columns, 2)
    if values > 0 and not odd and columns % values == 0:
        for heads in (n for n in range(1, values + 1) if values % n == 0 and rows % n == 0):
            yield every.reshape(heads, -1)[:, -(values // heads) :].reshape(-1)


def _matching(x: Tensor, reference: Tensor, factors: Tensor) -> Tensor | None:
    """The channel of each column if ``x`` is ``reference`` divided by the factors of those channels, else None."""
    columns, channels = x.shape[-1], len(factors)
    if columns % channels or not x.numel() or not bool(x.any()):
        return None
    for index in (channel.to(x.device) for channel in _channel_maps(columns, channels)):
        if _difference(x * factors[index], reference) <= TOLERANCE:
            return index
    return None


def _channel_maps(columns: int, channels: int) -> Iterator[Tensor]:
    """Column -> channel: one to one, or whole heads repeated (grouped queries: ``channels`` are heads of any size)."""
    column = torch.arange(columns)
    repeats = columns // channels
    if repeats == 1:
        yield column
        return
    for size in (n for n in range(channels, 0, -1) if channels % n == 0):
        yield column // (repeats * size) * size + column % size


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference between two tensors, each channel against its own size."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.reshape(-1, a.shape[-1]).double(), b.reshape(-1, b.shape[-1]).double()
    size = b.abs().amax(0)
    value = float(((a - b).abs().amax(0) / torch.maximum(size, 1e-3 * size.mean()).clamp(min=1e-30)).max())
    return value if value == value else float("inf")


def _is_reader(module: nn.Module) -> bool:
    """A matrix times its input: an nn.Linear, or a router that holds its matrix itself."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _is_scaling(module: nn.Module, width: int) -> bool:
    """Only vectors as long as its output is wide: a norm, to be confirmed."""
    names = dict(module.named_parameters(recurse=False))
    return "weight" in names and all(tuple(p.shape) == (width,) for p in names.values())


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    value = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(value, Tensor)
    return value


def _replace_first(args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> tuple[Any, Any]:
    if args:
        return (value, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): value}
