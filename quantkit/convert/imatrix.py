"""``quantkit imatrix``: the statistics that a conversion takes, of the original model, in llama.cpp's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibrate.capture import advance
from quantkit.checkpoint.gguf_files.imatrix import Importance, write_imatrix
from quantkit.checkpoint.gguf_files.out_names import Names
from quantkit.checkpoint.open import open_source
from quantkit.convert.gguf.names import config_of, experts_of
from quantkit.convert.options.resolve import resolve_options
from quantkit.convert.plan.plan import Plan, make_plan
from quantkit.convert.progress import Listener, Progress
from quantkit.convert.results import BlockResult
from quantkit.convert.stages.device import working_on
from quantkit.convert.stages.embed import SHORT, embed
from quantkit.convert.stages.fold import take_tokens
from quantkit.convert.stages.loaded_block import loaded
from quantkit.convert.stages.observe import observe_block
from quantkit.core.interrupt import interruptible, raise_if_interrupted
from quantkit.errors import RequestError
from quantkit.model.stepper import input_groups
from quantkit.runtime.layers.dense_source import as_original

TYPE = "q4_k_m"  # any one that rounds every linear: all of them are observed


@interruptible()
def imatrix(source: str | Path, out: str | Path, listen: Listener, **options: Any) -> dict[str, Any]:
    """Collect the mean squares of every linear's inputs over a text, and write them for llama.cpp.

    source: named model, folder, hub id or GGUF file.
    out: the file to make.
    listen: called with a ``Progress`` before every block.
    options: calibration, samples, seq_len, seed, device.

    Returns out, entries, tokens and the text's name. Raises QuantkitError children.
    """
    if options.get("calibration") == "self":
        raise RequestError("--calibration self: text that a model writes has not landed for imatrix. Name a text.")
    if Path(out).exists():
        raise RequestError(f"{out}: exists already. Choose another -o, or remove it first.")
    given = {"format": "gguf", "gguf_type": TYPE, "method": "kquant", **options}
    original = as_original(open_source(source))
    if original.quantization() is not None:
        raise RequestError(
            f"{source}: is quantized to integers; an importance matrix is the original's. Give that, or the dense"
            " checkpoint that `quantkit convert --dequantize` makes."
        )
    plan = make_plan(resolve_options(source, out, None, given), original)
    plan.raise_problems()
    windows = plan.inputs.calibration
    assert windows is not None
    with working_on(plan.device, plan.matmul_precision or "float32"), torch.no_grad():
        entries = _collect(plan, windows.ids, listen)
    count, length = windows.ids.shape
    write_imatrix(Path(out), entries, windows.name, count, length)
    return {"out": str(out), "entries": len(entries), "tokens": count * length, "text": windows.name}


def _collect(plan: Plan, ids: Tensor, listen: Listener) -> dict[str, Importance]:
    """Return the sums of every weight by its name in a GGUF file; those of experts are stacked."""
    names = Names(config_of(plan.model))
    found: dict[str, dict[int, tuple[Tensor, int]]] = {}
    hidden = embed(plan.model, plan.blocks, plan.weights, ids, plan.device, None)
    for index in range(len(plan.blocks)):
        raise_if_interrupted()
        listen(Progress("blocks", index, len(plan.blocks)))
        with loaded(plan.weights, plan.blocks, index, plan.device) as block:
            prefix, call = plan.blocks.name(index), hidden.calls[index].to(plan.device)
            few, short = take_tokens(hidden.states, SHORT).to(plan.device), hidden.short[index].to(plan.device)
            groups = observe_block(
                prefix, block, input_groups(block, few, short), hidden.states, call, BlockResult(),
                original=[], crossed=False, correlations=False, guide=None, cache=None,
            )  # fmt: skip
            for group in groups:
                squares = group.squares()
                for name in group.names:
                    target = plan.targets.get(f"{prefix}.{name}")
                    if target is None or squares is None:
                        continue
                    place = names.place(f"{target.name}.weight")
                    sums = (squares.double() * group.tokens).float().cpu()
                    found.setdefault(place.name, {})[place.expert or 0] = sums, group.tokens
            if index + 1 < len(plan.blocks):
                advance(block, hidden.states, call)
    experts = experts_of(config_of(plan.model))
    return {name: _stacked(entries, experts if "_exps." in name else 1) for name, entries in found.items()}


def _stacked(entries: dict[int, tuple[Tensor, int]], count: int) -> Importance:
    """Join the ``count`` experts of a layer; one that no token reached has sums and a count of 0."""
    width = len(next(iter(entries.values()))[0])
    rows = [entries.get(index, (torch.zeros(width), 0)) for index in range(count)]
    return Importance(torch.stack([sums for sums, _ in rows]), torch.tensor([float(count) for _, count in rows]))
