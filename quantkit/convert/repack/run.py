"""Repack a quantized checkpoint into another format: the same codes, scales and zero points, stored another way.

Exact or refused. What can be repacked into what: docs/formats/README.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.checkpoint.source import FolderSource
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.convert.engines.lint import gguf_readers, lint_folder
from quantkit.convert.engines.rules import Checkpoint
from quantkit.convert.output.ahead import ahead
from quantkit.convert.output.gguf_file import file_name
from quantkit.convert.output.side_files import write_beside
from quantkit.convert.output.smoke_test import continue_prompt
from quantkit.convert.output.verify import verify_folder, verify_kv
from quantkit.convert.plan.random_tokens import fallback
from quantkit.convert.progress import Listener, Progress
from quantkit.convert.repack.batch import Batch
from quantkit.convert.repack.fit import Fitted, fit
from quantkit.convert.repack.gguf_out import widened, write_repacked
from quantkit.convert.repack.gguf_source import PackedGGUF
from quantkit.convert.repack.kv_cache import CachePlan, calibrate_cache, manifest_entry
from quantkit.convert.repack.memory import TOO_LARGE
from quantkit.convert.repack.plan import RepackPlan, integer_module, read_manifest
from quantkit.convert.report.kv_cache import summary
from quantkit.convert.report.report import ConvertReport
from quantkit.convert.results import LayerReport, packed_sha256
from quantkit.convert.stages.kv_cache import decide_cache, engine_scales
from quantkit.core.host import map_large_blocks, peak_rss, release_free_memory
from quantkit.core.interrupt import raise_if_interrupted
from quantkit.core.kvscheme import KVPlan
from quantkit.errors import CheckpointError, SourceError, UnsupportedModel
from quantkit.version import __version__


def run_repack(plan: RepackPlan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Execute a plan: read, write and read back module by module.

    plan: the repack.
    listen: called with a ``Progress`` before every step.
    started: ``time.perf_counter()`` when the request came, so that planning counts in the report's seconds.

    Raises QuantkitError if the plan has problems. Raises CheckpointError, naming the module, for what shows only in the
    values: act-order groups, a zero point that the format has no field for. Nothing is left behind then.
    """
    plan.raise_problems()
    map_large_blocks()
    started = time.perf_counter() if started is None else started
    writer = CheckpointWriter(plan.out, overwrite=plan.overwrite, stem=plan.format.stem)
    with writer.whole():
        report = _repack(plan, writer, listen)
    report.seconds = time.perf_counter() - started
    report.peak_host_bytes = peak_rss()
    weights = "*.safetensors" if plan.one_file is None else "*.gguf"
    report.output_bytes = sum(file.stat().st_size for file in plan.out.glob(weights))
    return report


def _repack(plan: RepackPlan, writer: CheckpointWriter, listen: Listener) -> ConvertReport:
    report = _report(plan)
    total = len(plan.reader.modules)
    kv, calibration = plan.kv, None
    if plan.cache is not None:
        kv, calibration = _calibrate(plan, plan.cache, report, listen)
    decisions = _write_tensors(plan, writer, kv, report, listen)
    report.notes += plan.source.notes() if isinstance(plan.source, PackedGGUF) else []
    write_beside(
        plan.source,
        writer.folder,
        quantization=None if plan.one_file else plan.format.config(plan.layout, __version__),
        manifest=_manifest(plan, calibration, report),
        kv=kv,
    )
    if plan.one_file is not None:
        listen(Progress("verify", total, total))
        report.verified_tensors, notes, mix = write_repacked(plan.source, plan.one_file, writer)
        kinds = {layer.name: layer.scheme for layer in report.layers}
        report.notes += notes + widened(plan.layout.modules, kinds, plan.rounding)
        family, file = str(plan.one_file.config["model_type"]), str(plan.out / file_name(mix))
        report.engines = gguf_readers(Checkpoint("gguf", [], 0, 0, family=family, folder=file))
        writer.settle()
    else:
        _assemble(plan, writer, decisions, kv, report, lambda: listen(Progress("verify", total, total)))
    sample = _smoke_test(plan, writer.folder)
    if isinstance(sample, str):
        report.notes.append(sample)
    else:
        report.sample = sample
    return report


def _assemble(
    plan: RepackPlan, writer: CheckpointWriter, decisions: dict[str, str], kv: KVPlan | None, report: ConvertReport,
    verifying: Callable[[], None],
) -> None:  # fmt: skip
    """Join the parts into shards, tell who loads them, and read everything back."""
    writer.assemble()
    try:
        report.engines = lint_folder(FolderSource(writer.folder), shown=str(plan.out))
    except UnsupportedModel as error:  # repacking needs no structure: models that quantkit cannot run are repacked too
        report.warnings.append(f"which engines load it is not known: {error}")
    verifying()
    report.verified_tensors = verify_folder(
        writer.folder, decisions, writer.entries, digest_of=packed_sha256, threads=2
    )
    report.verified_tensors += verify_kv(writer.folder, kv)


def _report(plan: RepackPlan) -> ConvertReport:
    """Return the report before anything is done."""
    source = plan.source
    return ConvertReport(
        out=plan.out,
        method="repack",
        format=plan.format.name,
        scheme=", ".join(plan.schemes()),
        kv_bits=plan.kv_bits,
        warnings=list(plan.warnings),
        repacked_from=plan.reader.format,
        predicted_host_bytes=plan.host,
        source_bytes=source.file_bytes()
        if isinstance(source, PackedGGUF)
        else sum(source.info(name).nbytes for name in source.names()),
    )


def _calibrate(
    plan: RepackPlan, cache: CachePlan, report: ConvertReport, listen: Listener
) -> tuple[KVPlan, dict[str, Any]]:
    """Return a KV-cache plan for the stored weights, and what decided it, for the manifest."""
    request = cache.options.cache
    calibrated = calibrate_cache(cache, plan.source, lambda *at: listen(Progress(*at)))
    kv = decide_cache(request, calibrated.layers)
    report.kv_bits, report.cache = kv.label, summary(kv, calibrated.layers, request.budget)
    report.notes += calibrated.notes
    release_free_memory()
    return kv, manifest_entry(cache, calibrated.windows)


def _write_tensors(
    plan: RepackPlan, writer: CheckpointWriter, kv: KVPlan | None, report: ConvertReport, listen: Listener
) -> dict[str, str]:
    """Write every module, every tensor that is copied, and other engines' cache scales.

    Returns ``packed_sha256`` by module.
    """
    reader, batch, decisions = plan.reader, Batch(writer), dict[str, str]()
    for done, (name, fitted, digest) in enumerate(ahead(lambda name: _fitted(plan, name), reader.modules)):
        raise_if_interrupted()
        listen(Progress("repack", done, len(reader.modules), name))
        q, parts = fitted.weight, fitted.parts
        if plan.one_file is None:
            decisions[name] = digest
        bits = q.bits_stored if plan.one_file is None else 8 * sum(part.nbytes for part in parts.values())
        batch.add({f"{name}.{part}": value for part, value in parts.items()})
        scheme = q.scheme.describe() if plan.one_file is None else next(iter(parts)).rpartition(".")[2]
        report.layers.append(LayerReport(name, scheme, fitted.error or None, None, math.prod(q.shape), bits))
    listen(Progress("copy", len(reader.modules), len(reader.modules)))
    for name in plan.plain:
        batch.add({name: reader.read(name)})
    if plan.layout.fp8_cache and kv is not None:
        batch.add(engine_scales(kv, {name: name for name in (*reader.modules, *plan.plain)}))
    batch.flush()
    return decisions


def _fitted(plan: RepackPlan, name: str) -> tuple[str, Fitted, str]:
    """Read a module and return it as the format holds it, with ``packed_sha256`` where that is verified.

    Raises CheckpointError, naming the module, for what the format does not hold.
    """
    alone = plan.one_file is None or plan.one_file.alone(name)
    try:
        fitted = fit(integer_module(plan.reader, name), plan.format, rounding=plan.rounding, alone=alone)
    except CheckpointError as error:
        raise CheckpointError(f"{plan.source.path}: {name}: {error}") from error
    return name, fitted, packed_sha256(fitted.weight) if plan.one_file is None else ""


def _smoke_test(plan: RepackPlan, folder: Path) -> dict[str, str] | str:
    """Return the written model's continuation of a prompt, or why it is not run."""
    if not plan.generates:
        return TOO_LARGE
    try:
        tokenizer = load_tokenizer(plan.source)
    except SourceError as error:  # the weights do not need it: repacking is no worse off than its source
        return f"no sample was generated: {error}"
    return continue_prompt(
        folder, fallback(tokenizer), tokenizer, str(plan.out), "please report it: no code was changed"
    )


def _manifest(plan: RepackPlan, calibration: dict[str, Any] | None, report: ConvertReport) -> dict[str, Any]:
    """Return what made these bytes, without times and paths. ``source``: the manifest of the repacked folder."""
    rounded = {layer.name: layer.relative_weight_error for layer in report.layers if layer.relative_weight_error}
    if isinstance(plan.source, PackedGGUF):
        rounded |= plan.source.rounded
    return {
        "quantkit_version": __version__,
        "repacked_from": {"format": plan.reader.format, "sha256": plan.source.digest()},
        "options": {"format": plan.format.name},
        **({"rounded": {name: float(f"{error:.3g}") for name, error in rounded.items()}} if rounded else {}),
        **({} if calibration is None else {"calibration": calibration, "cache": report.cache}),
        "source": read_manifest(plan.source) or None,
    }
