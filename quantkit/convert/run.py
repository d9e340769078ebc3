"""The loop over blocks: load, observe, quantize, advance, write, free."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit import __version__
from quantkit.algorithms.kv import KVObserver, LayerRanges
from quantkit.calibrate.capture import advance, observe
from quantkit.calibrate.data import Windows
from quantkit.calibrate.experts import share_statistics
from quantkit.calibrate.transfer import hold
from quantkit.checkpoint.source import finite
from quantkit.convert import distil, selftext
from quantkit.convert.allocated import allocation_lines
from quantkit.convert.block import BlockResult, InputGroup, quantize_block
from quantkit.convert.cache import engine_scales, summary
from quantkit.convert.device import peak_device_bytes, release_memory, working_on
from quantkit.convert.embed import SHORT, Embedded, embed
from quantkit.convert.fold import fold_block, missing_folds, probe
from quantkit.convert.folder import write_beside
from quantkit.convert.lint import casts_scales, lint_plan
from quantkit.convert.options import (
    ConvertOptions,
    apply_activations,
    apply_preset,
    apply_target,
)
from quantkit.convert.outside import quantize_outside
from quantkit.convert.plan import Plan, make_plan
from quantkit.convert.refusals import refuse_unknown, refuse_without_effect
from quantkit.convert.report import ConvertReport
from quantkit.convert.resume import Work, identity
from quantkit.convert.sample import generate_sample
from quantkit.convert.scan import refuse_non_finite
from quantkit.convert.settle import guide_of, settle
from quantkit.convert.tuning import Lesson
from quantkit.convert.verify import CastLoss, verify_folder, verify_kv
from quantkit.core.host import map_large_blocks, peak_rss, release_free_memory, undisturbed
from quantkit.core.kvscheme import KVPlan
from quantkit.model.rotate import RotatedSource, prove
from quantkit.model.skeleton import block_linears
from quantkit.model.stepper import Call, input_groups
from quantkit.runtime.attention import attention_modules


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a conversion stands: for a bar, or a line per block. ``chosen`` comes once, when bits have been allocated: its note is the curve and the choice."""

    stage: str
    done: int
    total: int
    note: str = ""


Listener = Callable[[Progress], None]


def convert(
    source: str | Path,
    out: str | Path,
    *,
    preset: str | None = None,
    on_progress: Listener | None = None,
    **options: Any,
) -> ConvertReport:
    """Quantize a model and write a complete checkpoint folder ``out``; a source that is quantized already is repacked.

    options: the fields of ``ConvertOptions`` (method, bits, group_size, symmetric, format, kv_bits, calibration,
    samples, seq_len, seed, ...). preset: "fast", "balanced" or "best", see ``options.PRESETS``; an option that is given wins.
    The folder appears under its name only when it is complete and was read back.
    Raises QuantkitError children. What a later call with ``resume=True`` can go on from is kept in the work folder then,
    also on Ctrl-C or a kill (the error's note says so); under the name ``out`` there is nothing half-written, ever.
    """
    from quantkit.convert.repack import plan_repack, run_repack
    from quantkit.convert.repack_request import refuse_preset

    refuse_unknown(options)
    given = dict(options)
    options.update(apply_preset(preset, options))
    options.update(apply_activations(options))
    options.update(apply_target(options))
    started = time.perf_counter()
    listen = on_progress or (lambda progress: None)
    asked = ConvertOptions(source=str(source), out=Path(out), preset=preset, **options)
    repacking = plan_repack(source, Path(out), given)
    if repacking is not None:
        refuse_preset(str(source), preset)
        return run_repack(repacking, listen, started)
    refuse_without_effect(given, asked)
    plan = make_plan(asked)
    return run(plan, listen, started)


def run(plan: Plan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Execute a plan. Raises QuantkitError if it has problems."""
    plan.raise_problems()
    map_large_blocks()
    started = time.perf_counter() if started is None else started
    work = Work(plan)
    try:
        if (plan.options.needs_data or plan.options.allocates) and not work.read:
            refuse_non_finite(plan.weights, lambda done, total: listen(Progress("read", done, total)))
            work.keep_read()
        if plan.windows is not None and plan.windows.ids.is_meta:
            text, samples = work.text() or _own_text(plan, work, listen), plan.options.samples
            plan.windows = replace(text, ids=text.ids[:samples])
            if plan.distilled_on is not None:
                plan.distilled_on = replace(text, ids=text.ids[samples:])
        with working_on(plan.device, plan.products or "float32"):
            settle(plan, work, lambda done, total: listen(Progress("measure", done, total)))
            if plan.allocated is not None:
                listen(Progress("chosen", 1, 1, "\n".join(allocation_lines(plan.allocated))))
            report = _Conversion(plan, work, listen).run()
        work.writer.commit()
        work.remove()
    except BaseException as error:
        with undisturbed():  # by a second Ctrl-C
            kept = work.leave(error)
            if kept:  # Python prints these below a traceback, the command line below its message
                error.__notes__ = [*getattr(error, "__notes__", []), kept]
        raise
    report.seconds = time.perf_counter() - started
    report.peak_host_bytes = peak_rss()
    report.peak_device_bytes = peak_device_bytes(plan.device)
    report.output_bytes = sum(file.stat().st_size for file in plan.options.out.glob("*.safetensors"))
    return report


def _own_text(plan: Plan, work: Work, listen: Listener) -> Windows:
    """``--calibration self``: the whole model writes, and is let go before the first block is loaded."""
    windows = selftext.write(
        plan.source,
        plan.tokenizer,
        plan.options,
        lambda done, total: listen(Progress("self", done, total)),
        plan.device,
    )
    release_free_memory()
    work.keep_text(windows)
    return windows


class _Conversion:
    """One run of a plan: the states between blocks, and what is collected on the way."""

    def __init__(self, plan: Plan, work: Work, listen: Listener) -> None:
        self.plan, self.work, self.writer, self.listen = plan, work, work.writer, listen
        o = plan.options
        self.report = ConvertReport(
            o.out,
            o.method,
            o.format,
            o.target if o.allocates else o.scheme.describe(),
            o.kv_bits,
            o.preset,
            o.method_options,
            warnings=plan.warnings,
            drawn=o.draws,
            products=plan.products,
            resumed=work.resumed,
        )
        self.report.engines = lint_plan(plan)
        self.report.allocation = plan.allocated
        self.report.predicted_host_bytes = plan.prediction.host
        self.report.source_bytes = sum(plan.source.info(name).nbytes for name in plan.source.names())
        self.decisions: dict[str, str] = {}
        self.kv: dict[str, LayerRanges] = {}
        self.folds: dict[str, dict[str, bool]] = {}

    @torch.no_grad()
    def run(self) -> ConvertReport:
        if self.work.finished is not None:
            self.report.restore(self.work.finished)
            return self.report
        plan = self.plan
        self.report.rotated = prove(plan.source) if isinstance(plan.source, RotatedSource) else None
        first, begun, exact = self._begin()
        states = begun.states
        for index in range(first, len(plan.blocks)):
            name, block = plan.blocks.name(index), plan.blocks.modules[index]
            self.listen(Progress("blocks", index, len(plan.blocks), self._last_error()))
            plan.weights.load(name, plan.device)
            result = BlockResult()
            if states:
                call, short = begun.calls[index].to(plan.device), begun.short[index].to(plan.device)
                few = probe(states, SHORT).to(plan.device)
                names = input_groups(block, few, short)
                groups = self._observe(index, block, names, states, exact, call, result)
                if plan.options.folds:
                    fold_block(plan, name, block, groups, few, short, result)
                    self._observe_kv(index, block, states, call, result)
            else:
                groups = [InputGroup((linear,)) for linear in block_linears(block)]
            lesson = None
            if plan.options.method == "tune":
                assert plan.channels is not None  # settled
                lesson = Lesson(states, exact, plan.channels[index], begun.single[index].to(plan.device))
            quantize_block(plan, name, block, groups, result, lesson)
            del groups
            self.work.record(f"block-{index:04d}", result)
            self._collect(result)
            if states and index + 1 < len(plan.blocks):
                advance(block, states, call)
                self.work.states.keep(index + 1, [*states, *exact])
            plan.weights.release(name)
            release_memory(plan.device)
        states.clear()
        exact.clear()
        self._finish()
        return self.report

    def _begin(self) -> tuple[int, Embedded, list[Tensor]]:
        """The first block to do, the states in front of it, and those that the original model has there, if the method wants them. A resumed job takes up its last whole states; blocks that
        were recorded after those are done again, with the same result."""
        total, recorded = len(self.plan.blocks), 0
        results: list[BlockResult] = []
        while recorded < total and (result := self.work.replay(f"block-{recorded:04d}")) is not None:
            results.append(result)
            recorded += 1
        plan, first, states = self.plan, recorded, None
        if plan.windows is not None and recorded < total:
            first, states = self.work.states.latest(recorded) or (0, None)
        self.writer.forget(f"block-{index:04d}" for index in range(first, recorded))
        for result in results[:first]:
            self._collect(result)
        if plan.windows is None or first == total:
            return first, Embedded([], [], [], []), []
        found = embed(plan.model, plan.blocks, plan.weights, plan.windows.ids, plan.device, states)
        if not plan.options.paired:
            return first, found, []
        if states is None:
            return first, found, [hold(state.clone(), plan.device) for state in found.states]
        half = len(found.states) // 2  # as they were kept: first the quantized ones
        exact = found.states[half:]
        del found.states[half:]
        return first, found, exact

    def _finish(self) -> None:
        """Everything beside the blocks, the finished folder, and the proof that it holds what was decided."""
        plan, total = self.plan, len(self.plan.blocks)
        cache = self._decide_cache()
        self.report.notes += missing_folds(self.folds)
        self.listen(Progress("blocks", total, total, self._last_error()))
        self.listen(Progress("copy", total, total))
        self._quantize_outside()
        self._distil()
        self._copy_plain()
        self.writer.fresh_folder()
        write_beside(
            plan.source,
            self.writer.folder,
            quantization=plan.format.config(plan.layout(), __version__),
            manifest=self._manifest(),
            kv=cache,
        )
        self.writer.assemble()
        self.listen(Progress("verify", total, total))
        cast = CastLoss() if casts_scales(plan) else None
        self.report.verified_tensors = verify_folder(self.writer.folder, self.decisions, self.writer.entries, cast)
        if cast is not None:
            self.report.notes.append(cast.note())
        self.report.verified_tensors += verify_kv(self.writer.folder, cache)
        sample = generate_sample(plan, self.writer.folder)
        if isinstance(sample, str):
            self.report.notes.append(sample)
        else:
            self.report.sample = sample
        self.work.finish(self.report.to_store())

    def _collect(self, result: BlockResult) -> None:
        """Keep what report and verification need of a block."""
        self.decisions.update(result.decisions)
        self.kv.update(result.kv)
        self.folds.update(result.folds)
        self.report.layers += result.layers
        self.report.notes += result.notes
        self.report.tuning.update(result.tuning)

    def _last_error(self) -> str:
        layers = self.report.layers
        if not layers or layers[-1].relative_output_error is None:
            return ""
        return f"{layers[-1].name.rpartition('.')[2]} error {layers[-1].relative_output_error:.1%}"

    def _observe(
        self,
        index: int,
        block: nn.Module,
        names: list[tuple[str, ...]],
        states: list[Tensor],
        exact: list[Tensor],
        call: Call,
        result: BlockResult,
    ) -> list[InputGroup]:
        """Statistics of every input of a linear to quantize, and the scales of the KV cache, in one pass, which advances ``exact``."""
        plan, prefix = self.plan, self.plan.blocks.name(index)
        wanted = [group for group in names if any(f"{prefix}.{name}" in plan.targets for name in group)]
        later = plan.options.folds  # a fold may scale the values; their scales are calibrated afterwards
        observer = KVObserver() if plan.options.cache.wanted and not later else None
        if not wanted and observer is None and not exact:
            return []
        guide = guide_of(plan, index, wanted, result)
        hessians = observe(block, states, call, wanted, observer, exact, plan.options.crossed, guide)
        if observer is not None:
            self._kv_ranges(index, observer, block, states, call, result)
        tokens = [h.tokens for h in hessians]
        result.notes += [f"{prefix}.{one.describe()}" for one in share_statistics(block, wanted, hessians)]
        groups = []
        for group, count in zip(wanted, tokens, strict=True):  # each sum is freed as soon as its mean is taken
            h = hessians.pop(0)
            mean = h.result(f"{prefix}.{group[0]}") if h.tokens + h.dropped else None
            groups.append(InputGroup(group, mean, count, h.dropped, h.largest, h.mean_cross()))
        return groups

    def _kv_ranges(
        self,
        index: int,
        observer: KVObserver,
        block: nn.Module,
        states: list[Tensor],
        call: Call,
        result: BlockResult,
    ) -> None:
        name = attention_modules(self.plan.model)[index]
        result.kv[name] = self.plan.options.cache.finish(name, observer, block, states, call, result.notes)

    def _observe_kv(self, index: int, block: nn.Module, states: list[Tensor], call: Call, result: BlockResult) -> None:
        """The scales of the KV cache in a pass of their own."""
        if not self.plan.options.cache.wanted:
            return
        observer = KVObserver()
        observe(block, states, call, [], observer)
        self._kv_ranges(index, observer, block, states, call, result)

    def _decide_cache(self) -> KVPlan | None:
        """Bits and scales of every layer's cache, now that all are known."""
        if not self.kv:
            return None
        asked = self.plan.options.cache
        found = asked.decide(self.kv)
        self.report.kv_bits, self.report.cache = found.label, summary(found, self.kv, asked.budget)
        if self.plan.stores_cache_scales:
            self.work.record("cache", BlockResult(engine_scales(found, self.plan.weights.names)))
        return found

    def _quantize_outside(self) -> None:
        """Head and embeddings that a rule names, one at a time."""
        for i, target in enumerate(self.plan.outside()):
            result = self.work.replay(f"outside-{i}")
            if result is None:
                result = BlockResult()
                quantize_outside(self.plan, target, result)
                self.work.record(f"outside-{i}", result)
            self._collect(result)

    def _distil(self) -> None:
        """The end-to-end pass; what it changes replaces what the blocks' parts hold."""
        if (windows := self.plan.distilled_on) is not None:
            result = self.work.replay(distil.PART)
            if result is None:
                result = distil.distil(self.plan, self.work, windows, lambda *where: self.listen(Progress(*where)))
                self.work.record(distil.PART, result, over=True)
            self._collect(result)
            self.report.distilled = result.distilled
        self.work.states.clear()

    def _copy_plain(self) -> None:
        """What is not quantized, unchanged, one tensor at a time; small ones share a part. Learned norms are written already."""
        plan, small = self.plan, {}
        learned = {name for name, entry in self.writer.entries.items() if entry.part == distil.PART}
        reads: list[tuple[str, Callable[[str], Tensor], str]] = [(name, plan.source.read, name) for name in plan.plain]
        reads += [(plan.weights.names[name], plan.weights.raw, name) for name in plan.split]
        for i, (name, read, what) in enumerate(reads):
            if name in learned:
                continue
            if self.work.replay(f"plain-{i:05d}") is not None:
                continue
            tensor = finite(read(what), plan.source.path, name)
            if tensor.nbytes > 1 << 22:
                self.work.record(f"plain-{i:05d}", BlockResult({name: tensor}))
            else:
                small[name] = tensor
        self.work.record("plain", BlockResult(small))

    def _manifest(self) -> dict[str, Any]:
        """What made these bytes. No times and no paths: the same job gives the same manifest."""
        return {**identity(self.plan), **self.report.for_manifest()}
