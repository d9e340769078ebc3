"""Repack into one GGUF file: integer codes and MXFP4 as ggml's blocks, all else in the type that it is stored in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from quantkit.checkpoint.gguf_files.out_config import config_fields
from quantkit.checkpoint.gguf_files.out_names import Names
from quantkit.checkpoint.names import COMPUTED
from quantkit.checkpoint.source import Source
from quantkit.checkpoint.tokenizer import load_tokenizer
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.convert.gguf.names import check_gguf_vocabulary, config_of
from quantkit.convert.gguf.types import kinds_in_words
from quantkit.convert.options.rules import Problem, collapse
from quantkit.convert.output.gguf_file import OneFile, Rounded, write_one
from quantkit.core.blocks import KINDS
from quantkit.core.scheme import Scheme
from quantkit.formats.ggml.codes import WITH_MINIMA
from quantkit.formats.gguf import BLOCKS
from quantkit.formats.reader import QuantizedReader
from quantkit.model.skeleton import build_skeleton


class GGUFNames:
    """The places of a model's tensors in a GGUF file.

    Raises UnsupportedModel for a model, a tensor or a tokenizer that has no place there.
    """

    def __init__(self, source: Source, reader: QuantizedReader) -> None:
        model: Any = build_skeleton(source.config)
        self.config = config_of(model)
        config_fields(self.config)
        names = Names(self.config)
        self._places = {name: names.place(f"{name}.weight") for name in reader.modules}
        for name in reader.plain_names():
            if not name.endswith(COMPUTED):
                names.place(name)
        check_gguf_vocabulary("repack", source, load_tokenizer(source), model)

    def alone(self, module: str) -> bool:
        """Tell whether a module is a tensor of its own, and not one of the experts in one."""
        return self._places[module].expert is None

    def split_experts(self, schemes: Mapping[str, Scheme]) -> list[str]:
        """Return the tensors of the file whose experts have different schemes, as problems of a plan.

        schemes: by module name.
        """
        found: dict[str, set[str]] = {}
        for module, scheme in schemes.items():
            found.setdefault(self._places[module].name, set()).add(scheme.describe())
        problems = [
            Problem(
                name, f"its experts are one tensor in a GGUF file, and have {' and '.join(sorted(several))}. {WAYS}"
            )
            for name, several in found.items()
            if len(several) > 1
        ]
        return collapse(problems)


def widened(schemes: Mapping[str, Scheme], kinds: Mapping[str, str], rounding: bool) -> list[str]:
    """Return a note on weights that take blocks of more bits than their codes have, and how they would not.

    schemes, kinds: scheme and block format by module name. rounding: what the format cannot keep may be rounded.
    """
    wide = Counter(kind for name, kind in kinds.items() if KINDS[kind].bits > schemes[name].bits)
    if not wide:
        return []
    held = [schemes[name] for name, kind in kinds.items() if KINDS[kind].bits > schemes[name].bits]
    of_minima = any(scheme.bits in WITH_MINIMA and not scheme.symmetric for scheme in held)
    smaller = "; --allow-rounding rounds their minima to float16 and takes the smaller Q4_1, Q5_1" if of_minima else ""
    counted = kinds_in_words(wide)
    return [f"{counted}: blocks that hold those codes exactly have more bits{'' if rounding else smaller}"]


WAYS = "Use --format native or compressed-tensors, or quantize the original with --format gguf."


def write_repacked(source: Source, names: GGUFNames, writer: CheckpointWriter) -> tuple[int, list[str], str]:
    """Join the parts to one file; return how many tensors were compared, notes, and the most common type.

    writer: has all parts, those of packed weights under ``formats.gguf.local_name``.
    """
    rounded = {}
    for stored, entry in writer.entries.items():
        module, mark, kind = stored.rpartition(f".{BLOCKS}.")
        if mark:
            rows, row_bytes = entry.shape
            shape = rows, row_bytes // KINDS[kind].nbytes * KINDS[kind].width
            rounded[stored] = Rounded(module, kind, shape)
    mix = Counter(one.kind for one in rounded.values()).most_common(1)[0][0].lower()
    one = OneFile(source, names.config, load_tokenizer(source), mix, rounded, None)
    verified, notes = write_one(one, writer)
    return verified, notes, mix
