"""Which weights are quantized, and how: the options' scheme, the rules, what the format can hold. Problems are collected."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from quantkit.convert.options import ConvertOptions
from quantkit.convert.rules import Choice, choose_schemes, parse_rules, split_siblings
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError
from quantkit.formats import Format, Layout
from quantkit.model.skeleton import Blocks, Weights, block_linears

COMMON_GROUPS = (None, 32, 64, 128, 256)  # sizes that the engines' kernels know

# Weights outside the blocks. "tied": one matrix that is embedding and head at once.
OUTSIDE = ("head", "embedding", "tied")
_SAID = {
    "head": "a quantized head",
    "embedding": "quantized embeddings",
    "tied": "a quantized matrix that serves as embedding and head",
}


@dataclass(frozen=True)
class Target:
    """One weight to quantize. ``name`` is its module name in the checkpoint; kind: "linear" or one of ``OUTSIDE``."""

    name: str
    parameter: str
    out_features: int
    in_features: int
    scheme: Scheme
    kind: str = "linear"


@dataclass
class Targets:
    """By module name of the skeleton, e.g. ``model.layers.0.mlp.up_proj``. kept: linears that a rule leaves at 16 bit. free: what the
    rules leave to the allocation, if there is one; its schemes are provisional."""

    chosen: dict[str, Target] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def choose_targets(options: ConvertOptions, form: Format, blocks: Blocks, weights: Weights) -> Targets:
    """Every weight's scheme. Raises RequestError for a rule that cannot be (syntax, no match)."""
    names = _linears(blocks, weights)
    outside = _outside(weights)
    known = [name for kind in outside for name in kind.names]
    choice = choose_schemes(
        parse_rules(options.rules, options.scheme), options.scheme, [stored for stored, _ in names.values()], known
    )
    found = Targets(problems=list(choice.problems))
    wanted: list[_Wanted] = [
        (module, stored, linear, "linear", choice.schemes[stored]) for module, (stored, linear) in names.items()
    ]
    if options.allocates:
        found.free = [module for module, (stored, _) in names.items() if stored not in choice.taken]
    for one in outside:
        wanted.append((one.module, one.stored, one.owner, one.kind, _outside_scheme(options, form, one, choice, found)))
    adapted = _fit(form, wanted, found)
    found.problems[:] = collapse(found.problems)
    if not found.chosen:
        raise RequestError("the rules leave every weight at 16 bit: nothing is left to quantize. Drop one of them.")
    outside_names = [t.name for t in found.chosen.values() if t.kind != "linear"]
    unsayable = form.cannot_say(Layout({t.name: t.scheme for t in found.chosen.values()}, found.kept, outside_names))
    if unsayable:
        found.problems.append(unsayable)
    if options.allocates:  # the rest is not decided yet
        _say_split(form, {name: scheme for name, scheme in choice.schemes.items() if name in choice.taken}, found)
    else:
        _say_adapted(options, form, adapted, found)
        _say_split(form, choice.schemes, found)
    return found


_Wanted = tuple[
    str, str, Any, str, Scheme | None
]  # module, stored name, what has the weight, kind, scheme or None: 16 bit


def _linears(blocks: Blocks, weights: Weights) -> dict[str, tuple[str, nn.Module]]:
    """Linears of the blocks by module name, with their stored names."""
    modules = {
        f"{blocks.name(index)}.{local}": linear
        for index, block in enumerate(blocks.modules)
        for local, linear in block_linears(block).items()
    }
    return {module: (_stored(weights, module), linear) for module, linear in modules.items()}


def _outside_scheme(
    options: ConvertOptions, form: Format, one: _Outside, choice: Choice, found: Targets
) -> Scheme | None:
    """Of a head or embedding: what a rule says, or with a target that it is to be chosen, where the format can hold it."""
    if not options.allocates or not choice.taken.isdisjoint(one.names):
        return one.choose(choice.schemes)
    if one.kind in form.outside:
        found.free.append(one.module)
        return options.scheme
    found.warnings.append(
        f"{one.stored} stays at 16 bit: {form.name} cannot hold {_SAID[one.kind]} so that engines read it"
    )
    return one.choose(choice.schemes)


def _fit(form: Format, wanted: list[_Wanted], found: Targets) -> dict[tuple[int, int | None, int | None], int]:
    """Targets with group sizes that the format can have, and what it cannot hold as problems. Returns how many linears of a width got another
    size than was asked for."""
    adapted: dict[tuple[int, int | None, int | None], int] = {}
    sizes = _group_sizes(
        form, [(replace(scheme, activations=None), owner.weight.shape[1]) for *_, owner, _, scheme in wanted if scheme]
    )
    for module, stored, owner, kind, scheme in wanted:
        if scheme is None:
            if kind == "linear":
                found.kept.append(stored)
            continue
        if kind != "linear":  # a lookup has no activations, and engines run heads in 16 bit
            scheme = replace(scheme, activations=None)
        out_features, in_features = owner.weight.shape
        fitted = replace(scheme, group_size=sizes[replace(scheme, activations=None), in_features])
        if fitted != scheme:
            key = (in_features, scheme.group_size, fitted.group_size)
            adapted[key] = adapted.get(key, 0) + 1
        found.chosen[module] = Target(stored, f"{module}.weight", out_features, in_features, fitted, kind)
        if kind != "linear" and kind not in form.outside:
            found.problems.append(
                f"{stored}: {form.name} cannot hold {_SAID[kind]} so that engines read it. "
                "Use --format native, or drop the rule."
            )
            continue
        reason = form.supports(fitted, out_features, in_features)
        if reason:
            found.problems.append(f"{stored}: {form.name} cannot hold {fitted.describe()}: {reason}")
    return adapted


def _group_sizes(form: Format, wanted: list[tuple[Scheme, int]]) -> dict[tuple[Scheme, int], int | None]:
    """The group size for each scheme and width; one for all widths of a scheme where the format has only one."""
    sizes = {(scheme, width): form.group_size_for(scheme, width) for scheme, width in wanted}
    if not form.uniform_groups:
        return sizes
    for scheme in {scheme for scheme, _ in sizes}:
        mine = [key for key in sizes if key[0] == scheme]
        if len({sizes[key] for key in mine}) > 1:
            common = (n for n in (128, 64, 32) if n < (scheme.group_size or 0) and not any(key[1] % n for key in mine))
            sizes.update(dict.fromkeys(mine, next(common, None)))
    return sizes


def _stored(weights: Weights, module: str) -> str:
    return weights.names[f"{module}.weight"].removesuffix(".weight")


@dataclass(frozen=True)
class _Outside:
    """One matrix outside the blocks. names: what rules may call it; a tied one has two."""

    module: str
    stored: str
    owner: Any
    kind: str
    names: tuple[str, ...]

    def choose(self, schemes: Any) -> Scheme | None:
        """The pair's one scheme. Raises RequestError if rules give its two names different ones."""
        said = {schemes[name] for name in self.names} - {None}
        if len(said) > 1:
            raise RequestError(
                f"{' and '.join(self.names)} are one matrix (tied) and get two schemes from the rules: "
                f"{', '.join(sorted(scheme.describe() for scheme in said))}. Give both one rule."
            )
        return next(iter(said), None)


def _outside(weights: Weights) -> list[_Outside]:
    """Embedding and head, as one if they are tied."""
    model: Any = weights.model
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    places = {id(module): name for name, module in model.named_modules()}
    found = []
    tied = bool(weights.tied)
    if isinstance(embed, nn.Embedding):
        module = places[id(embed)]
        names = (_stored(weights, module), *((places[id(head)],) if tied else ()))
        found.append(_Outside(module, names[0], embed, "tied" if tied else "embedding", names))
    if isinstance(head, nn.Linear) and not tied:
        module = places[id(head)]
        found.append(_Outside(module, _stored(weights, module), head, "head", (_stored(weights, module),)))
    return found


def _say_adapted(
    options: ConvertOptions, form: Format, adapted: dict[tuple[int, int | None, int | None], int], found: Targets
) -> None:
    for (width, asked, size), count in sorted(adapted.items(), key=str):
        name = "one scale per channel" if size is None else f"groups of {size}"
        text = f"{width} inputs are no multiple of {asked}: {name} for {count} of {len(found.chosen)} linears"
        if asked and width % asked == 0:
            text = f"{name} also for {count} of {len(found.chosen)} linears with {width} inputs: one model in {form.name} has one size"
        if options.strict_groups:
            found.problems.append(
                f"{text}; --strict-groups forbids it. {_dividing(found)}, choose --format native (only quantkit reads short groups), or leave it out."
            )
        else:
            found.warnings.append(
                f"{text} ({form.name} has no short groups; native has)" if width % (asked or 1) else text
            )
    sizes = {size for t in found.chosen.values() if (size := t.scheme.group_size) is not None}
    common = min(sizes, default=0)
    if (
        adapted
        and not options.allocates
        and len(sizes) > 1
        and all(t.in_features % common == 0 for t in found.chosen.values())
    ):
        found.warnings.append(f"--group-size {common} gives all linears one group size, which more engines read")
    ragged = sum(1 for t in found.chosen.values() if t.scheme.group_size and t.in_features % t.scheme.group_size)
    if ragged:
        found.warnings.append(
            f"{ragged} of {len(found.chosen)} linears end in a short group (only quantkit reads those)"
        )
    for size in sorted({t.scheme.group_size for t in found.chosen.values()} - set(COMMON_GROUPS), key=str):
        found.warnings.append(
            f"groups of {size}: the kernels of vLLM, SGLang and others know 32, 64, 128 and per channel"
        )


def _dividing(found: Targets) -> str:
    """The largest usual group size that divides the inputs of every linear, as a remedy."""
    widths = {target.in_features for target in found.chosen.values()}
    size = next((size for size in (128, 64, 32, 16) if not any(width % size for width in widths)), None)
    return "No usual group size divides all of them" if size is None else f"Use --group-size {size}, which divides all"


def _say_split(form: Format, schemes: Any, found: Targets) -> None:
    """Fused siblings with different schemes: a problem, but in the native format, where nothing is fused, only a note."""
    for sentence in split_siblings(schemes):
        if form.name == "native":
            found.warnings.append(f"{sentence} (quantkit's own format and engine take them as they are)")
        else:
            found.problems.append(sentence)


def collapse(problems: list[str]) -> list[str]:
    """Many layers with one reason become one line that counts them."""
    by_reason: dict[str, list[str]] = {}
    for problem in problems:
        layer, _, reason = problem.partition(": ")
        by_reason.setdefault(reason, []).append(layer)
    return [
        f"{layers[0]}{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}: {reason}"
        for reason, layers in by_reason.items()
    ]


def second_copy(weights: Weights, target: Target) -> str | None:
    """The head's own tensor, where a file stores a tied matrix twice: it is not copied, the packed one serves both."""
    if target.kind != "tied":
        return None
    heads = [weights.stored(twin) for twin, first in weights.tied.items() if first == target.parameter]
    return next((stored for stored in heads if stored != weights.stored(target.parameter)), None)
