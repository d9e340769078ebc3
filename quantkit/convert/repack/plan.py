"""The plan of a repack, checked before a tensor is read: the modules to write, and what the new format cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.foreign_files.fields import read_json
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.writer import check_output
from quantkit.convert.options.kv_request import label_words
from quantkit.convert.options.rules import Problem, collapse
from quantkit.convert.plan.paths import lacks_room
from quantkit.convert.plan.plan import cache_elsewhere, refuse_same_place
from quantkit.convert.repack.checks import refuse_contradictions
from quantkit.convert.repack.fit import fit, written_scheme
from quantkit.convert.repack.gguf_out import GGUFNames
from quantkit.convert.repack.gguf_source import PackedGGUF
from quantkit.convert.repack.kv_cache import OPTIONS, CachePlan, plan_cache
from quantkit.convert.repack.memory import predict_repack
from quantkit.convert.repack.structure import Structure, structure_of
from quantkit.core.kvscheme import KVPlan
from quantkit.core.qtensor import QuantTensor
from quantkit.core.scheme import Scheme
from quantkit.errors import CheckpointError, RequestError, SourceError
from quantkit.formats import PACKED, writer_format
from quantkit.formats.gguf import GGUF
from quantkit.formats.interface import CheckpointLayout, Format
from quantkit.formats.kv_scales import read_kv_plan
from quantkit.formats.reader import QuantizedReader
from quantkit.formats.stored_parts import STATIC

# last names of position embeddings, for models whose structure is not known
POSITIONS = ("wpe", "embed_positions", "position_embeddings")

ORIGINAL = (
    "Repacking changes no code; quantize the 16-bit original for this format instead, or make a dense checkpoint with"
    " --dequantize."
)


@dataclass(frozen=True, kw_only=True)
class RepackPlan:
    """A repack, ready to run unless ``problems`` has an entry. Sizes in bytes."""

    source: Source
    reader: QuantizedReader
    out: Path
    format: Format
    overwrite: bool
    layout: CheckpointLayout
    # stored tensors that are copied
    plain: tuple[str, ...]
    # of the stored cache; 16 without one
    kv_bits: int | str
    # the stored plan of the KV cache; None too if the cache is calibrated anew
    kv: KVPlan | None
    # a calibration of the KV cache
    cache: CachePlan | None
    output: int
    # at the peak
    host: int
    # whether the written model is run, see ``RepackNeed``
    generates: bool
    # what the format cannot keep is rounded, see ``fit``
    rounding: bool
    # places in a GGUF file, None for other formats
    one_file: GGUFNames | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def raise_problems(self) -> None:
        """Raise RequestError that lists every problem at once, if there are any."""
        if self.problems:
            raise RequestError("This repack cannot run:\n" + "\n".join(f"  - {problem}" for problem in self.problems))

    def schemes(self) -> dict[str, int]:
        """Count the modules of each scheme, most common first."""
        return dict(Counter(scheme.describe() for scheme in self.layout.modules.values()).most_common())

    def to_json(self) -> dict[str, Any]:
        """Return the plan for ``--dry-run --json``."""
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
            "warnings": list(self.warnings),
            "problems": list(self.problems),
        }

    def describe(self) -> str:
        """Describe the plan in words: what ``--dry-run`` prints."""
        lines = [
            f"{self.source.path} -> {self.out}",
            f"  repack    {self.reader.format} -> {self.format.name}: the same codes"
            + (", scales and minima rounded where it does not hold them" if self.rounding else "")
            + ("" if self.cache is not None else ", no text is read")
            + (f"; {self.cache.options.cache.words()}, calibrated" if self.cache is not None else "")
            + (f"; {label_words(self.kv_bits)}" if self.kv is not None else ""),
            *(f"  linears   {count:4d} x {scheme}" for scheme, count in self.schemes().items()),
            f"  keeps     {len(self.plain)} tensor{'' if len(self.plain) == 1 else 's'} unchanged",
            (
                f"  needs     host {self.host / 1e6:.0f} MB, disk {2 * self.output / 1e6:.1f} MB while running; output"
                f" {self.output / 1e6:.1f} MB"
            ),
            *(f"  note      {warning}" for warning in self.warnings),
            *(f"  PROBLEM   {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def plan_repack(source: Source, out: Path, requested: Mapping[str, Any]) -> RepackPlan | None:
    """Plan to repack a quantized source; None if ``source`` is a floating-point model.

    What the format cannot hold is collected in ``RepackPlan.problems``.

    source: the checkpoint to read.
    out: the output folder.
    requested: the options of convert that were given, without defaults.

    Raises RequestError for an option that contradicts the stored model or has no effect.
    """
    if source.quantization() is None:
        return None
    reader = QuantizedReader(source, GGUF if isinstance(source, PackedGGUF) else None)
    text_problems = list[str]()
    cache = plan_cache(source, out, requested, text_problems)
    form = _target(reader, requested, cache)
    check_output(out, bool(requested.get("overwrite", False)))
    refuse_same_place(out, source)
    schemes = {name: reader.scheme(name) for name in reader.modules}
    kv, kept = _kept_cache(source, form, cache)
    integers = {name: scheme for name, scheme in schemes.items() if isinstance(scheme, Scheme)}
    _refuse_options(source, requested, list(integers.values()), kv, cache)
    structure = structure_of(reader, source.config)
    plain, bias_problems, bias_notes = _plain(reader, structure)
    integers = {name: written_scheme(form, scheme) for name, scheme in integers.items()}
    layout = _layout(reader, form, structure, integers, _holds_fp8(kv, cache))
    shapes = {name: reader.shape(name) for name in integers}
    rounding = bool(requested.get("allow_rounding", False))
    refused = _refused(reader, form, layout, schemes, shapes, rounding) + _no_place_for_cache(form, cache)
    copied = [source.info(name) for name in plain]
    packed = 0 if refused else sum(form.stored_bytes(scheme, *shapes[name]) for name, scheme in integers.items())
    calibrating, vocabulary = cache.host if cache else 0, _vocabulary(source)
    unpacks = form.name == GGUF.name
    need = predict_repack(copied, packed, [*shapes.values()], calibrating, vocabulary, unpacks=unpacks)
    output = packed + sum(info.nbytes for info in copied)
    one_file = GGUFNames(source, reader) if form.name == GGUF.name else None
    refused += [] if one_file is None else one_file.split_experts(integers)
    return RepackPlan(
        source=source, reader=reader, out=out, format=form, overwrite=bool(requested.get("overwrite", False)),
        layout=layout, plain=tuple(plain), kv_bits=16 if kv is None else kv.label, kv=kv, cache=cache,
        output=output, host=need.host, generates=need.generates, rounding=rounding,
        one_file=one_file,
        problems=(*text_problems, *bias_problems, *refused, *lacks_room(out.parent, 2 * output, "an --out")),
        warnings=(*bias_notes, *kept, *_warnings(reader, form, layout, kv, cache)),
    )  # fmt: skip


def _target(reader: QuantizedReader, requested: Mapping[str, Any], cache: CachePlan | None) -> Format:
    """Return the format that was asked for; else the source's own for a calibration of the cache, or the usual one."""
    own = cache is not None and reader.format in PACKED
    return writer_format(str(requested.get("format", reader.format if own else PACKED[0])))


def _kept_cache(source: Source, form: Format, cache: CachePlan | None) -> tuple[KVPlan | None, list[str]]:
    """Return the stored plan of the KV cache, unless it is calibrated anew or has no place; and a note on that."""
    kv = read_kv_plan(source.path) if source.path.is_dir() and cache is None else None
    if kv is not None and form.name == GGUF.name:
        return None, ["how the KV cache is kept (quantkit_kv.safetensors) has no place in a GGUF file: left out"]
    return kv, []


def _refuse_options(
    source: Source, requested: Mapping[str, Any], schemes: Sequence[Scheme], kv: KVPlan | None, cache: CachePlan | None
) -> None:
    """Refuse options by ``refuse_contradictions``, with its RequestError."""
    method = read_manifest(source).get("options", {}).get("method")
    kv_bits: int | str = 16 if kv is None else kv.label
    refuse_contradictions(source.path, requested, schemes, kv_bits, method, () if cache is None else OPTIONS)


def _holds_fp8(kv: KVPlan | None, cache: CachePlan | None) -> bool:
    """Tell whether the written model has an fp8 KV cache."""
    if cache is not None:
        return cache.options.kv_bits == "fp8"
    return kv is not None and kv.label == "fp8"


def _layout(
    reader: QuantizedReader, form: Format, structure: Structure | str, schemes: Mapping[str, Scheme], fp8: bool
) -> CheckpointLayout:
    head_embeddings = [name for name in schemes if head_or_embedding(name) is not None]
    return CheckpointLayout(
        dict(sorted(schemes.items())), _dense(reader, structure), head_embeddings, fp8 and form.holds_cache_scales
    )


def _warnings(
    reader: QuantizedReader, form: Format, layout: CheckpointLayout, kv: KVPlan | None, cache: CachePlan | None
) -> list[str]:
    """Return warnings on the KV cache, and on a source that has the format already."""
    warnings = _cache_scales_left(reader, layout, kv) + _static_activations(reader)
    warnings += () if cache is None else cache.warnings
    if kv or cache:
        warnings += cache_elsewhere("fp8" if _holds_fp8(kv, cache) else 16, form)
    if reader.format == form.name and cache is None:
        warnings.append(f"the source is in {form.name} already: it is written anew")
    return warnings


def _cache_scales_left(reader: QuantizedReader, layout: CheckpointLayout, kv: KVPlan | None) -> list[str]:
    """Return a warning if scales of an fp8 cache are stored that are not copied."""
    left = [] if layout.fp8_cache else reader.cache_names()
    if not left or kv is not None:  # quantkit's own are in quantkit_kv.safetensors too
        return []
    return [
        f"{len(left)} scales of an fp8 KV cache are left out (first {left[0]}): --kv-bits fp8 calibrates such a cache"
    ]


def _static_activations(reader: QuantizedReader) -> list[str]:
    """Return a warning if fixed scales of activations are stored, which are not copied."""
    modules = [name for name, local in reader.modules.items() if set(STATIC) & set(local)]
    if not modules:
        return []
    return [
        f"{len(modules)} linears (first {modules[0]}) store a fixed scale for their activations, which is left out:"
        " engines keep those activations in 16 bits"
    ]


def _no_place_for_cache(form: Format, cache: CachePlan | None) -> list[str]:
    """Return a problem if a GGUF file should keep how the KV cache is kept."""
    if form.name != GGUF.name or cache is None:
        return []
    return [
        "--kv-bits, --kv-budget: a GGUF file has no place for the cache's scheme. llama.cpp takes it as --cache-type-k"
        " and --cache-type-v when it runs. Leave it out"
    ]


def integer_module(reader: QuantizedReader, name: str) -> QuantTensor:
    """Read a quantized module.

    reader: of the source.
    name: the module's name in the checkpoint.

    Raises CheckpointError for one that is not integers with scales.
    """
    q = reader.module(name)
    if not isinstance(q, QuantTensor):
        raise CheckpointError(
            f"{reader.source.path}: {name} is {q.kind}, whose groups or numbers no other format here has. {ORIGINAL}"
        )
    return q


def _refused(
    reader: QuantizedReader,
    form: Format,
    layout: CheckpointLayout,
    schemes: Mapping[str, Scheme | str],
    shapes: Mapping[str, tuple[int, int]],
    rounding: bool,
) -> list[str]:
    """Return why the format cannot hold the stored modules.

    schemes: of every module, a number format's name if not integers. rounding: what cannot be kept may be rounded.
    """
    kinds = Counter(kind for kind in schemes.values() if isinstance(kind, str))
    problems = [
        f"{count} of {len(schemes)} weights are {kind}, not integers with scales of 16 bits. {ORIGINAL}"
        for kind, count in kinds.items()
    ]
    problems += collapse(
        [
            problem
            for name, scheme in layout.modules.items()
            if (problem := _module_problem(form, name, scheme, shapes[name])) is not None
        ]
    )
    unsayable = form.cannot_say(layout) if layout.modules else None
    if unsayable:
        problems.append(unsayable)
    if problems:
        return problems
    try:  # what only the values tell is mostly the same in every module: look at one before promising anything
        fit(integer_module(reader, next(iter(layout.modules))), form, rounding=rounding)
    except CheckpointError as error:
        problems.append(str(error))
    return problems


def _module_problem(form: Format, name: str, scheme: Scheme, shape: tuple[int, int]) -> Problem | None:
    """Return why the format cannot hold one module, None if it can."""
    kind, refusal = head_or_embedding(name), form.supports(scheme, *shape)
    why = None if refusal is None else refusal.reason
    if kind is not None and not {kind, "tied"} & set(form.head_embeddings):
        why = f"no engine reads a quantized {kind} from it"
    if not why:
        return None
    return Problem(name, f"{form.name} cannot hold {scheme.describe()}: {why}. {ORIGINAL} --format native holds all.")


def head_or_embedding(name: str) -> str | None:
    """Return ``head`` or ``embedding`` for a module outside the blocks, None inside them.

    name: the module's name; models use a few usual ones.
    """
    local = name.rpartition(".")[2]
    if local in ("lm_head", "embed_out"):
        return "head"
    return "embedding" if local in ("embed_tokens", "embed_in", "wte", "word_embeddings") else None


def _vocabulary(source: Source) -> int:
    """Return the rows of head and embedding that a config names, 0 if it names none."""
    config = source.config
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else 0


def _plain(reader: QuantizedReader, structure: Structure | str) -> tuple[list[str], list[str], list[str]]:
    """Return tensors to copy, problems, and notes.

    Biases that the model has no place for are left out if they are zeros.
    """
    plain = reader.plain_names()
    if isinstance(structure, str) or not structure.extra_biases:
        return plain, [], []
    nonzero = [name for name in structure.extra_biases if bool(reader.read(name).any())]
    reason = (
        "not zero, but the model has no bias there; engines would leave it out. Take a source that fits its config."
    )
    problems = collapse([Problem(name, reason) for name in nonzero])
    zeros = [name for name in structure.extra_biases if name not in nonzero]
    notes = [f"{len(zeros)} biases of zeros are left out, which the model has no place for"] if zeros else []
    return [name for name in plain if name not in zeros], problems, notes


def _dense(reader: QuantizedReader, structure: Structure | str) -> list[str]:
    """Return the matrices outside quantized modules, which the config has to name as left at 16 bit.

    The head is among them: a tied one is not stored, but engines look for it.
    """
    dense = []
    for name in reader.plain_names():
        module = name.removesuffix(".weight")
        if module == name or len(reader.source.info(name).shape) != 2:
            continue
        if isinstance(structure, str):  # an unknown structure: by the names that models use
            embedding = head_or_embedding(module) == "embedding" or module.rpartition(".")[2] in POSITIONS
        else:
            embedding = module in structure.embeddings
        if not embedding:
            dense.append(module)
    heads = [name for name in (*dense, *reader.modules) if head_or_embedding(name) == "head"]
    return sorted(dense if heads else [*dense, "lm_head"])


def read_manifest(source: Source) -> dict[str, Any]:
    """Read quantkit.json of a folder that quantkit wrote; empty for another tool's.

    source: the quantized source.

    Raises CheckpointError if the file cannot be read.
    """
    path = source.path / "quantkit.json"
    remedy = "Remove it to repack without its history."
    try:
        data = read_json(path) if path.is_file() else {}
    except SourceError as error:
        raise CheckpointError(f"{error} {remedy}") from error
    options = data.get("options", {})
    if not isinstance(options, dict) or not isinstance(options.get("method"), str | None):
        raise CheckpointError(f"{path}: its options are none of quantkit's. {remedy}")
    return data
