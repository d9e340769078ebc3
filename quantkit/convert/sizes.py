"""What a plan's prediction is made from, see ``memory.Sizes``: counted from headers, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quantkit.algorithms.awq import SEARCH_ROWS
from quantkit.algorithms.distil import RESIDENT, chunk_tokens, window_batch
from quantkit.algorithms.kv import SAMPLE_TOKENS
from quantkit.calibrate.data import Windows
from quantkit.checkpoint.source import TensorInfo
from quantkit.convert import selftext
from quantkit.convert.allocation import head_width
from quantkit.convert.embed import before_blocks, outside_blocks
from quantkit.convert.memory import BATCH_TOKENS, Sizes, kernel_bytes
from quantkit.convert.options import ConvertOptions
from quantkit.convert.targets import Target, second_copy
from quantkit.core.host import available_bytes
from quantkit.core.kvpages import CUTS, SEARCHED_AT_ONCE
from quantkit.model.experts import expert_linears
from quantkit.model.skeleton import Blocks, Weights, block_linears, widest_input
from quantkit.runtime.attention import cached_heads

TRIAL_COPIES = 10  # of the rows searched: scaled, codes, dequantized, error and what the search of ranges holds


def plain_bytes(weights: Weights, plain: Sequence[str], cut: Sequence[str]) -> int:
    """Of everything that is written in 16 bit. cut: parameters that are written one by one."""
    copied = sum(weights.source.info(name).nbytes for name in plain)
    return copied + sum(
        weights.parameters[n].numel() * weights.source.info(weights.stored(n)).dtype.itemsize for n in cut
    )


def count_sizes(
    options: ConvertOptions, weights: Weights, blocks: Blocks, targets: dict[str, Target], plain: list[str],
    split: list[str], windows: Windows | None,
) -> Sizes:  # fmt: skip
    block_sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.modules]
    block = blocks.modules[block_sizes.index(max(block_sizes))]
    linears, experts = block_linears(block), expert_linears(block)
    # experts run and are solved one after the other; each has statistics of its own, shared by gate and up
    at_once = [linear for name, linear in linears.items() if name not in experts or experts[name][1] == 0]
    by_width: dict[int, int] = {}
    for linear in at_once:
        by_width[linear.in_features] = by_width.get(linear.in_features, 0) + linear.out_features
    packed = sum(
        t.out_features
        * (t.in_features * t.scheme.bits / 8 + t.scheme.groups(t.in_features) * (2 + (not t.scheme.symmetric)))
        for t in targets.values()
    )
    infos = [weights.source.info(name) for name in plain]
    config: Any = weights.model.config
    before = before_blocks(weights, blocks)
    return Sizes(
        before_blocks=sum(weights.parameters[name].numel() for name in before),
        stored_itemsize=max(info.dtype.itemsize for info in infos),
        largest_plain=max(info.nbytes // info.dtype.itemsize for info in infos),
        block=max(block_sizes),
        widths=tuple(
            linear.in_features
            for name, linear in linears.items()
            if name not in experts or not name.endswith(".up_proj")
        ),
        widest=widest_input(blocks),
        largest_parameter=max(p.numel() for p in block.parameters()),
        largest_group=max(width * out for width, out in by_width.items()),
        inner=sum(linear.in_features + linear.out_features for linear in at_once),
        hidden=config.hidden_size,
        tokens=0 if windows is None else windows.ids.numel(),
        seq_len=options.seq_len,
        plain_bytes=plain_bytes(weights, plain, split),
        packed_bytes=int(packed),
        packed_model=packed_model(infos, int(packed), [t.out_features * t.in_features for t in targets.values()]),
        kernels=kernel_bytes(),
        calibrated=windows is not None,
        tuned=max(_linear_weights(block) for block in blocks.modules) if options.method == "tune" else 0,
        paired=options.paired and windows is not None,
        crossed=options.crossed and windows is not None,
        weighed=options.guided and windows is not None,
        fold=_fold_bytes(linears, experts) if options.folds else 0,
        whole=whole_bytes(weights, options) if windows is not None and windows.ids.is_meta else 0,
        **_distil_bytes(options, weights, blocks, targets),
        outside_bytes=max((_outside_bytes(weights, t) for t in targets.values() if t.kind != "linear"), default=0),
        kv_sample_bytes=kv_sample_bytes(config, options),
    )


def _linear_weights(block: nn.Module) -> int:
    return sum(linear.weight.numel() for linear in block_linears(block).values())


def _distil_bytes(
    options: ConvertOptions, weights: Weights, blocks: Blocks, targets: dict[str, Target]
) -> dict[str, int]:
    """What the end-to-end pass takes, see ``memory.predict``."""
    if not options.distil:
        return {}
    config: Any = weights.model.config
    step = window_batch(options.distil, options.seq_len) * options.seq_len
    linears = [t for t in targets.values() if t.kind == "linear"]
    codes = sum(t.out_features * t.in_features for t in linears)
    groups = sum(t.out_features * t.scheme.groups(t.in_features) for t in linears)
    outside = outside_blocks(weights, blocks)
    counts = [weights.parameters[name].numel() for name in outside]
    rounded = sum(t.out_features * t.in_features for t in targets.values() if t.kind != "linear")
    reading = max(
        count * (1 + weights.source.info(weights.stored(name)).dtype.itemsize)
        for name, count in zip(outside, counts, strict=True)
    )
    block = max(sum(p.numel() for p in one.parameters()) for one in blocks.modules)
    inner = max(sum(m.in_features + m.out_features for m in block_linears(one).values()) for one in blocks.modules)
    held = codes if codes < RESIDENT * available_bytes() else 0
    one_step = 4 * step * ((len(blocks) + 2) * config.hidden_size + 3 * inner) + 4 * 4 * block
    logits = 5 * 4 * min(chunk_tokens(config.vocab_size), step) * config.vocab_size
    return {
        "distil_states": 2 * 4 * options.distil * options.seq_len * config.hidden_size,
        # the original's head and embeddings, and beside them those of the quantized model, dequantized
        "distil": held + 28 * groups + 4 * (sum(counts) + rounded) + max(one_step + logits, reading),
    }


def _fold_bytes(linears: Mapping[str, nn.Linear], experts: Mapping[str, tuple[str, int]]) -> int:
    """The rows kept of every consumer of the largest fold (a norm's: one stack for each expert's gate and up), one H in
    float32 and the temporaries of one trial; or one scaled weight beside its rounded copy."""
    stacks: dict[tuple[int, tuple[str, int] | None], int] = {}  # width, expert -> rows
    for name, linear in linears.items():
        of = experts.get(name)
        if (
            of is None or not name.endswith(".down_proj") or of[1] == 0
        ):  # each expert's down projection is a fold's only one
            key = linear.in_features, of
            stacks[key] = stacks.get(key, 0) + linear.out_features
    held: dict[int, int] = {}
    for (width, _), rows in stacks.items():
        held[width] = held.get(width, 0) + min(rows, SEARCH_ROWS) * width
    trial = max(count + width * width + TRIAL_COPIES * SEARCH_ROWS * width for width, count in held.items())
    return 4 * max(trial, 3 * max(linear.weight.numel() for linear in linears.values()))


def whole_bytes(weights: Weights, options: ConvertOptions) -> int:
    """What ``--calibration self`` holds while the model writes."""
    count = sum(p.numel() for name, p in weights.parameters.items() if name not in weights.tied)
    return selftext.bytes_needed(weights.model.config, count, options)


def packed_model(infos: Sequence[TensorInfo], packed: int, weights: Sequence[int]) -> int:
    """The written model in memory: packed weights (kernels hold 2 and 3 bits in 4, 5 to 7 in 8, and scales twice), the rest
    in float32, and the largest tensor on its way: stored, its mask, or its codes and the temporaries of packing them."""
    dense = [info.nbytes // info.dtype.itemsize for info in infos]
    return 4 * sum(dense) + 2 * packed + max(3 * max(dense, default=0), 10 * max(weights, default=0))


def _outside_bytes(weights: Weights, target: Target) -> int:
    """A matrix as stored (and its second copy), its codes, and the packed words twice: encoded and being written."""
    count = target.out_features * target.in_features
    copies = 1 if second_copy(weights, target) is None else 2
    stored = weights.source.info(weights.stored(target.parameter)).dtype.itemsize
    return int(count * (stored * copies + 1 + 2 * target.scheme.bits / 8))


def kv_sample_bytes(config: Any, options: ConvertOptions) -> int:
    """Keys and values that one layer's observer keeps, in float32, and as much four times over while ranges are searched; with a budget
    the temporaries of a trial of one batch: four times one side, or twice and the ranges that pages try."""
    if not options.cache.wanted:
        return 0
    heads = cached_heads(config)
    head_dim = head_width(config)
    sample = 6 * heads * head_dim * SAMPLE_TOKENS
    trial = 0
    if options.cache.budget is not None:
        side = heads * head_dim * max(BATCH_TOKENS, options.seq_len)
        trial = max(4 * side, 2 * side + 4 * min((len(CUTS) + 1) * side, SEARCHED_AT_ONCE))
    return int(4 * (sample + trial))
