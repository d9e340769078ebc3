"""Hidden states in front of the first block, and the arguments of every block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantkit.calibrate.transfer import offload
from quantkit.convert.plan.memory import batch_tokens
from quantkit.core.precision import exact_products
from quantkit.errors import UnsupportedModel
from quantkit.model.arguments import BlockArguments, by_batch, hands_on, same_call
from quantkit.model.skeleton import Blocks, widest_input
from quantkit.model.stepper import Recording, record
from quantkit.model.weights import Weights, before_blocks

SHORT = 8  # tokens that show who reads whose output


@dataclass
class HiddenStates:
    """Hidden states in front of a block, and the arguments of every block.

    states: batches, float32 [windows, tokens, hidden].
    calls: by block, its arguments for a batch.
    short: by block, its arguments for ``SHORT`` tokens.
    single: by block, its arguments for one window.
    original: the original model's states in front of the block, shaped like ``states``; empty if nothing needs them.
    """

    states: list[Tensor]
    calls: list[BlockArguments]
    short: list[BlockArguments]
    single: list[BlockArguments]
    original: list[Tensor] = field(default_factory=list)


@exact_products()  # angles of rotary embeddings are products of positions: bf16 has no 1023
def embed(
    model: nn.Module, blocks: Blocks, weights: Weights, ids: Tensor, device: torch.device, stored: list[Tensor] | None,
    tokens: int | None = None, replaced: Mapping[str, Tensor] | None = None,
) -> HiddenStates:  # fmt: skip
    """Compute hidden states in front of block 0, and record the arguments of all blocks.

    model: the skeleton.
    blocks: its blocks.
    weights: the source's tensors; embeddings are loaded from them.
    ids: int64 [windows, tokens].
    device: where the model runs.
    stored: states of an earlier process, which are used as they are; None to compute them.
    tokens: tokens of a batch at most; ``batch_tokens`` if None.
    replaced: other values for some parameters, by name (quantized embeddings).

    Raises UnsupportedModel if the arguments of a block depend on the tokens.
    """
    names = before_blocks(weights, blocks)
    for name in names:
        if replaced and name in replaced:
            owner, _, local = name.rpartition(".")
            model.get_submodule(owner)._parameters[local] = nn.Parameter(replaced[name].cpu(), requires_grad=False)
        else:
            weights.load_parameter(name)
    if tokens is None:
        tokens = batch_tokens(widest_input(blocks), device.type == "cpu")
    size = len(stored[0]) if stored else _batch_size(len(ids), max(1, tokens // ids.shape[1]))
    states = [offload(state, device) for state in stored or []]
    batches: list[list[BlockArguments]] = []
    for batch in torch.split(ids, size):
        recording = record(model, blocks, batch)
        if stored is None:
            states.append(offload(recording.hidden.clone(), device))
        alike = batches and all(same_call(a, b) for a, b in zip(batches[0], recording.calls, strict=True))
        if alike and not hands_on(recording.calls):
            recording = Recording(recording.hidden, batches[0])  # the same: kept once
        batches.append(recording.calls)
        if stored is not None and len(batches) == 2 and batches[1] is batches[0]:
            break
    calls = by_batch(batches, str(weights.source.path))
    short, single = (record(model, blocks, few).calls for few in (ids[:1, :SHORT], ids[:1]))
    for name in names:
        weights.release(name.rpartition(".")[0])
    return HiddenStates(states, calls, short, single)


def require_one_call(calls: Sequence[BlockArguments], option: str) -> None:
    """Raise UnsupportedModel if the arguments of a block depend on the tokens.

    calls: by block. option: what would learn from windows in another order.
    """
    if any(call.by_batch for call in calls):
        raise UnsupportedModel(
            f"{option}: the blocks of this model take inputs that depend on the tokens, beside the hidden state; it"
            " cannot learn from them. Leave it out (--method gptq and awq take them)."
        )


def states_wanted(ids: Tensor, hidden: int, paired: bool) -> Callable[[list[torch.Size]], bool]:
    """Return a check of the shapes of kept states: batches of all windows, and of one size.

    ids: int64 [windows, tokens].
    hidden: length of a token's state.
    paired: the original model's states are among them, in as many batches.
    """
    windows, tokens = ids.shape

    def fits(shapes: list[torch.Size]) -> bool:
        size = shapes[0][0] if shapes and shapes[0] else 1
        count = windows // size * (2 if paired else 1)
        width = shapes[0][-1] if shapes and shapes[0] else hidden
        whole = width % hidden == 0  # several states side by side
        return windows % size == 0 and whole and shapes == [torch.Size((size, tokens, width))] * count

    return fits


def _batch_size(windows: int, wanted: int) -> int:
    """Return the largest batch up to ``wanted`` that divides the windows.

    Every batch then has the arguments of the first.
    """
    return next(size for size in range(min(wanted, windows), 0, -1) if windows % size == 0)
