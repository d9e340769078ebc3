"""Run a conversion. ``quantize_blocks`` is the loop: load, observe, fold, quantize, write, advance, free."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from quantkit.calibrate.capture import advance
from quantkit.calibrate.transfer import offload
from quantkit.convert.engines.lint import lint_plan
from quantkit.convert.finish import finish
from quantkit.convert.gguf.weighing import weighing
from quantkit.convert.job.work_folder import Work
from quantkit.convert.output.gguf_file import written
from quantkit.convert.plan import self_calibration
from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.plan import Plan
from quantkit.convert.progress import Listener, Progress, StageClock
from quantkit.convert.report.bit_budget import allocation_lines
from quantkit.convert.report.bit_budget import summary as budget_summary
from quantkit.convert.report.report import ConvertReport
from quantkit.convert.results import BlockResult, Collected, InputGroup
from quantkit.convert.stages.block import Solver, quantize_block, unread_groups
from quantkit.convert.stages.check_finite import refuse_non_finite
from quantkit.convert.stages.decide import Decisions, decide, importance_of_tokens
from quantkit.convert.stages.device import peak_device_bytes, working_on
from quantkit.convert.stages.embed import SHORT, HiddenStates, embed, require_one_call, states_wanted
from quantkit.convert.stages.fold import Folding, fold_block, take_tokens
from quantkit.convert.stages.loaded_block import NextBlock, loaded
from quantkit.convert.stages.observe import observe_block, observe_cache
from quantkit.convert.stages.sensitivity import SensitivityPass
from quantkit.convert.stages.tune import TuneInputs
from quantkit.core.host import OnStep, map_large_blocks, peak_rss
from quantkit.core.interrupt import raise_if_interrupted, undisturbed
from quantkit.model.arguments import hands_on, require_nothing_handed_on
from quantkit.model.language import text_config
from quantkit.model.rotate import RotatedSource, prove
from quantkit.model.stepper import input_groups
from quantkit.runtime.kv_cache.transformers_cache import attention_modules


def run(plan: Plan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Execute a plan.

    plan: the conversion.
    listen: called with a ``Progress`` before every step.
    started: ``time.perf_counter()`` when the request came, so that planning counts in the report's seconds.

    Raises QuantkitError if the plan has problems.
    """
    plan.raise_problems()
    map_large_blocks()
    started = time.perf_counter() if started is None else started
    clock = StageClock(listen, started)
    work = Work(plan)
    complete = False
    try:
        report = _convert(plan, work, clock)
        with undisturbed():  # quick, and then there is nothing to go on from
            work.writer.commit()
            work.remove()
            complete = True
    except BaseException as error:
        with undisturbed():  # by a second Ctrl-C
            kept = f"{plan.options.out} was complete by then." if complete else work.leave(error)
            if kept:  # Python prints these below a traceback, the command line below its message
                error.__notes__ = [*getattr(error, "__notes__", []), kept]
        raise
    clock.begin("end")
    report.seconds, report.stage_seconds = time.perf_counter() - started, clock.seconds
    report.peak_host_bytes = peak_rss()
    report.peak_device_bytes = peak_device_bytes(plan.device)
    report.output_bytes = sum(file.stat().st_size for file in weight_files(plan.options.out))
    return report


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a written folder that hold weights."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))


def _convert(plan: Plan, work: Work, listen: StageClock) -> ConvertReport:
    """Run every stage in order: check weights, read or write text, decide, blocks, the rest."""
    if (plan.options.needs_data or plan.options.allocates) and not work.read:
        refuse_non_finite(plan.weights, lambda done, total: listen(Progress("read", done, total)))
        work.keep_read()
    inputs = _write_text(plan, work, listen) if plan.inputs.must_be_written else plan.inputs
    with working_on(plan.device, plan.matmul_precision or "float32"):
        decisions = decide_plan(plan, inputs, work, lambda done, total: listen(Progress("measure", done, total)))
        report = _new_report(plan, decisions, work)
        if work.finished is not None:
            report.restore(work.finished, work.folder / "job.json")
            return report
        if report.allocation is not None:
            listen(Progress("chosen", 1, 1, "\n".join(allocation_lines(report.allocation))))
        collected = Collected()
        with torch.no_grad():
            report.rotated = prove(plan.source) if isinstance(plan.source, RotatedSource) else None
            quantize_blocks(plan, inputs, decisions, work, collected, listen)
            finish(plan, inputs, decisions, work, collected, report, listen)
    return report


def decide_plan(plan: Plan, inputs: Inputs, work: Work, on_step: OnStep) -> Decisions:
    """Return the decisions for the loop over blocks: the plan's targets, or a choice by measured sensitivity.

    plan: the conversion.
    inputs: its token windows.
    work: the work folder.
    on_step: called with the number of steps done and of all steps.
    """
    planned, o = Decisions(targets=plan.targets, unquantized=plan.unquantized), plan.options
    if not plan.measures:
        return planned
    windows = inputs.for_sensitivity
    assert windows is not None
    linears = [name for name, target in plan.targets.items() if target.kind == "linear"]
    measuring = SensitivityPass(
        plan.weights,
        plan.blocks,
        windows.ids,
        plan.device,
        folder=work.folder,
        seed=o.seed,
        search=o.scales != "minmax",
        guided=linears if o.guided else (),
        folds=o.folds,
    )
    return decide(
        planned, work, on_step, measuring=measuring, windows=windows, budget=plan.budget, rewritten=plan.rewritten
    )


def quantize_blocks(
    plan: Plan, inputs: Inputs, decisions: Decisions, work: Work, collected: Collected, listen: StageClock
) -> None:
    """Quantize every block that no earlier process has finished, each on inputs that went through those before it.

    plan: the conversion.
    inputs: its token windows.
    decisions: what was chosen before the first block.
    work: the work folder.
    collected: gets every block's results.
    listen: called with a ``Progress`` before every block.
    """
    targets = decisions.targets
    weigh = None if plan.options.imatrix is None else weighing(Path(plan.options.imatrix), plan.weights)
    solver = Solver(options=plan.options, format=plan.format, targets=targets, loops=plan.loops, weighing=weigh)
    folding = Folding(method=plan.options.method, weights=plan.weights, targets=targets, rewritten=plan.rewritten)
    first, hidden = _resume(plan, inputs, work, collected)
    with NextBlock(plan.weights, plan.blocks, torch.get_num_threads() > 1) as ahead:
        for index in range(first, len(plan.blocks)):
            raise_if_interrupted()
            name, result = plan.blocks.name(index), BlockResult()
            listen(Progress("blocks", index, len(plan.blocks), collected.last_error()))
            with loaded(plan.weights, plan.blocks, index, plan.device, ahead) as block:
                listen.begin("observe")
                if hidden.states:
                    groups = _observe(plan, decisions, folding, hidden, index, result)
                else:
                    groups = unread_groups(name, block, targets)
                listen.begin("solve")
                quantize_block(solver, name, block, groups, result, _tune_inputs(plan, decisions, hidden, index))
                del groups
                listen.begin("write")
                work.record(f"block-{index:04d}", result)
                collected.add(result)
                listen.begin("advance")
                if hidden.states and index + 1 < len(plan.blocks):
                    advance(block, hidden.states, hidden.calls[index].to(plan.device))
                    work.states.keep(index + 1, [*hidden.states, *hidden.original])


def _observe(
    plan: Plan, decisions: Decisions, folding: Folding, hidden: HiddenStates, index: int, result: BlockResult
) -> list[InputGroup]:
    """Observe the inputs of a loaded block's linears, scale its channels, and find the ranges of its KV cache."""
    o, name, block = plan.options, plan.blocks.name(index), plan.blocks.modules[index]
    call, short = hidden.calls[index].to(plan.device), hidden.short[index].to(plan.device)
    few = take_tokens(hidden.states, SHORT).to(plan.device)
    names = [g for g in input_groups(block, few, short) if any(f"{name}.{n}" in decisions.targets for n in g)]
    cache = (o.cache, attention_modules(plan.model)[index]) if o.cache.wanted else None
    groups = observe_block(
        name,
        block,
        names,
        hidden.states,
        call,
        result,
        original=hidden.original,
        crossed=o.crossed,
        correlations=o.correlations,
        guide=importance_of_tokens(decisions, plan.blocks, index, names, result),
        cache=None if o.folds else cache,
    )
    if o.folds:
        fold_block(folding, name, block, groups, few, short, result)
        if cache is not None:  # the fold may have scaled the values: their ranges are found afterwards
            observe_cache(*cache, block, hidden.states, call, result)
    return groups


def _resume(plan: Plan, inputs: Inputs, work: Work, collected: Collected) -> tuple[int, HiddenStates]:
    """Return the first block to do, and the hidden states in front of it: the last intact ones of a resumed job.

    Blocks that were recorded after those are done again, with the same result.
    """
    total = len(plan.blocks)
    results: list[BlockResult] = []
    while len(results) < total and (result := work.replay(f"block-{len(results):04d}")) is not None:
        results.append(result)
    first, stored = len(results), None
    if inputs.calibration is not None and first < total:
        fits = states_wanted(inputs.calibration.ids, text_config(plan.model).hidden_size, plan.options.paired)
        first, stored = work.states.latest(len(results), fits) or (0, None)
    hidden = HiddenStates([], [], [], [])
    if inputs.calibration is not None and first < total:
        start = (plan.model, plan.blocks, plan.weights, inputs.calibration.ids, plan.device)
        hidden = embed(*start, stored)
        if first and hands_on(hidden.calls):  # what finished blocks handed on is not kept
            first, stored, hidden = 0, None, embed(*start, None)
    work.writer.forget(f"block-{index:04d}" for index in range(first, len(results)))
    for result in results[:first]:
        collected.add(result)
    if not hidden.states:
        return first, hidden
    if plan.options.paired:
        option = "--gptaq" if plan.options.gptaq else f"--method {plan.options.method}"
        require_nothing_handed_on(hidden.calls, str(plan.weights.source.path), option)
    if plan.options.paired and stored is None:
        hidden.original = [offload(state.clone(), plan.device) for state in hidden.states]
    elif plan.options.paired:  # as they were kept: first the quantized ones
        half = len(hidden.states) // 2
        hidden.original = hidden.states[half:]
        del hidden.states[half:]
    return first, hidden


def _tune_inputs(plan: Plan, decisions: Decisions, hidden: HiddenStates, index: int) -> TuneInputs | None:
    """Return what a block learns from, None if the method does not learn."""
    if plan.options.method != "tune":
        return None
    assert decisions.channels is not None  # measured: the method asks for it
    require_one_call(hidden.calls, "--method tune")
    single = hidden.single[index].to(plan.device)
    return TuneInputs(hidden.states, hidden.original, decisions.channels[index], single)


def _write_text(plan: Plan, work: Work, listen: Listener) -> Inputs:
    """Let the whole model write text for ``--calibration self``, and release it before the first block is loaded."""
    text = work.text()
    if text is None:
        text = self_calibration.write(
            plan.source,
            plan.tokenizer,
            plan.options,
            lambda done, total: listen(Progress("self", done, total)),
            plan.device,
        )
        work.keep_text(text)
    return plan.inputs.written(text, plan.options.samples)


def _new_report(plan: Plan, decisions: Decisions, work: Work) -> ConvertReport:
    """Return the report, with all that is known before the first block."""
    o, allocation = plan.options, None
    if plan.budget is not None and decisions.choice is not None:
        allocation = budget_summary(plan.budget, decisions.choice, plan.targets)
    return ConvertReport(
        out=o.out,
        method=o.method,
        format=o.format,
        scheme=o.scheme_words,
        kv_bits=o.kv_bits,
        preset=o.preset,
        method_options=o.method_options,
        warnings=list(plan.warnings),
        drawn=o.draws,
        matmul_precision=plan.matmul_precision,
        resumed=work.resumed,
        engines=lint_plan(
            plan.format.name,
            decisions.targets,
            plan.model.config,
            plan.source.config,
            folder=str(written(o)),
            fp8_cache=plan.stores_cache_scales,
        ),
        allocation=allocation,
        predicted_host_bytes=plan.prediction.host,
        source_bytes=sum(plan.source.info(name).nbytes for name in plan.source.names()),
    )
