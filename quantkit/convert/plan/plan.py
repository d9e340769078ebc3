"""The plan of a conversion: names, schemes, memory and all problems, found before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.algorithms import CALIBRATED
from quantkit.algorithms.gptq import Loops
from quantkit.calibrate.data import CalibrationWindows
from quantkit.calibrate.matmul_precision import choose_precision
from quantkit.checkpoint.open import open_source
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.convert.gguf.choices import float_bytes
from quantkit.convert.gguf.names import check_gguf_vocabulary
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan import self_calibration
from quantkit.convert.plan.bit_budget import BitBudget, cache_bytes, plan_bit_budget
from quantkit.convert.plan.calibration_text import read_inputs, too_few_tokens, unread_text, unused_windows
from quantkit.convert.plan.carried import carried
from quantkit.convert.plan.column_loops import column_loops, load_block_search, load_searches
from quantkit.convert.plan.duration import Work, count_work, measure_speed
from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.memory import Prediction, check_device, predict
from quantkit.convert.plan.memory_inputs import count_sizes, plain_bytes, whole_bytes, with_sensitivity
from quantkit.convert.plan.paths import check_paths, check_room, leftovers, refuse_busy, resumed_note
from quantkit.convert.plan.targets import Target, Targets, choose_targets, second_copy
from quantkit.core.host import choose_device, size_text, time_text
from quantkit.errors import RequestError
from quantkit.formats import writer_format
from quantkit.formats.interface import Format
from quantkit.model.end_tokens import end_tokens
from quantkit.model.language import towers
from quantkit.model.mixture.experts import expert_linears
from quantkit.model.rotate import HEAD, RotatedSource
from quantkit.model.skeleton import Blocks, build_skeleton, find_blocks
from quantkit.model.weights import Weights
from quantkit.runtime.layers.dense_source import DenseSource


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The tensors that are written in 16 bit.

    copied: names of stored tensors that are written unchanged.
    extracted: parameters that are cut from a stored tensor (biases of fused experts) or written under another name.
    """

    copied: tuple[str, ...]
    extracted: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A conversion, ready to run, and never changed afterwards.

    What is found out while it runs is kept elsewhere: text that the model writes in ``Inputs``, choices that need
    measuring in ``stages.decide.Decisions``. If ``problems`` is not empty, the plan must not run.
    """

    options: ConvertOptions
    source: Source
    format: Format
    model: nn.Module
    blocks: Blocks
    weights: Weights
    tokenizer: Any
    # where blocks run and are quantized
    device: torch.device
    # kernels on that device for GPTQ's loop over columns
    loops: Loops
    inputs: Inputs
    # by module name of the skeleton, e.g. "model.layers.0.mlp.up_proj"; head and embeddings too
    targets: Mapping[str, Target]
    # follows from ``targets``; with a bit budget both are provisional
    unquantized: Unquantized
    # 16-bit parameters of the blocks that the fold stage may scale; written block by block
    rewritten: tuple[str, ...]
    # the bit budget, None without one; the schemes of its units in ``targets`` are provisional
    budget: BitBudget | None
    prediction: Prediction
    work: Work
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Predict the seconds that the conversion takes on its device, whose speed is measured once in a process."""
        return self.work.seconds(measure_speed(self.device, self.matmul_precision or "float32"))

    def duration_words(self) -> str:
        """Return how long it takes, in words: the count was fitted to CPUs, and tried on no GPU."""
        trust = "within a factor of two" if self.device.type == "cpu" else "reckoned: no GPU was measured"
        return f"{time_text(self.seconds)} here ({trust})"

    @property
    def stores_cache_scales(self) -> bool:
        """Return True if other engines read the scales of an fp8 KV cache from this checkpoint."""
        return self.options.kv_bits == "fp8" and self.format.holds_cache_scales

    @property
    def matmul_precision(self) -> str | None:
        """Return the matmul precision in which the model runs over a text, None if it does not run.

        See ``calibrate.matmul_precision``.
        """
        return choose_precision(self.options.matmul_precision, self.device) if self.inputs.run_model else None

    @property
    def measures(self) -> bool:
        """Return True if sensitivity is measured before the first block."""
        return _measures(self.options, self.budget)

    def raise_problems(self) -> None:
        """Raise RequestError that lists every problem at once, if there are any."""
        if self.problems:
            raise RequestError(
                "This conversion cannot run:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
            )


def _measures(options: ConvertOptions, budget: BitBudget | None) -> bool:
    return budget is not None or options.method == "tune" or options.guided


EXACT = ("F32", "F16", "BF16")
KEEP = "; --repack keeps its numbers, where another format holds them"


def make_plan(options: ConvertOptions, source: Source | None = None) -> Plan:
    """Find the source's structure, choose schemes, tokenize the calibration text, predict memory and disk.

    source: the source that ``options.source`` names, if it is open already.

    Raises QuantkitError for what makes planning itself impossible (no such source, unknown architecture); everything
    else is collected in ``Plan.problems``.
    """
    refuse_busy(options.work_folder)
    check_paths(options)
    device = choose_device(options.device)
    source = _checked(options, open_source(options.source) if source is None else source)
    end_tokens(source)  # checked here: what is wrong with them is otherwise seen when the result is tried
    model = build_skeleton(source.config)
    blocks = find_blocks(model)
    weights = Weights(model, source)
    tokenizer = load_tokenizer(source)  # after the skeleton: it reads config.json too, and would blame the tokenizer
    form = writer_format(options.format)

    chosen = choose_targets(options, form, blocks, weights)
    problems = chosen.problems
    rewritten = _rewritten(options, blocks, weights, chosen.chosen)
    unquantized = find_unquantized(weights, chosen.chosen, rewritten)
    check_gguf_vocabulary(options.gguf_type, source, tokenizer, model)
    inputs = read_inputs(options, tokenizer, model, problems)
    budget = _bit_budget(options, form, weights, chosen, unquantized, rewritten)
    problems += _untunable(options, blocks)
    load_searches(device)
    if options.gguf_type is not None:
        load_block_search(device)
    loops = column_loops(device) if options.method in ("gptq", "tune") else Loops()  # in memory from here on
    prediction = _predict(options, form, weights, blocks, chosen.chosen, unquantized, rewritten, inputs, budget, device)
    spares = "--no-guided" if options.guided and budget is None else ""
    problems += check_room(options, prediction) + check_device(device, prediction, spares)
    warnings = [
        *([resumed_note(options.work_folder, len(blocks.modules))] if options.resume else []),
        *leftovers(options),
        *chosen.warnings,
        *_text_notes(options, weights, blocks, inputs.calibration),
        *unread_text(inputs.calibration, inputs.sensitivity, inputs.distil),
        *_source_notes(options, source, form),
    ]
    return Plan(
        options=options, source=source, format=form, model=model, blocks=blocks, weights=weights, tokenizer=tokenizer,
        device=device, loops=loops, inputs=inputs, targets=chosen.chosen, unquantized=unquantized, rewritten=rewritten,
        budget=budget, prediction=prediction,
        work=count_work(options, model, blocks, chosen.chosen, inputs), problems=tuple(problems),
        warnings=tuple(warnings),
    )  # fmt: skip


def _checked(options: ConvertOptions, source: Source) -> Source:
    """Return the source, rotated with ``--rotate``.

    Raises RequestError if it lies where the result goes, or is quantized.
    """
    refuse_same_place(options.out, source)
    _refuse_quantized(source)
    return RotatedSource(source) if options.rotate else source


def _bit_budget(
    options: ConvertOptions,
    form: Format,
    weights: Weights,
    chosen: Targets,
    unquantized: Unquantized,
    rewritten: tuple[str, ...],
) -> BitBudget | None:
    """Return the bit budget, None if no size was asked for."""
    if options.gguf_type is not None and options.allocates:
        return plan_bit_budget(
            options, form, weights, chosen, float_bytes(weights, (target.name for target in chosen.chosen.values()))
        )
    fixed = plain_bytes(weights, unquantized.copied, [*unquantized.extracted, *rewritten])
    return plan_bit_budget(options, form, weights, chosen, fixed + cache_bytes(options, form, weights.model))


def _predict(
    options: ConvertOptions,
    form: Format,
    weights: Weights,
    blocks: Blocks,
    targets: Mapping[str, Target],
    unquantized: Unquantized,
    rewritten: tuple[str, ...],
    inputs: Inputs,
    budget: BitBudget | None,
    device: torch.device,
) -> Prediction:
    """Predict peak memory and disk of the whole conversion."""
    written = [*unquantized.extracted, *rewritten]
    sizes = count_sizes(options, form, weights, blocks, targets, unquantized.copied, written, inputs.calibration)
    if _measures(options, budget):
        sizes = with_sensitivity(sizes, options, weights, blocks, budget)
    return predict(sizes, device.type)


def _untunable(options: ConvertOptions, blocks: Blocks) -> list[str]:
    """Return a problem if ``--method tune`` is asked for a mixture of experts."""
    if options.method != "tune" or not any(expert_linears(block) for block in blocks.modules):
        return []
    return [
        "--method tune: the tokens that reach an expert change while a block learns; mixtures of experts are not tuned."
        " Use --preset balanced --distil 128 (scales and norms learn end to end), or --method awq or gptq."
    ]


def _unseen(weights: Weights) -> list[str]:
    """Return a note if a model has towers: calibration is on text alone."""
    beside = towers(weights.model)
    if not beside:
        return []
    return [
        f"calibration reads text alone: {', '.join(beside)} stays in 16 bit, and what it would show to the language"
        " model (images, sounds) is not in the statistics"
    ]


def _text_notes(
    options: ConvertOptions, weights: Weights, blocks: Blocks, windows: CalibrationWindows | None
) -> list[str]:
    """Return notes on the calibration text, and on experts for which ``--guided`` or ``--gptaq`` has no effect."""
    notes = []
    if windows is not None and windows.ids.is_meta:
        notes.append(self_calibration.note(options, whole_bytes(weights, options)))
    if windows is not None and options.method in CALIBRATED:
        notes += too_few_tokens(windows.ids.numel(), blocks) + _unseen(weights)
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
            f"--gptaq: not for the experts ({mixtures[0]}{more}): the original model routes other tokens to them, so"
            " they aim at the outputs of their own weights, as without --gptaq; all other linears aim at the"
            " original's"
        )
    return notes


def _source_notes(options: ConvertOptions, source: Source, form: Format) -> list[str]:
    """Return notes on a rounded source, the KV cache in other engines, an untied head, and files left behind."""
    notes = []
    rounded = (
        [kind for kind in source.kinds() if kind.removeprefix("GGUF ") not in EXACT] if source.path.is_file() else []
    )
    if rounded:
        read_as = sorted({str(source.info(name).dtype).removeprefix("torch.") for name in source.names()}, reverse=True)
        notes.append(
            f"the source is rounded already ({', '.join(rounded)}; {size_text(source.file_bytes())} on disk): its"
            f" weights are read as {' and '.join(read_as)}, and losses and sizes are counted from there{KEEP}"
        )
    if isinstance(source, DenseSource):
        notes.append(
            f"the source is stored as {source.stored_as()}: its weights are read as"
            f" {str(source.dtype).removeprefix('torch.')}, and losses and sizes are counted from there{KEEP}"
        )
    if options.cache.wanted:
        notes += cache_elsewhere(options.kv_bits, form)
    if isinstance(source, RotatedSource) and source.untied:
        notes.append(
            f"--rotate: the head is tied to the embeddings no longer, {size_text(source.info(HEAD).nbytes)} more;"
            " --rule 'lm_head=bits:8' halves them"
        )
    behind = carried(source)[1]
    if behind:
        shown = ", ".join(behind[:5]) + (f" and {len(behind) - 5} more" if len(behind) > 5 else "")
        notes.append(f"not copied from the source (code, pickles, other data): {shown}")
    return notes


def cache_elsewhere(kv_bits: int | str, form: Format) -> list[str]:
    """Return a note on what other engines do with the stored KV cache, if they do not read it."""
    if kv_bits != "fp8":
        return [
            "the KV cache as it is stored here is read by quantkit only: vLLM, SGLang and other engines that load the"
            " weights keep their cache their own way"
        ]
    if form.holds_cache_scales:
        return []
    return [
        f"--kv-bits fp8: the format {form.name} has no place for the scales of an fp8 cache; quantkit uses them, other"
        " engines would run theirs with a scale of 1. --format compressed-tensors hands them on"
    ]


def _rewritten(
    options: ConvertOptions, blocks: Blocks, weights: Weights, targets: Mapping[str, Target]
) -> tuple[str, ...]:
    """Return every parameter of the blocks that stays in 16 bit, if the method scales channels, else none."""
    if not options.folds:
        return ()
    quantized = {target.parameter for target in targets.values()}
    return tuple(
        name
        for name in weights.parameters
        if name.startswith(f"{blocks.prefix}.") and name not in quantized and not weights.sources[name].joined
    )


def find_unquantized(weights: Weights, targets: Mapping[str, Target], rewritten: Sequence[str]) -> Unquantized:
    """Find what stays at 16 bit beside ``targets`` and ``rewritten``."""
    quantized = {target.parameter for target in targets.values()} | set(rewritten)
    extracted = tuple(
        name
        for name, stored in weights.sources.items()
        if name not in quantized and (stored.index is not None or weights.names[name] != stored.name)
    )
    used = {weights.stored(name) for name in (*quantized, *extracted)}
    used |= {copy for target in targets.values() if (copy := second_copy(weights, target)) is not None}
    return Unquantized(tuple(name for name in weights.source.names() if name not in used), extracted)


def refuse_same_place(folder: Path, source: Source) -> None:
    """Refuse an output folder that overlaps the source.

    Raises RequestError.
    """
    original, out = source.path.resolve(), folder.resolve()
    if out == original or out in original.parents or original in out.parents:
        raise RequestError(
            f"{folder}: is, holds or lies in the source {source.path}, which would be lost. Choose another --out."
        )


def _refuse_quantized(source: Source) -> None:
    """Refuse a source that is quantized already, with RequestError."""
    config = source.quantization()
    if config is not None:
        raise RequestError(
            f"{source.path}: is already quantized ({config.get('quant_method')}). Quantizing it again would add loss to"
            " loss. Give the 16-bit original, or repack it (quantkit.convert.repack)."
        )
