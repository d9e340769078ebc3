"""The sizes that memory is predicted from (``memory.Sizes``), counted from headers before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from quantkit.algorithms.awq import SEARCH_ROWS
from quantkit.algorithms.distil import RESIDENT, chunk_tokens, window_batch
from quantkit.algorithms.guide import bytes_to_fit
from quantkit.algorithms.kv import SAMPLE_TOKENS
from quantkit.calibrate import sensitivity
from quantkit.calibrate.data import CalibrationWindows
from quantkit.checkpoint.source import TensorInfo
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan import self_calibration
from quantkit.convert.plan.bit_budget import BitBudget, target_bytes
from quantkit.convert.plan.memory import BATCH_TOKENS, Sizes, kernel_bytes
from quantkit.convert.plan.targets import Target, second_copy
from quantkit.convert.results import TOKENS, WINDOWS, Unit
from quantkit.core.host import available_bytes
from quantkit.core.kvpages import CUTS, SEARCHED_AT_ONCE
from quantkit.formats.interface import Format
from quantkit.model.attention_shape import cached_kv_heads, head_dim
from quantkit.model.language import output_embeddings, text_config
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.skeleton import Blocks, block_linears, widest_input
from quantkit.model.weights import Weights, before_blocks, outside_blocks
from quantkit.runtime.kernels.numba import threads
from quantkit.runtime.layers.head import NARROW

# copies of the searched rows in one trial: scaled, codes, dequantized, error and what the search for ranges holds
TRIAL_COPIES = 10


def plain_bytes(weights: Weights, plain: Sequence[str], cut: Sequence[str]) -> int:
    """Return the bytes of everything that is written in 16 bit.

    plain: names of stored tensors that are copied.
    cut: parameters that are written one by one.
    """
    copied = sum(weights.source.info(name).nbytes for name in plain)
    return copied + sum(weights.tensor(n).numel() * weights.source.info(weights.stored(n)).dtype.itemsize for n in cut)


def with_sensitivity(
    sizes: Sizes, options: ConvertOptions, weights: Weights, blocks: Blocks, budget: BitBudget | None
) -> Sizes:
    """Return ``sizes`` with what the sensitivity pass takes, and with the packed size that a bit budget allows."""
    if budget is not None:
        sizes = replace(sizes, packed_bytes=max(budget.budget, budget.least) - sizes.plain_bytes)
    units = () if budget is None else budget.units
    return replace(
        sizes,
        measuring=sensitivity_bytes(sizes, weights, blocks, units, options.guided),
        measuring_file=file_bytes(sizes.hidden, len(blocks)),
        measured=guide_bytes(sizes.hidden, blocks) if options.guided else 0,
    )


def count_sizes(
    options: ConvertOptions,
    form: Format,
    weights: Weights,
    blocks: Blocks,
    targets: Mapping[str, Target],
    plain: Sequence[str],
    split: Sequence[str],
    windows: CalibrationWindows | None,
) -> Sizes:
    """Count the sizes that memory and disk are predicted from.

    plain: names of stored tensors that are copied.
    split: parameters in 16 bit that are written one by one.
    windows: the calibration windows, None if no text is read.
    """
    block_sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.modules]
    block = blocks.modules[block_sizes.index(max(block_sizes))]
    linears, experts = block_linears(block), expert_linears(block)
    # experts run and are solved one after the other; each has statistics of its own, shared by gate and up
    at_once = [linear for name, linear in linears.items() if name not in experts or experts[name][1] == 0]
    by_width: dict[int, int] = {}
    for linear in at_once:
        by_width[linear.in_features] = by_width.get(linear.in_features, 0) + linear.out_features
    packed = sum(target_bytes(form, target) for target in targets.values())
    infos = [weights.source.info(name) for name in plain]
    config = text_config(weights.model)
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    before = before_blocks(weights, blocks)
    return Sizes(
        before_blocks=sum(weights.tensor(name).numel() for name in before),
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
        groups=tuple((width, width * out) for width, out in by_width.items()),
        inner=sum(linear.in_features + linear.out_features for linear in at_once),
        hidden=config.hidden_size,
        tokens=0 if windows is None else windows.ids.numel(),
        seq_len=options.seq_len,
        plain_bytes=plain_bytes(weights, plain, split),
        packed_bytes=packed,
        packed_model=whole_model(weights)
        if options.gguf_type is not None
        else packed_model(infos, packed, [t.out_features * t.in_features for t in targets.values()], vocabulary),
        kernels=kernel_bytes(),
        calibrated=windows is not None,
        correlations=options.correlations,
        roots=()
        if options.correlations or windows is None
        else tuple(
            linear.in_features
            for name, linear in linears.items()
            if name not in experts and windows.ids.numel() <= linear.in_features
        ),
        tuned=max(_linear_weights(block) for block in blocks.modules) if options.method == "tune" else 0,
        paired=options.paired and windows is not None,
        crossed=options.crossed and windows is not None,
        weighed=options.guided and windows is not None,
        fold=_fold_bytes(linears, experts) if options.folds else 0,
        whole=whole_bytes(weights, options) if windows is not None and windows.ids.is_meta else 0,
        **_distil_bytes(options, weights, blocks, targets),
        head_embedding_bytes=max(
            (_head_embedding_bytes(weights, t) for t in targets.values() if t.kind != "linear"), default=0
        ),
        kv_sample_bytes=kv_sample_bytes(config, options),
    )


def _linear_weights(block: nn.Module) -> int:
    return sum(linear.weight.numel() for linear in block_linears(block).values())


def _distil_bytes(
    options: ConvertOptions, weights: Weights, blocks: Blocks, targets: Mapping[str, Target]
) -> dict[str, int]:
    """Return the bytes of the end-to-end pass as fields of ``Sizes``, see ``memory.predict``."""
    if not options.distil:
        return {}
    config = text_config(weights.model)
    step = window_batch(options.distil, options.seq_len) * options.seq_len
    linears = [t for t in targets.values() if t.kind == "linear"]
    codes = sum(t.out_features * t.in_features for t in linears)
    groups = sum(t.out_features * t.scheme.groups(t.in_features) for t in linears)
    names = outside_blocks(weights, blocks)
    counts = [weights.tensor(name).numel() for name in names]
    rounded = sum(t.out_features * t.in_features for t in targets.values() if t.kind != "linear")
    reading = max(
        count * (1 + weights.source.info(weights.stored(name)).dtype.itemsize)
        for name, count in zip(names, counts, strict=True)
    )
    block = max(sum(p.numel() for p in module.parameters()) for module in blocks.modules)
    inner = max(
        sum(m.in_features + m.out_features for m in block_linears(module).values()) for module in blocks.modules
    )
    held = codes if codes < RESIDENT * available_bytes() else 0
    one_step = 4 * step * ((len(blocks) + 2) * config.hidden_size + 3 * inner) + 4 * 4 * block
    logits = 5 * 4 * min(chunk_tokens(config.vocab_size), step) * config.vocab_size
    return {
        "distil_states": 2 * 4 * options.distil * options.seq_len * config.hidden_size,
        # the original's head and embeddings, and beside them those of the quantized model, dequantized
        "distil": held + 28 * groups + 4 * (sum(counts) + rounded) + max(one_step + logits, reading),
    }


def _fold_bytes(linears: Mapping[str, nn.Linear], experts: Mapping[str, tuple[str, int]]) -> int:
    """Return the bytes that the search for a fold's factors and the scaling take.

    They are the rows kept of every consumer of the largest fold (a norm's: one stack for each expert's gate and up),
    one Hessian in float32 and the temporaries of one trial; or one scaled weight beside its rounded copy.
    """
    stacks: dict[tuple[int, tuple[str, int] | None], int] = {}  # width, expert -> rows
    for name, linear in linears.items():
        expert = experts.get(name)
        # each expert's down projection is the only consumer of its fold: the first stands for all
        if expert is None or not name.endswith(".down_proj") or expert[1] == 0:
            key = linear.in_features, expert
            stacks[key] = stacks.get(key, 0) + linear.out_features
    held: dict[int, int] = {}
    for (width, _), rows in stacks.items():
        held[width] = held.get(width, 0) + min(rows, SEARCH_ROWS) * width
    trial = max(count + width * width + TRIAL_COPIES * SEARCH_ROWS * width for width, count in held.items())
    return 4 * max(trial, 3 * max(linear.weight.numel() for linear in linears.values()))


def whole_bytes(weights: Weights, options: ConvertOptions) -> int:
    """Return the bytes that ``--calibration self`` holds while the model writes its text."""
    count = sum(p.numel() for name, p in weights.parameters.items() if name not in weights.tied)
    return self_calibration.model_and_cache_bytes(text_config(weights.model), count, options)


def whole_model(weights: Weights) -> int:
    """Return the bytes of a GGUF file's model in memory, dequantized: float32, and a matrix as it is read."""
    counts = [p.numel() for name, p in weights.parameters.items() if name not in weights.tied]
    return 4 * sum(counts) + 8 * max(counts)


def packed_model(infos: Sequence[TensorInfo], packed: int, weights: Sequence[int], vocabulary: int) -> int:
    """Return the bytes of the written model in memory.

    With compiled kernels: packed weights (2 and 3 bits are held in 4, 5 to 7 in 8), head and embedding in 16 bits of
    which those of the embedding stay in the file, or the head in 8 beside narrow weights (``runtime.layers.head``), the
    rest in float32, and the head's codes a second time, or a matrix and its words, while they are packed.

    Else the rest in float32, and the largest tensor while it is loaded: as stored and its mask, or its codes and the
    temporaries of packing them.

    infos: the tensors in 16 bit.
    packed: bytes of the quantized weights.
    weights: element counts of the quantized weights.
    vocabulary: rows of head and embedding.
    """
    dense = [info.nbytes // info.dtype.itemsize for info in infos]
    largest, bits = max(dense, default=0), 8 * packed / max(sum(weights), 1)
    if not threads.available():
        return 4 * sum(dense) + 2 * packed + max(3 * largest, 10 * max(weights, default=0))
    outer = sum(prod(info.shape) for info in infos if len(info.shape) == 2 and info.shape[0] >= vocabulary > 0)
    beside = 1.1 if bits <= NARROW + 0.5 else 2.0
    widened = 2.0 if bits < 4 else 1.7 if 4.8 < bits < 7.9 else 1.1
    temporary = max(largest, 2 * max(weights, default=0))
    return int(beside * outer + 4 * (sum(dense) - outer) + widened * packed + temporary)


def _head_embedding_bytes(weights: Weights, target: Target) -> int:
    """Return the bytes of quantizing a head or embedding.

    They are the matrix as stored (and its second copy), its codes, and the packed words twice: encoded, being written.
    """
    count = target.out_features * target.in_features
    copies = 1 if second_copy(weights, target) is None else 2
    stored = weights.source.info(weights.stored(target.parameter)).dtype.itemsize
    return int(count * (stored * copies + 1 + 2 * target.scheme.bits / 8))


def kv_sample_bytes(config: Any, options: ConvertOptions) -> int:
    """Return the bytes that calibrating the KV cache takes for one layer, 0 without one.

    They are the keys and values that its observer keeps, in float32, and as much four times over while ranges are
    searched; with a cache budget also the temporaries of a trial of one batch: four times one side (keys or values),
    or twice one side and the ranges that pages try.
    """
    if not options.cache.wanted:
        return 0
    heads, dim = cached_kv_heads(config), head_dim(config)
    sample = 6 * heads * dim * SAMPLE_TOKENS
    trial = 0
    if options.cache.budget is not None:
        side = heads * dim * max(BATCH_TOKENS, options.seq_len)
        trial = max(4 * side, 2 * side + 4 * min((len(CUTS) + 1) * side, SEARCHED_AT_ONCE))
    return int(4 * (sample + trial))


def sensitivity_bytes(
    sizes: Sizes, weights: Weights, blocks: Blocks, units: Sequence[Unit], guided: bool = False
) -> int:
    """Return the bytes that ``SensitivityPass.measure`` takes.

    sizes: the sizes counted so far.
    weights: the source's tensors.
    blocks: the blocks of the model.
    units: the units of a bit budget whose sensitivity is measured.
    guided: token importance is fitted, too.
    """
    plain = sum(weights.tensor(name).numel() for name in outside_blocks(weights, blocks))
    vocabulary: int = output_embeddings(weights.model).weight.shape[0]
    head = any(unit.kind in ("head", "tied") for unit in units)
    tokens = WINDOWS * TOKENS
    streams = 2 * tokens * sizes.hidden + plain
    tail = vocabulary * (sensitivity.TAIL_TOKENS * 8 + 3 * sensitivity.HEAD_TOKENS * head)
    shares = 6 * tokens * sizes.hidden  # squares in float64, their shares, and those that are finite
    kept = tokens // sensitivity.STRIDE * 2 * sizes.inner + 10 * sizes.largest_group if units else 0
    block = sizes.block + kept + 4 * TOKENS * sizes.inner
    linears = max(len(block_linears(module)) for module in blocks.modules)
    fit = sizes.block + kept + bytes_to_fit(sizes.hidden, linears, tokens) // 4 if guided else 0
    return 4 * (streams + max(tail, block, shares, fit))


def file_bytes(hidden: int, blocks: int) -> int:
    """Return the bytes of the hidden states in front of every block, which ``SensitivityPass.measure`` stores."""
    return 4 * WINDOWS * TOKENS * hidden * blocks


def guide_bytes(hidden: int, blocks: Blocks) -> int:
    """Return the bytes of all blocks' token-importance guides in the work folder, see ``algorithms.guide.Guide``."""
    counts = [len(block_linears(block).keys() - expert_linears(block).keys()) for block in blocks.modules]
    return sum(8 * (2 * (hidden + 1) + count * (hidden + 4)) for count in counts)
