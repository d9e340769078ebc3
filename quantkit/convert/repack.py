"""A quantized checkpoint -> another format: the same codes, scales and zero points, in other words on disk.

Exact or refused. What can be repacked into what: docs/formats/README.md.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantkit import __version__
from quantkit.checkpoint.source import FolderSource, Source, open_source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.checkpoint.writer import CheckpointWriter, check_output
from quantkit.convert.cache import engine_scales, label_words, summary
from quantkit.convert.folder import write_beside
from quantkit.convert.lint import lint_folder
from quantkit.convert.plan import cache_elsewhere, refuse_same_place
from quantkit.convert.repack_cache import OPTIONS, CachePlan, calibrate_cache, plan_cache
from quantkit.convert.repack_memory import PART_BYTES, packed_bytes, predict_repack
from quantkit.convert.repack_request import refuse_contradictions
from quantkit.convert.report import ConvertReport, LayerReport
from quantkit.convert.run import Listener, Progress
from quantkit.convert.sample import TOO_LARGE, fallback, run_sample
from quantkit.convert.structure import Structure, structure_of
from quantkit.convert.targets import collapse
from quantkit.convert.verify import decision_sha256, verify_folder, verify_kv
from quantkit.core.host import map_large_blocks, peak_rss, release_free_memory, size_text
from quantkit.core.kvscheme import KVPlan
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RequestError, SourceError, UnsupportedModel
from quantkit.formats import Format, Layout, writer_format
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.formats.reader import QuantizedReader

POSITIONS = ("wpe", "embed_positions", "position_embeddings")
ORIGINAL = "Repacking changes no code; quantize the 16-bit original for this format instead."


@dataclass
class RepackPlan:
    """A repack, ready to run. ``problems`` is empty, or the plan must not run. Sizes in bytes."""

    source: Source
    reader: QuantizedReader
    out: Path
    format: Format
    overwrite: bool
    layout: Layout
    shapes: dict[str, tuple[int, int]]
    plain: list[str]  # stored tensors that are copied
    kv_bits: int | str
    kv: KVPlan | None  # stored; None too if the cache is calibrated anew
    output: int
    host: int
    generates: bool = (
        False  # whether the written model is run: within memory.GENERATE_BYTES, or what the repack takes anyway
    )
    cache: CachePlan | None = None  # a calibration of the KV cache
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raises RequestError that lists every problem at once."""
        if self.problems:
            raise RequestError("This repack cannot run:\n" + "\n".join(f"  - {problem}" for problem in self.problems))

    def schemes(self) -> dict[str, int]:
        """How many modules have which scheme, most common first."""
        return dict(Counter(scheme.describe() for scheme in self.layout.modules.values()).most_common())

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "repacked_from": self.reader.format,
            "format": self.format.name,
            "schemes": self.schemes(),
            "kv_bits": self.kv_bits,
            "peak_host_bytes": self.host,
            "peak_device_bytes": 0,
            "peak_disk_bytes": 2 * self.output,
            "output_bytes": self.output,
            "warnings": self.warnings,
            "problems": self.problems,
        }

    def describe(self) -> str:
        """The plan in words: what ``--dry-run`` prints."""
        lines = [
            f"{self.source.path} -> {self.out}",
            f"  repack    {self.reader.format} -> {self.format.name}: the same codes"
            + ("" if self.cache is not None else ", no text is read")
            + (f"; {self.cache.options.cache.words()}, calibrated" if self.cache is not None else "")
            + (f"; {label_words(self.kv_bits)}" if self.kv is not None else ""),
            *(f"  linears   {count:4d} x {scheme}" for scheme, count in self.schemes().items()),
            f"  keeps     {len(self.plain)} tensor{'' if len(self.plain) == 1 else 's'} unchanged",
            f"  needs     host {self.host / 1e6:.0f} MB, disk {2 * self.output / 1e6:.1f} MB while running; output {self.output / 1e6:.1f} MB",
            *(f"  note      {warning}" for warning in self.warnings),
            *(f"  PROBLEM   {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def plan_repack(ref: str | Path, out: Path, requested: Mapping[str, Any]) -> RepackPlan | None:
    """Plan to repack a quantized source, or None if ``ref`` is a floating-point model.

    requested: the options of convert that were given, without defaults. Raises RequestError for one that contradicts what
    is stored, and for one that has no effect; what the format cannot hold is collected in ``RepackPlan.problems``.
    """
    source = open_source(ref)
    if source.quantization() is None:
        return None
    overwrite = bool(requested.get("overwrite", False))
    reader = QuantizedReader(source)
    problems: list[str] = []
    cache = plan_cache(source, out, requested, problems)
    usual = "compressed-tensors" if cache is None else str(reader.format)
    form = writer_format(str(requested.get("format", usual)))
    check_output(out, overwrite)
    refuse_same_place(out, source)
    found = {name: reader.scheme(name) for name in reader.modules}
    schemes = {name: scheme for name, scheme in found.items() if isinstance(scheme, Scheme)}
    kv = read_kv_plan(source.path) if source.path.is_dir() and cache is None else None
    kv_bits: int | str = 16 if kv is None else kv.label
    manifest = read_manifest(source)
    refuse_contradictions(
        source.path,
        requested,
        list(schemes.values()),
        kv_bits,
        manifest.get("options", {}).get("method"),
        () if cache is None else OPTIONS,
    )
    shapes = {name: reader.shape(name) for name in schemes}
    outside = [name for name in schemes if outside_kind(name) is not None]
    structure = structure_of(reader, source.config)
    kept, odd, notes = _plain(reader, structure)
    fp8 = (kv_bits if cache is None else cache.options.kv_bits) == "fp8"
    layout = Layout(dict(sorted(schemes.items())), _dense(reader, structure), outside, fp8 and form.holds_cache_scales)
    plain = sum(source.info(name).nbytes for name in kept)
    output = plain + sum(packed_bytes(scheme, shapes[name]) for name, scheme in schemes.items())
    plan = RepackPlan(source, reader, out, form, overwrite, layout, shapes, kept, kv_bits, kv, output, 0, cache=cache)
    plan.problems += [*problems, *odd, *_problems(plan, found)]
    plan.warnings += [*notes, *_cache_scales_left(plan), *([] if cache is None else cache.warnings)]
    plan.warnings += cache_elsewhere("fp8" if fp8 else 16, form) if kv or cache else []
    need = predict_repack([source.info(name) for name in kept], schemes, shapes, 0 if cache is None else cache.host)
    plan.host, plan.generates = need.host, need.generates
    free = shutil.disk_usage(out.parent).free
    if 2 * output > free:
        plan.problems.append(
            f"disk: {size_text(2 * output)} are needed in {out.parent}, {size_text(free)} are free. Free some space there, or choose "
            "an --out on another disk."
        )
    if reader.format == form.name and cache is None:
        plan.warnings.append(f"the source is in {form.name} already: it is written anew")
    return plan


def run_repack(plan: RepackPlan, listen: Listener, started: float | None = None) -> ConvertReport:
    """Execute a plan: read, write and read back module by module. Raises QuantkitError if it has problems.

    Raises CheckpointError, naming the module, for what shows only in the values: act-order groups, a zero point that the
    format has no field for. Nothing is left behind then.
    """
    plan.raise_problems()
    map_large_blocks()
    started = time.perf_counter() if started is None else started
    writer = CheckpointWriter(plan.out, overwrite=plan.overwrite, stem=plan.format.stem)
    try:
        report = _repack(plan, writer, listen)
        writer.commit()
    except BaseException:
        writer.abandon()
        raise
    report.seconds = time.perf_counter() - started
    report.peak_host_bytes = peak_rss()
    report.output_bytes = sum(file.stat().st_size for file in plan.out.glob("*.safetensors"))
    return report


def _repack(plan: RepackPlan, writer: CheckpointWriter, listen: Listener) -> ConvertReport:
    source, reader = plan.source, plan.reader
    report = ConvertReport(
        plan.out, "repack", plan.format.name, ", ".join(plan.schemes()), plan.kv_bits, warnings=list(plan.warnings)
    )
    report.repacked_from = reader.format
    report.predicted_host_bytes = plan.host
    report.source_bytes = sum(source.info(name).nbytes for name in source.names())
    kv = _calibrated(plan, report, listen) if plan.cache is not None else plan.kv
    batch = _Batch(writer)
    decisions: dict[str, str] = {}
    for done, name in enumerate(reader.modules):
        listen(Progress("repack", done, len(reader.modules), name))
        q = _module(reader, name)
        decisions[name] = decision_sha256(q)
        try:
            parts = plan.format.encode(q)
        except CheckpointError as error:
            raise CheckpointError(f"{source.path}: {name}: {error}") from error
        batch.add({f"{name}.{part}": value for part, value in parts.items()})
        report.layers.append(LayerReport(name, q.scheme.describe(), None, None, q.codes.numel(), q.bits_stored))
    listen(Progress("copy", len(reader.modules), len(reader.modules)))
    for name in plan.plain:
        batch.add({name: reader.read(name)})
    if plan.layout.fp8_cache and kv is not None:
        batch.add(engine_scales(kv, {name: name for name in (*reader.modules, *plan.plain)}))
    batch.flush()
    config = plan.format.config(plan.layout, __version__)
    write_beside(source, writer.folder, quantization=config, manifest=_manifest(plan, report), kv=kv)
    writer.assemble()
    try:
        report.engines = lint_folder(FolderSource(writer.folder))
    except UnsupportedModel as error:  # repacking needs no structure: models that quantkit cannot run are repacked too
        report.warnings.append(f"which engines load it is not known: {error}")
    listen(Progress("verify", len(reader.modules), len(reader.modules)))
    report.verified_tensors = verify_folder(writer.folder, decisions, writer.entries)
    report.verified_tensors += verify_kv(writer.folder, kv)
    sample = _sample(plan, writer.folder)
    if isinstance(sample, str):
        report.notes.append(sample)
    else:
        report.sample = sample
    return report


def _calibrated(plan: RepackPlan, report: ConvertReport, listen: Listener) -> KVPlan:
    """A cache for the stored weights: bits and scales of every layer."""
    assert plan.cache is not None
    asked = plan.cache.options.cache
    layers = calibrate_cache(plan.cache, plan.source, lambda *at: listen(Progress(*at)))
    found = asked.decide(layers)
    report.kv_bits, report.cache = found.label, summary(found, layers, asked.budget)
    report.notes += plan.cache.notes
    release_free_memory()
    return found


def _cache_scales_left(plan: RepackPlan) -> list[str]:
    """A warning if scales of an fp8 cache are stored that do not come along."""
    left = [] if plan.layout.fp8_cache else plan.reader.cache_names()
    if not left or plan.kv is not None:  # quantkit's own are in quantkit_kv.safetensors too
        return []
    return [
        f"{len(left)} scales of an fp8 KV cache are left out (first {left[0]}): --kv-bits fp8 calibrates such a cache"
    ]


def _sample(plan: RepackPlan, folder: Path) -> dict[str, str] | str:
    if not plan.generates:
        return TOO_LARGE
    try:
        tokenizer = load_tokenizer(plan.source)
    except SourceError as error:  # the weights do not need it: repacking is no worse off than its source
        return f"no sample was generated: {error}"
    return run_sample(folder, fallback(tokenizer), tokenizer, str(plan.out), "please report it: no code was changed")


def _module(reader: QuantizedReader, name: str) -> QuantTensor:
    q = reader.module(name)
    if not isinstance(q, QuantTensor):
        raise CheckpointError(
            f"{reader.source.path}: {name} is {q.kind}, whose groups or numbers no other format here has. {ORIGINAL}"
        )
    return q


class _Batch:
    """Collects tensors into parts of about PART_BYTES."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self.writer, self.held, self.size, self.parts = writer, dict[str, Tensor](), 0, 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self.held.update(tensors)
        self.size += sum(tensor.nbytes for tensor in tensors.values())
        if self.size >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.held:
            self.writer.add_part(f"repack-{self.parts:05d}", self.held)
        self.held, self.size, self.parts = {}, 0, self.parts + 1
        release_free_memory()


def _problems(plan: RepackPlan, found: Mapping[str, Scheme | str]) -> list[str]:
    form, problems = plan.format, []
    kinds = Counter(kind for kind in found.values() if isinstance(kind, str))
    for kind, count in kinds.items():
        problems.append(f"{count} of {len(found)} weights are {kind}, not integers with scales. {ORIGINAL}")
    for name, scheme in plan.layout.modules.items():
        kind_outside, reason = outside_kind(name), form.supports(scheme, *plan.shapes[name])
        if kind_outside is not None and not {kind_outside, "tied"} & set(form.outside):
            reason = f"no engine reads a quantized {kind_outside} from it"
        if reason:
            why = reason.partition(". Use ")[0].removesuffix(".")
            problems.append(
                f"{name}: {form.name} cannot hold {scheme.describe()}: {why}. {ORIGINAL} --format native holds all."
            )
    unsayable = form.cannot_say(plan.layout) if plan.layout.modules else None
    if unsayable:
        problems.append(unsayable)
    problems = collapse(problems)
    if not kinds and not problems:
        try:  # what only the values tell is mostly the same in every module: look at one before promising anything
            first = next(iter(plan.layout.modules))
            form.encode(_module(plan.reader, first))
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def outside_kind(name: str) -> str | None:
    """``head`` or ``embedding`` for a module outside the blocks, by the names that models use; None inside them."""
    local = name.rpartition(".")[2]
    if local in ("lm_head", "embed_out"):
        return "head"
    return "embedding" if local in ("embed_tokens", "embed_in", "wte", "word_embeddings") else None


def _plain(reader: QuantizedReader, structure: Structure | str) -> tuple[list[str], list[str], list[str]]:
    """Tensors to copy; problems; notes. Biases that the model has no place for are left out if they are zeros."""
    kept = reader.plain_names()
    if isinstance(structure, str) or not structure.extra_biases:
        return kept, [], []
    full = [name for name in structure.extra_biases if bool(reader.read(name).any())]
    problems = [
        f"{name}: not zero, but the model has no bias there; engines would leave it out. Take a source that fits its config."
        for name in full
    ]
    zeros = [name for name in structure.extra_biases if name not in full]
    notes = [f"{len(zeros)} biases of zeros are left out, which the model has no place for"] if zeros else []
    return [name for name in kept if name not in zeros], collapse(problems), notes


def _dense(reader: QuantizedReader, structure: Structure | str) -> list[str]:
    """Matrices that are no part of a quantized module: what the config has to name as left at 16 bit. And the head: a tied
    one is not stored, but engines look for it."""
    found = []
    for name in reader.plain_names():
        module = name.removesuffix(".weight")
        if module == name or len(reader.source.info(name).shape) != 2:
            continue
        if isinstance(structure, str):  # an unknown structure: by the names that models use
            embedding = outside_kind(module) == "embedding" or module.rpartition(".")[2] in POSITIONS
        else:
            embedding = module in structure.embeddings
        if not embedding:
            found.append(module)
    heads = [name for name in (*found, *reader.modules) if outside_kind(name) == "head"]
    return sorted(found if heads else [*found, "lm_head"])


def read_manifest(source: Source) -> dict[str, Any]:
    """quantkit.json of a folder that quantkit wrote; empty for another tool's."""
    path = source.path / "quantkit.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Remove it to repack without its history.") from error
    return data if isinstance(data, dict) else {}


def _manifest(plan: RepackPlan, report: ConvertReport) -> dict[str, Any]:
    """What made these bytes. No times and no paths. ``source``: the manifest of what was repacked."""
    return {
        "quantkit_version": __version__,
        "repacked_from": {"format": plan.reader.format, "sha256": plan.source.digest()},
        "options": {"format": plan.format.name},
        **({} if plan.cache is None else {"calibration": plan.cache.identity(), "cache": report.cache}),
        "source": read_manifest(plan.source) or None,
    }
