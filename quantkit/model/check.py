"""Prove on a small random twin that a model can be stepped block by block, and which scaling folds its blocks allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.model.arguments import BlockArguments
from quantkit.model.folds import FoldSearch, find_folds, shared_modules
from quantkit.model.skeleton import Blocks, find_blocks
from quantkit.model.stepper import input_groups, record, run_block, run_tail
from quantkit.model.twin import VOCAB, small_twin

TOKENS = (2, 24)  # batch, length: longer than the twin's sliding window, enough to reach most experts


@dataclass
class BlockKind:
    """Blocks that are alike: their indices in the twin, input groups, folds."""

    blocks: list[int]
    module: str
    groups: list[tuple[str, ...]]
    folds: FoldSearch


@dataclass
class Check:
    """What the experiments on the twin showed.

    exact: stepping and the model's own forward agree bit for bit.
    difference: largest relative difference between the two.
    """

    model_type: str
    parameters: int
    blocks: int
    exact: bool
    difference: float
    kinds: list[BlockKind] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "twin_parameters": self.parameters,
            "twin_blocks": self.blocks,
            "stepping_equals_forward": self.exact,
            "stepping_difference": self.difference,
            "kinds": [
                {
                    "blocks": kind.blocks,
                    "module": kind.module,
                    "input_groups": [list(names) for names in kind.groups],
                    "folds": [
                        {
                            "producer": f.producer, "consumers": list(f.consumers),
                            "channels": f.channels, "offset": f.offset,
                        }
                        for f in kind.folds.accepted
                    ],
                    "refused": [{"producer": r.producer, "reason": r.reason} for r in kind.folds.refused],
                }
                for kind in self.kinds
            ],
        }  # fmt: skip


@torch.no_grad()
def check_model(config: Mapping[str, Any]) -> Check:
    """Build the twin, step it, compare with its own forward, and search the folds of every block.

    Raises UnsupportedModel where the structure is one that quantkit does not handle.
    """
    twin = small_twin(config)
    blocks = find_blocks(twin)
    vocab = twin.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(3, min(vocab, VOCAB), TOKENS, generator=torch.Generator().manual_seed(1))
    expected: Tensor = twin(input_ids=ids, use_cache=False).logits
    recording = record(twin, blocks, ids)
    check = Check(str(config["model_type"]), sum(p.numel() for p in twin.parameters()), len(blocks), False, 0.0)
    hidden = recording.hidden
    for index, block in enumerate(blocks.modules):
        _add_block(check, twin, blocks, index, hidden, recording.calls[index])
        hidden = run_block(block, hidden, recording.calls[index])
    logits = run_tail(twin, blocks, ids, hidden)
    check.exact = torch.equal(logits, expected)
    check.difference = float((logits - expected).norm() / expected.norm())
    return check


def _add_block(check: Check, twin: nn.Module, blocks: Blocks, index: int, hidden: Tensor, call: BlockArguments) -> None:
    block, prefix = blocks.modules[index], blocks.name(index)
    groups = input_groups(block, hidden, call)
    folds = find_folds(block, hidden, call, shared_modules(twin, prefix))
    for kind in check.kinds:
        if kind.module == type(block).__name__ and kind.groups == groups and _names(kind.folds) == _names(folds):
            kind.blocks.append(index)
            return
    check.kinds.append(BlockKind([index], type(block).__name__, groups, folds))


def _names(search: FoldSearch) -> list[tuple[str, ...]]:
    accepted = [(fold.producer, *fold.consumers) for fold in search.accepted]
    return [*accepted, *((refusal.producer,) for refusal in search.refused)]
