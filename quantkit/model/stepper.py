"""Step a model block by block, with exactly the arguments its own forward would give each block.

The identity recorder: every block's forward is replaced by one that records its arguments and returns the hidden state
unchanged, and the model's own forward runs once. Masks, rotary tables and flags are then the model's own, per block
(reusing block 0's arguments is silently wrong on models with mixed layer types).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.core.interrupt import raise_if_interrupted
from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import BESIDE, BlockArguments, Streams
from quantkit.model.language import trunk
from quantkit.model.mixture.experts import Experts, expert_groups, expert_linears, expert_modules
from quantkit.model.skeleton import Blocks, block_linears


@dataclass(frozen=True)
class Recording:
    """The hidden state that the model feeds its first block, and the other arguments of every block."""

    # [batch, tokens, hidden], streams side by side
    hidden: Tensor
    calls: list[BlockArguments]


class _Stop(Exception):
    """Raised by the last block's stand-in: the tail of the model need not run."""


@contextlib.contextmanager
def _forwards(modules: Sequence[nn.Module], stand_ins: Sequence[Callable[..., Any]]) -> Iterator[None]:
    for module, stand_in in zip(modules, stand_ins, strict=True):
        module.forward = stand_in  # shadows the class's method
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextlib.contextmanager
def _seems_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let parts of a model whose first parameter is on meta say that they are on a device, where their code asks.

    A tower's weights are not there while the language model is stepped; idefics3 moves embeddings to ``self.device``.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in {id(m): m for m in model.modules() if hasattr(type(m), "device")}.values():
        name, first = next(part.named_parameters(), ("", None))
        if first is not None and first.is_meta:
            owner, _, local = name.rpartition(".")
            held = part.get_submodule(owner)
            replaced.append((held, local, first))
            held._parameters[local] = nn.Parameter(torch.zeros((), device=device).expand(first.shape), False)
    try:
        yield
    finally:
        for held, local, first in reversed(replaced):
            held._parameters[local] = first


class _NotUnderstood(Exception):
    """The model did not hand a block's stand-in result on to the next block."""


class _Second:
    """What a block's stand-in returns beside the hidden state; a model that hands it to the next block needs it."""


_SECOND = _Second()
# What a block may return: the hidden state, or a tuple that starts with it (falcon). Which one is seen by trying.
RETURNS: tuple[Callable[[Tensor], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden, _SECOND),
    lambda hidden: [hidden],
)
# What a model raises that wanted a result of another form.
OTHER_FORM = (AttributeError, IndexError, TypeError, ValueError)


@torch.no_grad()
def record(model: nn.Module, blocks: Blocks, input_ids: Tensor) -> Recording:
    """Run the model's own forward with recording blocks. Blocks may be on meta; what comes before them must be loaded.

    input_ids: int64 [batch, tokens].

    Raises UnsupportedModel if a block does not take the hidden state first, or if the model does anything between its
    blocks but hand the hidden state on.
    """
    reason: Exception | None = None
    for returns in RETURNS:
        try:
            return _record(model, blocks, input_ids, returns)
        except _NotUnderstood:
            continue
        except OTHER_FORM as error:
            reason = reason or error
    why = "" if reason is None else f" ({type(reason).__name__}: {str(reason)[:150]})"
    raise UnsupportedModel(
        f"{blocks.prefix}: blocks that return neither a hidden state nor a tuple are not supported{why}."
    )


def _record(model: nn.Module, blocks: Blocks, input_ids: Tensor, returns: Callable[[Tensor], Any]) -> Recording:
    calls: list[BlockArguments] = []
    first: list[Tensor] = []
    streams: list[Streams | None] = []

    def recorder(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Tensor):
                hidden, rest = args[0], args[1:]
            elif isinstance(kwargs.get("hidden_states"), Tensor):
                hidden, rest = kwargs.pop("hidden_states"), args
            else:
                raise (
                    _NotUnderstood
                    if index
                    else UnsupportedModel(f"{blocks.name(index)}: its first argument is not the hidden state.")
                )
            if index == 0:
                streams.append(_streams(blocks, hidden, input_ids.shape))
                first.append(hidden)
            else:
                _check_handed_on(hidden, first[0], blocks.name(index))
            calls.append(_arguments(blocks, index, rest, kwargs, streams[0]))
            if index == len(blocks) - 1:
                raise _Stop
            return returns(hidden)

        return forward

    stand_ins = [recorder(i) for i in range(len(blocks))]
    with _forwards(list(blocks.modules), stand_ins), _seems_on(model, input_ids.device), contextlib.suppress(_Stop):
        model(input_ids=input_ids, use_cache=False)
    if len(calls) != len(blocks):
        raise UnsupportedModel(
            f"{blocks.prefix}: the model ran {len(calls)} of its {len(blocks)} blocks once, in order: unsupported."
        )
    if any(call.takes for call in calls):
        beside: dict[str, Any] = {}
        for call in calls:
            call.kwargs[BESIDE] = beside
    return Recording(streams[0].side_by_side(first[0]) if streams[0] else first[0], calls)


def _arguments(
    blocks: Blocks, index: int, rest: tuple[Any, ...], kwargs: dict[str, Any], streams: Streams | None
) -> BlockArguments:
    """Return what a block was called with beside the hidden state, by name where the block names it."""
    names = list(inspect.signature(type(blocks.modules[index]).forward).parameters)[2 : 2 + len(rest)]
    if len(names) == len(rest) and not {"args", "kwargs"} & set(names):
        rest, kwargs = (), {**dict(zip(names, rest, strict=True)), **kwargs}
    if any(value is _SECOND for value in rest):
        raise UnsupportedModel(
            f"{blocks.name(index)}: takes more of the block before it than the hidden state, without a name; stepping"
            " the model block by block is not supported."
        )
    takes = tuple(name for name, value in kwargs.items() if value is _SECOND)
    kwargs = {name: value for name, value in kwargs.items() if name not in takes}
    return BlockArguments(rest, kwargs, streams=streams, takes=takes, number=index)


def _streams(blocks: Blocks, hidden: Tensor, shape: Sequence[int]) -> Streams | None:
    """Return how the model keeps several hidden states at once; None for one. shape: of the token ids."""
    if hidden.dim() == 3:
        if hidden.shape[:2] != (shape[0], shape[1]):
            raise UnsupportedModel(
                f"{blocks.prefix}: its blocks see {hidden.shape[1]} positions of {shape[1]} tokens; stepping the model"
                " block by block is not supported."
            )
        return None
    found = Streams.of(hidden, *shape)
    if found is None:
        raise UnsupportedModel(f"{blocks.prefix}: a hidden state of shape {list(hidden.shape)}: unsupported.")
    return found


def _check_handed_on(received: Any, returned: Tensor, name: str) -> None:
    """Raises _NotUnderstood for something other than a hidden state, UnsupportedModel for another one."""
    if not isinstance(received, Tensor) or received.shape != returned.shape:
        raise _NotUnderstood
    if received.data_ptr() != returned.data_ptr():
        raise UnsupportedModel(
            f"{name}: the model changes the hidden state between its blocks; stepping it block by block is not"
            " supported."
        )


@torch.no_grad()
def run_block(block: nn.Module, hidden: Tensor, call: BlockArguments) -> Tensor:
    """Run one block on a hidden state [batch, tokens, hidden] and return the next one.

    Blocks that return tuples give their first member.
    """
    return forward_block(block, hidden, call)


def forward_block(block: nn.Module, hidden: Tensor, call: BlockArguments) -> Tensor:
    """Run one block as ``run_block`` does, recording for gradients where the caller does."""
    raise_if_interrupted()
    given = call.streams.apart(hidden) if call.streams else hidden
    kwargs = dict(call.kwargs)
    beside = kwargs.pop(BESIDE, None)
    if call.takes:
        kwargs.update(dict.fromkeys(call.takes, beside[call.number - 1]))
    out = block(given, *call.args, **kwargs)
    result = out[0] if isinstance(out, (tuple, list)) else out
    if beside is not None:
        beside[call.number] = out[1]
        beside.pop(call.number - 2, None)
    if not isinstance(result, Tensor) or result.shape != given.shape:
        raise UnsupportedModel(f"{type(block).__name__}: does not return a hidden state of shape {list(given.shape)}.")
    return call.streams.side_by_side(result) if call.streams else result


@torch.no_grad()
def run_tail(model: nn.Module, blocks: Blocks, input_ids: Tensor, hidden: Tensor) -> Tensor:
    """Run what follows the blocks (final norm, head, soft caps), by the model's own forward: hidden state -> logits."""
    return forward_tail(model, blocks, input_ids, hidden)


def forward_tail(model: nn.Module, blocks: Blocks, input_ids: Tensor, hidden: Tensor) -> Tensor:
    """Run the tail as ``run_tail`` does, recording for gradients where the caller does."""
    run: Any = model

    def logits() -> Tensor | None:
        tail: Tensor = run(input_ids=input_ids, use_cache=False).logits
        return tail if tail.shape[:-1] == input_ids.shape else None

    return _after_blocks(model, blocks, hidden, logits)


@torch.no_grad()
def run_norm(model: nn.Module, blocks: Blocks, input_ids: Tensor, hidden: Tensor) -> Tensor:
    """Run what follows the blocks but the head, by the model's own forward: last block's output -> final state."""
    return forward_norm(model, blocks, input_ids, hidden)


def forward_norm(model: nn.Module, blocks: Blocks, input_ids: Tensor, hidden: Tensor) -> Tensor:
    """Run the final norm as ``run_norm`` does, recording for gradients where the caller does."""
    body = trunk(model)

    def final() -> Tensor | None:
        states: Tensor = body(input_ids=input_ids, use_cache=False).last_hidden_state
        return states if states.shape[:-1] == input_ids.shape else None

    return _after_blocks(model, blocks, hidden, final)


def _after_blocks(model: nn.Module, blocks: Blocks, hidden: Tensor, run: Callable[[], Tensor | None]) -> Tensor:
    """``run`` with blocks that return ``hidden``, in each way that blocks may return it.

    run: None from it means that this was not the way.
    """
    # A form that the model did not want shows as a missing dimension or a failed unpacking.
    wrong = (_NotUnderstood, *OTHER_FORM)
    for returns in RETURNS:
        kept = [hidden]

        def first(state: Any = None, *args: Any, _returns: Any = returns, _kept: Any = kept, **kwargs: Any) -> Any:
            state = kwargs.get("hidden_states", state)  # how the model keeps it
            streams = Streams.of(state, *hidden.shape[:2]) if isinstance(state, Tensor) else None
            _kept[0] = streams.apart(hidden) if streams else hidden
            return _returns(_kept[0])

        def later(state: Any = None, *args: Any, _returns: Any = returns, _kept: Any = kept, **kwargs: Any) -> Any:
            _check_handed_on(kwargs.get("hidden_states", state), _kept[0], blocks.prefix)
            return _returns(_kept[0])

        with (
            _forwards(list(blocks.modules), [first, *[later] * (len(blocks) - 1)]),
            _seems_on(model, hidden.device),
            contextlib.suppress(*wrong),
        ):
            outcome = run()
            if outcome is not None:
                return outcome
    raise UnsupportedModel(f"{blocks.prefix}: blocks that return neither a hidden state nor a tuple are not supported.")


@contextlib.contextmanager
def gradients_in_order(device: torch.device) -> Iterator[None]:
    """Use attention whose gradients do not depend on the order in which a GPU happens to add.

    The fast kernels give other bytes each time.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextlib.contextmanager
def given(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters of a module, by name inside it, for a while.

    values: tensors that need not be parameters (gradients go through).
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, value in values.items():
            owner, _, local = name.rpartition(".")
            held: dict[str, Any] = module.get_submodule(owner)._parameters
            before.append((held, local, held[local]))
            held[local] = value
        yield
    finally:
        for held, local, value in reversed(before):
            held[local] = value


def input_groups(block: nn.Module, hidden: Tensor, call: BlockArguments) -> list[tuple[str, ...]]:
    """Group the linears of a block that read one and the same tensor, in order of execution, by running the block.

    Returns e.g. ``[("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",), ...]``. Experts
    are grouped by what they are: the few tokens that run here do not reach them all. Other linears that do not run come
    last, each for itself. Raises UnsupportedModel for one that runs twice (its inputs would be mixed).
    """
    seen: dict[Any, list[tuple[str, ...]]] = {}
    # a freed input's address could be reused by another one
    keep: list[Tensor] = []

    def hook(name: str) -> Callable[..., None]:
        def pre(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0]
            keep.append(x)
            seen.setdefault((x.data_ptr(), x._version, tuple(x.shape)), [()])[0] += (name,)

        return pre

    def experts_hook(name: str, experts: Experts) -> Callable[..., None]:
        def pre(module: nn.Module, args: Any) -> None:
            seen.setdefault(name, expert_groups(name, experts))

        return pre

    of_experts = expert_linears(block)
    linears = {name: module for name, module in block_linears(block).items() if name not in of_experts}
    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    handles += [m.register_forward_pre_hook(experts_hook(name, m)) for name, m in expert_modules(block)]
    try:
        run_block(block, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    groups = [group for by_tensor in seen.values() for group in by_tensor]
    ran = [name for group in groups for name in group]
    twice = sorted({name for name in ran if ran.count(name) > 1})
    if twice:
        raise UnsupportedModel(f"{type(block).__name__}.{twice[0]}: runs more than once per forward; not supported.")
    return groups + [(name,) for name in [*linears, *of_experts] if name not in ran]
