"""Everything decided and checked before any weight is read: names, schemes, memory, problems (all of them together)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.algorithms import CALIBRATED
from quantkit.algorithms.guide import Guide
from quantkit.calibrate.data import Windows
from quantkit.calibrate.products import choose_products
from quantkit.checkpoint.source import Source, open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert import selftext
from quantkit.convert.allocation import Allocation, cache_bytes, plan_allocation
from quantkit.convert.device import check_device, column_loops
from quantkit.convert.folder import carried
from quantkit.convert.memory import Prediction, predict
from quantkit.convert.options import ConvertOptions
from quantkit.convert.places import check_places, check_room, refuse_busy, resumed_note
from quantkit.convert.probe import bytes_needed, file_bytes, guide_bytes
from quantkit.convert.sizes import count_sizes, plain_bytes, whole_bytes
from quantkit.convert.targets import Target as Target
from quantkit.convert.targets import choose_targets, second_copy
from quantkit.convert.windows import distil_windows, few_tokens, read_probe, read_windows, unused_windows
from quantkit.core.host import size_text
from quantkit.errors import RequestError
from quantkit.formats import Format, Layout, writer_format
from quantkit.model.experts import expert_linears, routers
from quantkit.model.rotate import HEAD, RotatedSource
from quantkit.model.skeleton import Blocks, Weights, build_skeleton, find_blocks
from quantkit.runtime.load import choose_device


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
    channels: list[Tensor] | None = None  # by block, how much each channel of its output counts; found by ``settle``
    guides: list[Guide | None] | None = (
        None  # by block, how much a token counts for its linears; found by ``settle``, None if nobody asked
    )

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

    @property
    def products(self) -> str | None:
        """In which the model runs over a text, see ``calibrate.products``; None if it does not run."""
        if self.windows is None and self.distilled_on is None:
            return None
        return choose_products(self.options.products, self.device)

    @property
    def probes(self) -> bool:
        """True if something is measured before the first block."""
        return self.allocation is not None or self.options.method == "tune" or self.options.guided

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
    source = _opened(options)
    model = build_skeleton(source.config)
    blocks = find_blocks(model)
    weights = Weights(model, source)
    tokenizer = load_tokenizer(source)  # after the skeleton: it reads config.json too, and would blame the tokenizer
    form = writer_format(options.format)

    chosen = choose_targets(options, form, blocks, weights)
    targets, problems = chosen.chosen, chosen.problems
    rewritten = _rewritten(options, blocks, weights, targets)
    plain, split = unquantized(weights, targets, rewritten)
    windows = read_windows(options, tokenizer, model, problems)
    probed = None if options.needs_data else read_probe(options, tokenizer, model, problems)
    fixed = plain_bytes(weights, plain, [*split, *rewritten]) + cache_bytes(options, form, model)
    allocation = plan_allocation(options, form, weights, chosen, fixed)
    distilled_on = distil_windows(options, windows, tokenizer, model, problems)
    problems += _untunable(options, blocks)
    sizes = count_sizes(options, weights, blocks, targets, plain, [*split, *rewritten], windows)
    if allocation is not None:
        sizes = replace(sizes, packed_bytes=max(allocation.budget, allocation.least) - sizes.plain_bytes)
    if allocation is not None or options.method == "tune" or options.guided:  # see ``Plan.probes``
        units = () if allocation is None else allocation.units
        file = file_bytes(sizes.hidden, len(blocks))
        kept = guide_bytes(sizes.hidden, blocks) if options.guided else 0
        needed = bytes_needed(sizes, weights, blocks, units, options.guided)
        sizes = replace(sizes, measuring=needed, measuring_file=file, measured=kept)
    if options.method in ("gptq", "tune"):
        column_loops(device)  # in memory from here on
    prediction = predict(sizes, device.type)
    spares = "--no-guided" if options.guided and allocation is None else ""
    problems += check_room(options, prediction) + check_device(device, prediction, spares)
    warnings = [
        *chosen.warnings,
        *_text_notes(options, weights, blocks, windows),
        *_source_notes(options, source, form),
    ]
    if options.resume:
        warnings.insert(0, resumed_note(options.work_folder, len(blocks.modules)))
    return Plan(
        options, source, form, model, blocks, weights, tokenizer, windows, distilled_on, targets, plain, split, rewritten, problems, warnings, prediction, device,
        allocation, None, probed,
    )  # fmt: skip


def _opened(options: ConvertOptions) -> Source:
    """The source, rotated if that was asked for. Raises RequestError if it lies where the result goes, or is quantized."""
    source = open_source(options.source)
    refuse_same_place(options.out, source)
    _refuse_quantized(source)
    return RotatedSource(source) if options.rotate else source


def _untunable(options: ConvertOptions, blocks: Blocks) -> list[str]:
    if options.method != "tune" or not any(expert_linears(block) for block in blocks.modules):
        return []
    return [
        "--method tune: the tokens that reach an expert change while a block learns; mixtures of experts are not tuned. "
        "Use --preset balanced --distil 128 (scales and norms learn end to end), or --method awq or gptq."
    ]


def _text_notes(options: ConvertOptions, weights: Weights, blocks: Blocks, windows: Windows | None) -> list[str]:
    """What a user should know of the calibration text and of what is not learned from it."""
    notes = []
    if windows is not None and windows.ids.is_meta:
        notes.append(selftext.note(options, whole_bytes(weights, options)))
    if windows is not None and options.method in CALIBRATED:
        notes += few_tokens(windows.ids.numel(), blocks)
    notes += unused_windows(options)
    mixtures = [
        f"{blocks.name(index)}.{name}"
        for index, block in enumerate(blocks.modules)
        for name in dict.fromkeys(of for of, _ in expert_linears(block).values())
    ]
    more = ""
    if mixtures:
        more = f" and {len(mixtures) - 1} more" if len(mixtures) > 1 else ""
    if options.guided and mixtures:
        notes.append(
            f"--guided: not for the experts ({mixtures[0]}{more}): every token that reaches one counts the same"
        )
    if options.gptaq and mixtures:
        notes.append(
            f"--gptaq: not for the experts ({mixtures[0]}{more}): the original model routes other tokens to them, so they aim at the outputs "
            "of their own weights, as without --gptaq; all other linears aim at the original's"
        )
    return notes


def _source_notes(options: ConvertOptions, source: Source, form: Format) -> list[str]:
    """What a user should know of the source and of what becomes of its parts."""
    notes = []
    rounded = (
        [kind for kind in source.kinds() if kind.removeprefix("GGUF ") not in EXACT] if source.path.is_file() else []
    )
    if rounded:
        notes.append(
            f"the source is rounded already ({', '.join(rounded)}; {size_text(source.file_bytes())} on disk): its weights are read as float16, "
            "and losses and sizes are counted from there"
        )
    if options.cache.wanted:
        notes += cache_elsewhere(options.kv_bits, form)
    if isinstance(source, RotatedSource) and source.untied:
        notes.append(
            f"--rotate: the head is tied to the embeddings no longer, {size_text(source.info(HEAD).nbytes)} more; --rule 'lm_head=bits:8' halves them"
        )
    behind = carried(source)[1]
    if behind:
        shown = ", ".join(behind[:5]) + (f" and {len(behind) - 5} more" if len(behind) > 5 else "")
        notes.append(f"not copied from the source (code, pickles, other data): {shown}")
    return notes


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
