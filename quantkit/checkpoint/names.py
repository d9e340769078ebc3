"""Names in a checkpoint: the files of a tokenizer, and stored tensors <-> the parameters of a model.

Where the two differ, ``parts_of`` (from the model's side) says which parameters a stored tensor holds. Handled here: a
tied head is not stored, and old files carry buffers that are computed now. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantkit.errors import SourceError, UnsupportedModel

# Buffers that old checkpoints store and today's models compute.
COMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")

# Any of these makes a folder one with a tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# What belongs to a tokenizer and is copied as it is. Nothing here is ever unpickled.
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A parameter that a stored tensor holds.

    index: as that entry of the tensor's first dimension; None: the whole tensor.
    part: the tensor is this one of several that make up the parameter, one after the other; None: it is all of it.
    parts: how many there are then.
    alone: of an entry: it is the parameter, not fused with others.
    """

    parameter: str
    index: int | None = None
    part: int | None = None
    parts: int = 1
    alone: bool = False


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a parameter is stored: a tensor, or one entry of its first dimension (an expert in a fused one).

    joined: the tensors, ``name`` the first of them, that make up the parameter along its first dimension.
    alone: the entry is the parameter, not fused with others.
    """

    name: str
    index: int | None = None
    joined: tuple[str, ...] = ()
    alone: bool = False


def match_names(
    parameters: Iterable[str],
    stored: Iterable[str],
    tied: Mapping[str, str],
    parts_of: Callable[[str], Sequence[ParameterPart]],
    where: str,
    beside: Callable[[str], bool] = lambda _: False,
    converted: Callable[[str], int] = lambda _: 0,
) -> dict[str, TensorRef]:
    """Find where each parameter is stored: parameter name -> tensor.

    parts_of: the parameters that a stored tensor can hold, by the tensor's name. tied: parameter -> its twin, whose
    tensor is taken where the parameter is not stored itself. beside: whether a stored tensor belongs to a part of the
    model that is copied and never run. converted: how many weights a stored tensor has that transformers splits, joins
    or permutes on loading, 0 for another. Buffers that ``parts_of`` knows are found too; they need not be stored.

    Raises SourceError naming what the source lacks, UnsupportedModel naming tensors that the model has no part for.
    """
    found: dict[str, TensorRef] = {}
    pieces: dict[str, dict[int, str]] = {}
    extra: list[str] = []
    for name in stored:
        fresh = [part for part in parts_of(name) if part.parameter not in found]
        for part in fresh:
            if part.part is None:
                found[part.parameter] = TensorRef(name, part.index, alone=part.alone)
                continue
            held = pieces.setdefault(part.parameter, {})
            held[part.part] = name
            if len(held) == part.parts:
                names = tuple(held[number] for number in sorted(held))
                found[part.parameter] = TensorRef(names[0], joined=names)
        if not fresh and not name.endswith(COMPUTED) and not beside(name):
            extra.append(name)
    wanted = list(parameters)
    for name in wanted:
        if name not in found and tied.get(name) in found:
            found[name] = found[tied[name]]
    _refuse_what_does_not_fit([name for name in wanted if name not in found], extra, converted, where)
    return {name: found[name] for name in dict.fromkeys((*wanted, *found))}


def _refuse_what_does_not_fit(
    missing: list[str], extra: list[str], converted: Callable[[str], int], where: str
) -> None:
    """Raise for parameters that no stored tensor holds, and for stored tensors that the model has no part for."""
    rewritten = {name: converted(name) for name in extra} if missing else {}
    if any(rewritten.values()):
        first = next(name for name, size in rewritten.items() if size)
        raise UnsupportedModel(
            f"{where}: transformers converts stored tensors on loading (splits, joins, permutes), first {first!r}:"
            f" {sum(map(bool, rewritten.values()))} tensors with {sum(rewritten.values()):,} weights, which would have"
            " to be written back as they were stored; not supported."
        )
    if missing:
        raise SourceError(
            f"{where}: lacks {len(missing)} tensors that its architecture needs, first {missing[0]!r}. The download is"
            " incomplete, or config.json belongs to another model (one that is no causal language model, for example)."
        )
    if extra:
        raise UnsupportedModel(
            f"{where}: stores {len(extra)} tensors that its architecture has no place for, first {sorted(extra)[0]!r}."
            " quantkit would lose them; this model is not supported."
        )
