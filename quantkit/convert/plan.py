"""Everything decided and checked before any weight is read: names, schemes, memory, problems (all of them together)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.algorithms import CALIBRATED
from quantkit.algorithms.awq import SEARCH_ROWS
from quantkit.algorithms.distil import CHUNK_ELEMENTS, RESIDENT, window_batch
from quantkit.algorithms.kv import SAMPLE_TOKENS
from quantkit.calibrate.data import Windows
from quantkit.checkpoint.source import Source, TensorInfo, open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert import selftext
from quantkit.convert.allocation import Allocation, cache_bytes, head_width, plan_allocation, with_allocation
from quantkit.convert.device import check_device
from quantkit.convert.embed import before_blocks, outside_blocks
from quantkit.convert.folder import carried
from quantkit.convert.memory import BATCH_TOKENS, Prediction, Sizes, kernel_bytes, predict
from quantkit.convert.options import ConvertOptions
from quantkit.convert.places import check_places, check_room, refuse_busy, resumed_note
from quantkit.convert.targets import Target as Target
from quantkit.convert.targets import choose_targets, second_copy
from quantkit.convert.windows import distil_windows, few_tokens, read_probe, read_windows
from quantkit.core.host import available_bytes, size_text
from quantkit.core.kvpages import CUTS, SEARCHED_AT_ONCE
from quantkit.errors import RequestError
from quantkit.formats import Format, Layout, writer_format
from quantkit.model.experts import expert_linears, routers
from quantkit.model.rotate import HEAD, RotatedSource
from quantkit.model.skeleton import Blocks, Weights, block_linears, build_skeleton, find_blocks
from quantkit.runtime.attention import cached_heads
from quantkit.runtime.load import choose_device

TRIAL_COPIES = 10  # of the rows searched: scaled, codes, dequantized, error and what the search of ranges holds


@dataclass
class Plan:
    """A conversion, ready to run. ``problems`` is empty, or the plan must not run."""

    options: ConvertOptions
    source: Source
    format: Format
    model: nn.Module
    blocks: Blocks
    weights: Weights
    tokenizer: Any
    windows: Windows | None
    distilled_on: Windows | None  # windows of the end-to-end pass
    targets: dict[
        str, Target
    ]  # by parameter name of the module, e.g. "model.layers.0.mlp.up_proj"; head and embeddings too
    plain: list[str]  # stored tensors copied unchanged
    split: list[str]  # 16-bit parameters that are cut from a stored tensor (biases of fused experts), or renamed
    rewritten: list[str]  # 16-bit parameters of the blocks that the fold stage may scale; written block by block
    problems: list[str]
    warnings: list[str]
    prediction: Prediction
    device: torch.device  # blocks are stepped and solved there
    allocation: Allocation | None = (
        None  # what is still to be chosen; schemes of its units in ``targets`` are provisional
    )
    allocated: dict[str, Any] | None = None  # what was chosen, and from what: see ``convert.allocated``
    probe: Windows | None = None  # text for that alone, if the method itself reads none

    def layout(self) -> Layout:
        names, known = self.weights.names, routers(self.model)
        dense = [
            names[f"{name}.weight"].removesuffix(".weight") if f"{name}.weight" not in self.weights.tied else name
            for name, module in self.model.named_modules()
            if (isinstance(module, nn.Linear) and name not in self.targets) or name in known
        ]
        outside = [t.name for t in self.outside()]
        schemes = {t.name: t.scheme for t in self.targets.values()}
        return Layout(
            dict(sorted(schemes.items())), sorted(dense), outside, self.stores_cache_scales
        )  # the order a repack has, too

    @property
    def stores_cache_scales(self) -> bool:
        """True if other engines read the scales of an fp8 cache from this checkpoint."""
        return self.options.kv_bits == "fp8" and self.format.holds_cache_scales

    def outside(self) -> list[Target]:
        """Head and embeddings that are quantized."""
        return [target for target in self.targets.values() if target.kind != "linear"]

    def raise_problems(self) -> None:
        """Raises RequestError that lists every problem at once."""
        if self.problems:
            raise RequestError(
                "This conversion cannot run:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
            )


EXACT = ("F32", "F16", "BF16")


def make_plan(options: ConvertOptions) -> Plan:
    """Open the source, find its structure, choose schemes, tokenize the calibration text, predict memory and disk.

    What makes planning itself impossible (no such source, unknown architecture) is raised; everything else is collected
    in ``Plan.problems``.
    """
    refuse_busy(options.work_folder)
    check_places(options)
    device = choose_device(options.device)
    source = open_source(options.source)
    refuse_same_place(options.out, source)
    _refuse_quantized(source)
    if options.rotate:
        source = RotatedSource(source)
    model = build_skeleton(source.config)
    blocks = find_blocks(model)
    weights = Weights(model, source)
    tokenizer = load_tokenizer(source)  # after the skeleton: it reads config.json too, and would blame the tokenizer
    form = writer_format(options.format)

    chosen = choose_targets(options, form, blocks, weights)
    targets, problems, warnings = chosen.chosen, chosen.problems, chosen.warnings
    rewritten = _rewritten(options, blocks, weights, targets)
    plain, split = unquantized(weights, targets, rewritten)
    windows = read_windows(options, tokenizer, model, problems)
    probed = None if options.needs_data else read_probe(options, tokenizer, model, problems)
    fixed = plain_bytes(weights, plain, [*split, *rewritten]) + cache_bytes(options, form, model)
    allocation = plan_allocation(options, form, weights, chosen, fixed)
    distilled_on = distil_windows(options, windows, tokenizer, model, problems)
    if windows is not None and windows.ids.is_meta:
        warnings.append(selftext.note(options, _whole(weights, options)))
    if options.method == "tune" and any(expert_linears(block) for block in blocks.modules):
        problems.append(
            "--method tune: the tokens that reach an expert change while a block learns; mixtures of experts are not tuned. "
            "Use --preset balanced, or --method awq or gptq."
        )
    if windows is not None and options.method in CALIBRATED:
        warnings += few_tokens(windows.ids.numel(), blocks)
    rounded = (
        [kind for kind in source.kinds() if kind.removeprefix("GGUF ") not in EXACT] if source.path.is_file() else []
    )
    if rounded:
        warnings.append(
            f"the source is rounded already ({', '.join(rounded)}; {size_text(source.file_bytes())} on disk): its weights are read as float16, "
            "and losses and sizes are counted from there"
        )
    sizes = _sizes(options, weights, blocks, targets, plain, [*split, *rewritten], windows)
    if allocation is not None:
        sizes = with_allocation(sizes, allocation, weights, blocks)
    prediction = predict(sizes, device.type)
    problems += check_room(options, prediction) + check_device(device, prediction)
    if options.cache.wanted:
        warnings += cache_elsewhere(options.kv_bits, form)
    if isinstance(source, RotatedSource) and source.untied:
        warnings.append(
            f"--rotate: the head is tied to the embeddings no longer, {size_text(source.info(HEAD).nbytes)} more; --rule 'lm_head=bits:8' halves them"
        )
    if options.resume:
        warnings.insert(0, resumed_note(options.work_folder, len(blocks.modules)))
    behind = carried(source)[1]
    if behind:
        shown = ", ".join(behind[:5]) + (f" and {len(behind) - 5} more" if len(behind) > 5 else "")
        warnings.append(f"not copied from the source (code, pickles, other data): {shown}")
    return Plan(
        options, source, form, model, blocks, weights, tokenizer, windows, distilled_on, targets, plain, split, rewritten, problems, warnings, prediction, device,
        allocation, None, probed,
    )  # fmt: skip


def cache_elsewhere(kv_bits: int | str, form: Format) -> list[str]:
    """What other engines do with the cache that is stored, if they do not read it."""
    if kv_bits != "fp8":
        return [
            "the KV cache as it is stored here is read by quantkit only: vLLM, SGLang and other engines that load the weights keep their cache their "
            "own way"
        ]
    if form.holds_cache_scales:
        return []
    return [
        f"--kv-bits fp8: the format {form.name} has no place for the scales of an fp8 cache; quantkit uses them, other engines would run theirs with "
        "a scale of 1. --format compressed-tensors hands them on"
    ]


def _rewritten(options: ConvertOptions, blocks: Blocks, weights: Weights, targets: dict[str, Target]) -> list[str]:
    """Every parameter of the blocks that stays in 16 bit, if the method scales channels."""
    if not options.folds:
        return []
    quantized = {target.parameter for target in targets.values()}
    return [name for name in weights.sources if name.startswith(f"{blocks.prefix}.") and name not in quantized]


def unquantized(weights: Weights, targets: dict[str, Target], rewritten: list[str]) -> tuple[list[str], list[str]]:
    """Stored tensors that are copied unchanged, and 16-bit parameters that are cut from a fused one or renamed."""
    quantized = {t.parameter for t in targets.values()} | set(rewritten)
    split = [
        name
        for name, stored in weights.sources.items()
        if name not in quantized and (stored.index is not None or weights.names[name] != stored.name)
    ]
    used = {weights.stored(name) for name in (*quantized, *split)}
    used |= {copy for t in targets.values() if (copy := second_copy(weights, t)) is not None}
    return [name for name in weights.source.names() if name not in used], split


def refuse_same_place(folder: Path, source: Source) -> None:
    """Raises RequestError if writing ``folder`` would touch the source."""
    original, out = source.path.resolve(), folder.resolve()
    if out == original or out in original.parents or original in out.parents:
        raise RequestError(
            f"{folder}: is, holds or lies in the source {source.path}, which would be lost. Choose another --out."
        )


def _refuse_quantized(source: Source) -> None:
    config = source.quantization()
    if config is not None:
        raise RequestError(
            f"{source.path}: is already quantized ({config.get('quant_method')}). Quantizing it again would add loss to loss. "
            "Give the 16-bit original, or repack it (quantkit.convert.repack)."
        )


def plain_bytes(weights: Weights, plain: Sequence[str], cut: Sequence[str]) -> int:
    """Of everything that is written in 16 bit. cut: parameters that are written one by one."""
    copied = sum(weights.source.info(name).nbytes for name in plain)
    return copied + sum(
        weights.parameters[n].numel() * weights.source.info(weights.stored(n)).dtype.itemsize for n in cut
    )


def _sizes(
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
        fold=_fold_bytes(linears, experts) if options.folds else 0,
        whole=_whole(weights, options) if windows is not None and windows.ids.is_meta else 0,
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
    outside = sum(weights.parameters[name].numel() for name in outside_blocks(weights, blocks))
    block = max(sum(p.numel() for p in one.parameters()) for one in blocks.modules)
    inner = max(sum(m.in_features + m.out_features for m in block_linears(one).values()) for one in blocks.modules)
    held = codes if codes < RESIDENT * available_bytes() else 0
    one_step = 4 * step * ((len(blocks) + 2) * config.hidden_size + 3 * inner) + 4 * 4 * block
    return {
        "distil_states": 2 * 4 * options.distil * options.seq_len * config.hidden_size,
        "distil": held + 28 * groups + 4 * outside + one_step + 6 * 4 * CHUNK_ELEMENTS,
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


def _whole(weights: Weights, options: ConvertOptions) -> int:
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
