"""Put the finished parts of a conversion together as one GGUF file, and read it back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.gguf_files.out_config import Field, config_fields
from quantkit.checkpoint.gguf_files.out_file import OutTensor, verify_file, write_file
from quantkit.checkpoint.gguf_files.out_names import Names, Place
from quantkit.checkpoint.gguf_files.out_vocabulary import copied_vocabulary, read_metadata, vocabulary_fields
from quantkit.checkpoint.gguf_files.vocabulary import rebuild
from quantkit.checkpoint.names import COMPUTED
from quantkit.checkpoint.source import Source, all_finite
from quantkit.checkpoint.tokenizer import ENGLISH, ROUND_TRIP_TEXT
from quantkit.checkpoint.writer import CheckpointWriter, WrittenTensor
from quantkit.convert.gguf.names import config_of
from quantkit.convert.gguf.types import FLOATS, MIXES, quantizable
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.plan.plan import Plan
from quantkit.convert.plan.targets import Target
from quantkit.core.blocks import block_kind
from quantkit.errors import CheckpointError, NumericsError, UnsupportedModel
from quantkit.formats.gguf import BLOCKS

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTIZATION_VERSION = 2  # of ggml's block formats
KEPT = ("general.name", "general.basename", "general.license", "general.size_label", "general.finetune")


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the work folder, and where it goes."""

    stored: str
    place: Place
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight in blocks: its module's name in the checkpoint, their kind, and its shape in weights."""

    module: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OneFile:
    """What a file is made of, beside the tensors of a work folder.

    source: the model that was converted; config: of its language model, as transformers has it.
    tokenizer: of a folder; the vocabulary of a GGUF source is copied.
    mix: a key of ``types.MIXES``, what the file calls itself.
    rounded: the weights in blocks, by the names of their tensors in the work folder.
    base: the type of all other matrices; None for each the one that it is stored in.
    """

    source: Source
    config: Mapping[str, Any]
    tokenizer: Any
    mix: str
    rounded: Mapping[str, Rounded]
    base: str | None


def file_name(mix: str) -> str:
    """Return what the file is called.

    >>> file_name("q4_k_m")
    'model-Q4_K_M.gguf'
    """
    return f"model-{mix.upper()}.gguf"


def written(options: ConvertOptions) -> Path:
    """Return what other programs open: the folder, or the file in it that is the model."""
    return options.out if options.gguf_type is None else options.out / file_name(options.gguf_type)


def write_gguf(plan: Plan, targets: Mapping[str, Target], writer: CheckpointWriter) -> tuple[int, list[str]]:
    """Write a conversion's file, see ``write_one``.

    plan: the conversion.
    targets: the rounded weights.
    writer: has all parts.
    """
    mix = str(plan.options.gguf_type)
    base = MIXES[mix][1]
    rounded = {
        f"{target.name}.{BLOCKS}": Rounded(target.name, str(target.blocks), (target.out_features, target.in_features))
        for target in targets.values()
    }
    one = OneFile(plan.source, config_of(plan.model), plan.tokenizer, mix, rounded, base if base in FLOATS else "F16")
    return write_one(one, writer)


def write_one(one: OneFile, writer: CheckpointWriter) -> tuple[int, list[str]]:
    """Write the file into the writer's folder and verify it; return how many tensors were compared, and notes.

    writer: has all parts.

    Raises CheckpointError if the file reads back different, or its tokenizer gives other tokens; NumericsError for a
    number that its type does not hold.
    """
    names, path = Names(one.config), writer.folder / file_name(one.mix)
    said, extra = config_fields(names.config)
    tensors = [OutTensor(name, "F32", tuple(t.shape), _given(t)) for name, t in extra.items()]
    tensors += _tensors(one, writer, names)
    fields = _general(one) | said | _vocabulary(one, int(names.config["vocab_size"]))
    sums = write_file(path, names.family.architecture, fields, sorted(tensors, key=_order))
    verified = verify_file(path, sorted(tensors, key=_order), sums)
    return verified, _check_tokenizer(one, path)


def _given(value: Tensor) -> Callable[[], Tensor]:
    return lambda: value


def _order(tensor: OutTensor) -> tuple[int, int, str]:
    """Sort tensors as a model uses them: embedding, blocks by number, what comes behind."""
    match = re.match(r"blk\.(\d+)\.", tensor.name)
    if match:
        return 1, int(match[1]), tensor.name
    return (2 if tensor.name.startswith("output") else 0), 0, tensor.name


def _tensors(one: OneFile, writer: CheckpointWriter, names: Names) -> list[OutTensor]:
    """Return the tensors of the file; those of experts are joined."""
    by_name: dict[str, list[_Part]] = {}
    for stored, entry in writer.entries.items():
        if stored.endswith(COMPUTED):
            continue
        rounded = one.rounded.get(stored)
        if rounded is not None:
            place = names.place(f"{rounded.module}.weight")
            part = _Part(stored, place, rounded.kind, rounded.shape)
        else:
            place = names.place(stored)
            part = _Part(stored, place, _float_kind(one.base, place, entry), entry.shape)
        by_name.setdefault(place.name, []).append(part)
    return [_joined(name, parts, writer) for name, parts in by_name.items()]


def _float_kind(base: str | None, place: Place, entry: WrittenTensor) -> str:
    """Return the type of a tensor that is not rounded to codes."""
    if not quantizable(place.name, entry.shape):
        return "F32"
    return base or next((kind for kind, dtype in DTYPES.items() if dtype == entry.dtype), "F32")


def _joined(name: str, parts: list[_Part], writer: CheckpointWriter) -> OutTensor:
    """Return one tensor of the file: a stored one, or the experts of a layer in their order.

    Raises CheckpointError if two stored tensors have one place, or an expert is missing.
    """
    first = parts[0]
    if first.place.expert is None:
        if len(parts) > 1:
            raise CheckpointError(f"{parts[0].stored} and {parts[1].stored} have one place in a GGUF file: {name}")
        return OutTensor(name, first.kind, first.shape, lambda: _value(first, writer))
    ordered = sorted(parts, key=lambda part: part.place.expert or 0)
    if [part.place.expert for part in ordered] != list(range(len(ordered))):
        raise CheckpointError(f"{name}: an expert is missing, or is there twice")
    kinds = {(part.kind, part.shape) for part in ordered}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{name}: its experts are one tensor here, and have {sorted({part.kind for part in ordered})}."
            " Use --format native or compressed-tensors, or quantize the original with --format gguf."
        )
    shape = (len(ordered), *first.shape)
    return OutTensor(name, first.kind, shape, lambda: torch.stack([_value(part, writer) for part in ordered]))


def _value(part: _Part, writer: CheckpointWriter) -> Tensor:
    """Read a tensor back from its part, as the file holds it."""
    value = writer.read(part.stored)
    if part.kind not in FLOATS:
        block_kind(part.kind)
        return part.place.apply(value)
    dtype = DTYPES[part.kind]
    kept = value.dtype == dtype and not part.place.shift  # an embedding in float32 beside itself takes a gigabyte
    cast = part.place.apply(value if kept else value.float()).to(dtype)
    if not all_finite(cast):
        raise NumericsError(
            f"{part.stored}: holds {float(value.float().abs().max()):.4g}, more than {part.kind} can. Use --gguf-type"
            " bf16 or f32."
        )
    return cast


def _general(one: OneFile) -> dict[str, Field]:
    """Return what a file says of itself; of a GGUF source its name and licence, too."""
    fields: dict[str, Field] = {"general.type": ("STRING", "model")}
    if one.source.path.is_file():
        known = read_metadata(one.source.path)
        fields |= {key: ("STRING", known[key]) for key in KEPT if isinstance(known.get(key), str) and known[key]}
    number = MIXES[one.mix][0]
    if number is not None:  # else readers tell from the tensors
        fields["general.file_type"] = ("UINT32", number)
    return fields | {
        "general.quantized_by": ("STRING", "quantkit"),
        "general.quantization_version": ("UINT32", QUANTIZATION_VERSION),
    }


def _vocabulary(one: OneFile, rows: int) -> dict[str, Field]:
    if one.source.path.is_file():
        return copied_vocabulary(read_metadata(one.source.path))
    return vocabulary_fields(one.tokenizer, rows)


def _check_tokenizer(one: OneFile, path: Path) -> list[str]:
    """Read the file's tokenizer and compare its tokens with the original's; return a note where it is not read here.

    Raises CheckpointError for other tokens.
    """
    if one.source.path.is_file():
        return []  # the same fields, read before
    try:
        written = rebuild(read_metadata(path), path).tokenizer
    except UnsupportedModel as error:
        return [f"the file's tokenizer was not read back: {error}"]
    for text in (ROUND_TRIP_TEXT, ENGLISH):
        ours = one.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if ours != written.encode(text, add_special_tokens=False).ids:
            raise CheckpointError(
                f"{path.name}: its tokenizer gives other tokens than the original's. Convert a GGUF file of llama.cpp's"
                " own converter instead, or use another --format."
            )
    return []
