"""The last stage of a conversion: what is beside the blocks, the finished folder, its proof and its sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit.algorithms import Scales
from quantkit.checkpoint.source import finite
from quantkit.convert.engines.lint import casts_scales
from quantkit.convert.job.work_folder import Work, identity
from quantkit.convert.output.gguf_file import write_gguf
from quantkit.convert.output.layout import checkpoint_layout
from quantkit.convert.output.side_files import write_beside
from quantkit.convert.output.smoke_test import TOO_LARGE, continue_prompt, prompt_of
from quantkit.convert.output.verify import CastLoss, verify_folder, verify_kv
from quantkit.convert.plan.inputs import Inputs
from quantkit.convert.plan.plan import Plan
from quantkit.convert.plan.targets import outside_of_blocks
from quantkit.convert.progress import Listener, Progress
from quantkit.convert.report.kv_cache import summary as cache_summary
from quantkit.convert.report.report import ConvertReport
from quantkit.convert.results import BlockResult, Collected
from quantkit.convert.stages import distil
from quantkit.convert.stages.decide import Decisions
from quantkit.convert.stages.fold import missing_folds
from quantkit.convert.stages.head_embeddings import quantize_head_or_embedding
from quantkit.convert.stages.kv_cache import decide_cache, engine_scales
from quantkit.convert.stages.student import Written
from quantkit.core.kvscheme import KVPlan
from quantkit.version import __version__


def finish(
    plan: Plan,
    inputs: Inputs,
    decisions: Decisions,
    work: Work,
    collected: Collected,
    report: ConvertReport,
    listen: Listener,
) -> None:
    """Write everything beside the blocks, verify the finished folder, and run the smoke test."""
    total = len(plan.blocks)
    cache = _decide_cache(plan, work, collected, report)
    collected.notes += missing_folds(collected.folds)
    listen(Progress("blocks", total, total, collected.last_error()))
    listen(Progress("copy", total, total))
    _quantize_outside_of_blocks(plan, decisions, work, collected)
    work.check_decided({target.name for target in decisions.targets.values()}, set(collected.digests))
    if inputs.distil is not None:
        _distil(plan, inputs, decisions, work, collected, listen)
    work.states.clear()
    _copy_unquantized(plan, decisions, work)
    report.layers, report.notes = collected.layers, collected.notes
    report.tuning, report.distilled = collected.tuning, collected.distilled
    layout = checkpoint_layout(plan.weights, decisions.targets, fp8_cache=plan.stores_cache_scales)
    work.writer.fresh_folder()
    folder, one_file = work.writer.folder, plan.options.gguf_type is not None
    write_beside(
        plan.source,
        folder,
        quantization=None if one_file else plan.format.config(layout, __version__),
        # what made these bytes; no times and no paths: the same job gives the same manifest
        manifest={**identity(plan, inputs), **report.for_manifest()},
        kv=cache,
    )
    if one_file:
        listen(Progress("verify", total, total))
        report.verified_tensors, notes = write_gguf(plan, decisions.targets, work.writer)
        report.notes += notes
        work.writer.settle()
    else:
        _assemble(plan, decisions, work, collected, report, cache, lambda: listen(Progress("verify", total, total)))
    sample = _smoke_test(plan, inputs, folder)
    if isinstance(sample, str):
        report.notes.append(sample)
    else:
        report.sample = sample
    work.finish(report.to_store(), decisions.choice)


def _assemble(
    plan: Plan, decisions: Decisions, work: Work, collected: Collected, report: ConvertReport, cache: KVPlan | None,
    verifying: Callable[[], None],
) -> None:  # fmt: skip
    """Join the parts into shards, and read everything back."""
    work.writer.assemble()
    verifying()
    casts = casts_scales(plan.format.name, decisions.targets, plan.model.config, plan.source.config)
    cast = CastLoss() if casts else None
    folder = work.writer.folder
    report.verified_tensors = verify_folder(folder, collected.digests, work.writer.entries, cast)
    if cast is not None:
        report.notes.append(cast.note())
    report.verified_tensors += verify_kv(folder, cache)


def _smoke_test(plan: Plan, inputs: Inputs, folder: Path) -> dict[str, str] | str:
    """Continue a few tokens with the written folder, or return why not: the model is too large, say."""
    if "generate" not in plan.prediction.phases:
        return TOO_LARGE
    ids = prompt_of(plan.tokenizer, None if plan.options.draws else inputs.calibration)
    return continue_prompt(folder, ids, plan.tokenizer, str(plan.options.out), "convert with more bits")


def _decide_cache(plan: Plan, work: Work, collected: Collected, report: ConvertReport) -> KVPlan | None:
    """Choose bits and scales of every layer's cache, now that all ranges are known."""
    if not collected.kv:
        return None
    request = plan.options.cache
    cache = decide_cache(request, collected.kv)
    report.kv_bits, report.cache = cache.label, cache_summary(cache, collected.kv, request.budget)
    if plan.stores_cache_scales:
        work.record("cache", BlockResult(engine_scales(cache, plan.weights.names)))
    return cache


def _quantize_outside_of_blocks(plan: Plan, decisions: Decisions, work: Work, collected: Collected) -> None:
    """Quantize head and embeddings that a rule or the bit budget names, and layers that predict further tokens."""
    scales: Scales = "minmax" if plan.options.scales == "minmax" else "search"
    for index, target in enumerate(outside_of_blocks(decisions.targets)):
        result = work.replay(f"head-embeddings-{index}")
        if result is None:
            result = BlockResult()
            quantize_head_or_embedding(
                target, result, weights=plan.weights, format=plan.format, device=plan.device, scales=scales
            )
            work.record(f"head-embeddings-{index}", result)
        collected.add(result)


def _distil(
    plan: Plan, inputs: Inputs, decisions: Decisions, work: Work, collected: Collected, listen: Listener
) -> None:
    """Run the end-to-end pass; its tensors replace those in the blocks' parts."""
    assert inputs.distil is not None
    result = work.replay(distil.PART)
    if result is None:
        written = Written(
            weights=plan.weights, blocks=plan.blocks, targets=decisions.targets,
            format=plan.format, device=plan.device, writer=work.writer,
        )  # fmt: skip
        tell: Callable[..., Any] = lambda *where: listen(Progress(*where))  # noqa: E731
        result = distil.distil(written, inputs.distil, tell, states=work.states, resumed=work.resumed)
        work.record(distil.PART, result, over=True)
    collected.add(result)


def _copy_unquantized(plan: Plan, decisions: Decisions, work: Work) -> None:
    """Write what stays at 16 bit, one tensor at a time; small ones share a part. Learned norms are written already."""
    small: dict[str, Tensor] = {}
    learned = {name for name, entry in work.writer.entries.items() if entry.part == distil.PART}
    reads: list[tuple[str, Callable[[str], Tensor], str]] = [
        (name, plan.source.read, name) for name in decisions.unquantized.copied
    ]
    reads += [(plan.weights.names[name], plan.weights.raw_as_stored, name) for name in decisions.unquantized.extracted]
    for index, (name, read, key) in enumerate(reads):
        if name in learned or work.replay(f"plain-{index:05d}") is not None:
            continue
        tensor = finite(read(key), plan.source.path, name)
        if tensor.nbytes > 1 << 22:
            work.record(f"plain-{index:05d}", BlockResult({name: tensor}))
        else:
            small[name] = tensor
    work.record("plain", BlockResult(small))
