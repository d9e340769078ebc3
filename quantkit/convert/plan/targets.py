"""Choice of the weights to quantize and of their schemes: from options, rules, and what the format can hold.

Problems are collected, so that all of them can be shown at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from quantkit.convert.gguf.names import gguf_chooser, gguf_notes
from quantkit.convert.gguf.types import FLOATS, alike
from quantkit.convert.gguf.weighing import check_importance
from quantkit.convert.options.gguf_rules import by_rule, one_rule, split_experts
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.options.rules import Choice, Problem, choose_schemes, collapse, parse_rules, split_fused
from quantkit.convert.plan.mtp_layers import mtp_linears
from quantkit.core.scheme import OF_BITSANDBYTES, Scheme
from quantkit.errors import RequestError
from quantkit.formats.interface import CheckpointLayout, Format
from quantkit.model.language import output_embeddings
from quantkit.model.skeleton import Blocks, block_linears
from quantkit.model.weights import Weights

COMMON_GROUPS = (None, 32, 64, 128, 256)  # sizes that the engines' kernels know

# Weights outside the blocks. "tied": one matrix that is embedding and head at once.
HEAD_EMBEDDINGS = ("head", "embedding", "tied")
_KIND_WORDS = {
    "head": "a quantized head",
    "embedding": "quantized embeddings",
    "tied": "a quantized matrix that serves as embedding and head (they are tied)",
}


@dataclass(frozen=True)
class Target:
    """One weight to quantize.

    name: its module name in the checkpoint.
    parameter: its parameter name in the skeleton.
    kind: "linear", "mtp" (a linear that no block of the skeleton holds) or one of ``HEAD_EMBEDDINGS``.
    blocks: the block format of a GGUF file (``core.blocks``), None for integer codes; ``scheme`` is then one like it.
    fallback: why it is another format than the mix has, None if it is not.
    """

    name: str
    parameter: str
    out_features: int
    in_features: int
    scheme: Scheme
    kind: str = "linear"
    blocks: str | None = None
    fallback: str | None = None

    @property
    def words(self) -> str:
        """How it is rounded, for people."""
        return self.blocks or self.scheme.describe()


@dataclass
class Targets:
    """The weights to quantize, those left at 16 bit, and what is wrong with the choice.

    chosen: by module name of the skeleton, e.g. ``model.layers.0.mlp.up_proj``.
    kept: names in the checkpoint of the linears that a rule leaves at 16 bit.
    free: modules whose scheme the rules leave to the bit budget, if there is one; their schemes are provisional.
    """

    chosen: dict[str, Target] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def head_embeddings(targets: Mapping[str, Target]) -> list[Target]:
    """Return the quantized weights outside the blocks: head and embeddings."""
    return [target for target in targets.values() if target.kind in HEAD_EMBEDDINGS]


def outside_of_blocks(targets: Mapping[str, Target]) -> list[Target]:
    """Return the quantized weights that are no linears of blocks: head, embeddings, linears of MTP layers."""
    return [target for target in targets.values() if target.kind != "linear"]


def choose_targets(options: ConvertOptions, form: Format, blocks: Blocks, weights: Weights) -> Targets:
    """Choose every weight's scheme.

    Raises RequestError for a rule that cannot be (syntax, no match), and if nothing is left to quantize.
    """
    if options.gguf_type is not None:
        return _block_formats(options, options.gguf_type, blocks, weights)
    names = block_targets(blocks, weights)
    mtp = mtp_linears(weights, blocks) if options.quantize_mtp else {}
    matrices = _find_head_embeddings(weights)
    known = [name for matrix in matrices for name in matrix.names]
    linears = [*(stored for stored, _ in names.values()), *mtp]
    choice = choose_schemes(parse_rules(options.rules, options.base_scheme), options.base_scheme, linears, known)
    targets, problems = Targets(), list(choice.problems)
    wanted: list[_Wanted] = [
        (module, stored, (linear.out_features, linear.in_features), "linear", choice.schemes[stored])
        for module, (stored, linear) in names.items()
    ]
    wanted += [(name, name, (m.out_features, m.in_features), "mtp", choice.schemes[name]) for name, m in mtp.items()]
    if options.allocates:
        targets.free = [module for module, (stored, _) in names.items() if stored not in choice.taken]
    for matrix in matrices:
        scheme = _head_or_embedding_scheme(options, form, matrix, choice, targets)
        wanted.append((matrix.module, matrix.stored, matrix.owner.weight.shape, matrix.kind, scheme))
    adapted = _fit(form, wanted, targets, problems)
    targets.problems += collapse(problems)
    rounded = sum(1 for target in targets.chosen.values() if target.kind == "mtp")
    if rounded and options.method != "rtn":
        targets.warnings.append(
            f"--quantize-mtp: {rounded} linears of layers that predict further tokens are rounded as --method rtn does:"
            " no calibration text runs through them"
        )
    if not targets.chosen:
        raise RequestError("the rules leave every weight at 16 bit: nothing is left to quantize. Drop one of them.")
    head_embedding_names = [target.name for target in head_embeddings(targets.chosen)]
    unsayable = form.cannot_say(
        CheckpointLayout({t.name: t.scheme for t in targets.chosen.values()}, targets.kept, head_embedding_names)
    )
    if unsayable:
        targets.problems.append(unsayable)
    if options.allocates:  # the rest is not decided yet
        _say_split(form, {name: scheme for name, scheme in choice.schemes.items() if name in choice.taken}, targets)
    else:
        _say_adapted(options, form, adapted, targets)
        _say_split(form, choice.schemes, targets)
    return targets


def _block_formats(options: ConvertOptions, mix: str, blocks: Blocks, weights: Weights) -> Targets:
    """Choose the block format of every matrix for a GGUF file; those that stay floating point are no targets."""
    matrices = _find_head_embeddings(weights)
    linears = block_targets(blocks, weights)
    wanted: list[tuple[str, str, tuple[int, ...], str, tuple[str, ...]]] = [
        (module, stored, tuple(linear.weight.shape), "linear", (stored,))
        for module, (stored, linear) in linears.items()
    ]
    wanted += [(m.module, m.stored, tuple(m.owner.weight.shape), m.kind, m.names) for m in matrices]
    choose = gguf_chooser(mix, weights, [stored for _, stored, *_ in wanted], informed=options.informed)
    rules = parse_rules(options.rules, options.base_scheme, blocks=True)
    known = [name for matrix in matrices for name in matrix.names]
    choice = choose_schemes(rules, options.base_scheme, [stored for stored, _ in linears.values()], known)
    targets, problems = Targets(warnings=gguf_notes(weights.model)), list(choice.problems)
    for module, stored, shape, kind, names in wanted:
        rule = one_rule(names, choice.taken)
        chosen = choose(stored, shape) if rule is None else by_rule(rule, shape)
        if isinstance(chosen, str):
            problems.append(Problem(stored, chosen))
            continue
        if chosen.kind in FLOATS:
            targets.kept.append(stored)
            if chosen.fallback:
                targets.warnings.append(f"{stored}: {chosen.fallback}")
            continue
        rows, width = shape
        scheme = alike(chosen.kind)
        targets.chosen[module] = Target(
            stored, f"{module}.weight", rows, width, scheme, kind, chosen.kind, chosen.fallback
        )
        if options.allocates and rule is None:
            targets.free.append(module)
    if rules and not targets.chosen and not problems:
        raise RequestError("the rules leave every weight at 16 bit: nothing is left to quantize. Drop one of them.")
    formats = {target.name: str(target.blocks) for target in targets.chosen.values()}
    if options.allocates:  # their formats are still to be chosen
        formats |= {targets.chosen[module].name: "what the size allows" for module in targets.free}
    problems += split_experts(weights, formats | dict.fromkeys(targets.kept, "F16"))
    targets.problems += collapse(problems)
    if options.imatrix is not None:
        informed = [(target.name, target.in_features) for target in targets.chosen.values() if target.kind == "linear"]
        targets.warnings += check_importance(Path(options.imatrix), weights, informed)
    return targets


# module name, stored name, shape [out, in], kind, scheme (None: 16 bit)
_Wanted = tuple[str, str, Sequence[int], str, Scheme | None]


def block_targets(blocks: Blocks, weights: Weights) -> dict[str, tuple[str, nn.Linear]]:
    """Return the blocks' linears by module name, each with its stored name.

    A matrix that several blocks share stays as it is: each block would want other codes.
    """
    shared = {*weights.tied, *weights.tied.values()}
    modules = {
        f"{blocks.name(index)}.{local}": linear
        for index, block in enumerate(blocks.modules)
        for local, linear in block_linears(block).items()
        if f"{blocks.name(index)}.{local}.weight" not in shared
    }
    return {module: (_stored(weights, module), linear) for module, linear in modules.items()}


def _head_or_embedding_scheme(
    options: ConvertOptions, form: Format, matrix: _HeadOrEmbedding, choice: Choice, targets: Targets
) -> Scheme | None:
    """Return the scheme of a head or embedding: a rule's, or with a bit budget the provisional one.

    The bit budget chooses for it only where the format can hold it; a warning is added where not.
    """
    if not options.allocates or not choice.taken.keys().isdisjoint(matrix.names):
        return matrix.choose(choice.schemes)
    if matrix.kind in form.head_embeddings:
        targets.free.append(matrix.module)
        return options.base_scheme
    targets.warnings.append(
        f"{matrix.stored} stays at 16 bit: {form.name} cannot hold {_KIND_WORDS[matrix.kind]} so that engines read it"
    )
    return matrix.choose(choice.schemes)


def _fit(
    form: Format, wanted: list[_Wanted], targets: Targets, problems: list[Problem]
) -> dict[tuple[int, int | None, int | None], int]:
    """Add targets with group sizes that the format can hold, and a problem for each weight that it cannot hold.

    Returns how many linears got another group size than was asked for, by (width, size asked for, size given).
    """
    adapted: dict[tuple[int, int | None, int | None], int] = {}
    sizes = _group_sizes(
        form, [(replace(scheme, activations=None), shape[1]) for *_, shape, _, scheme in wanted if scheme]
    )
    for module, stored, (out_features, in_features), kind, scheme in wanted:
        if scheme is None:
            if kind not in HEAD_EMBEDDINGS:
                targets.kept.append(stored)
            continue
        if kind in HEAD_EMBEDDINGS:  # a lookup has no activations, and engines run heads in 16 bit
            scheme = replace(scheme, activations=None)
        fitted = replace(scheme, group_size=sizes[replace(scheme, activations=None), in_features])
        if fitted != scheme:
            key = (in_features, scheme.group_size, fitted.group_size)
            adapted[key] = adapted.get(key, 0) + 1
        targets.chosen[module] = Target(stored, f"{module}.weight", out_features, in_features, fitted, kind)
        if kind in HEAD_EMBEDDINGS and kind not in form.head_embeddings:
            problems.append(Problem(stored, _unheld(form, kind)))
            continue
        refusal = form.supports(fitted, out_features, in_features)
        if refusal:
            problems.append(Problem(stored, f"{form.name} cannot hold {fitted.describe()}: {refusal}"))
    return adapted


def _unheld(form: Format, kind: str) -> str:
    """Explain that a format cannot hold a head or embedding, and what to do instead."""
    remedy = "Use --format native, or drop the rule."
    if kind == "tied":
        other = ""
        if "head" in form.head_embeddings:
            other = ", or --rotate, where the model allows it: the head becomes a matrix of its own"
        remedy = f"Use --format native, or --format gguf, whose types round it{other}; or drop the rule."
    return f"{form.name} cannot hold {_KIND_WORDS[kind]} so that engines read it. {remedy}"


def _group_sizes(form: Format, wanted: list[tuple[Scheme, int]]) -> dict[tuple[Scheme, int], int | None]:
    """Return the group size for each scheme and width; one for all widths of a scheme where the format has only one."""
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
    """Return a module's name in the checkpoint."""
    return weights.names[f"{module}.weight"].removesuffix(".weight")


@dataclass(frozen=True)
class _HeadOrEmbedding:
    """One matrix outside the blocks: head, embedding, or both at once.

    names: the names by which rules may refer to it; a tied matrix has two.
    """

    module: str
    stored: str
    owner: Any
    kind: str
    names: tuple[str, ...]

    def choose(self, schemes: Any) -> Scheme | None:
        """Return its scheme, None for 16 bit.

        Raises RequestError if rules give the two names of a tied matrix different schemes.
        """
        chosen = {schemes[name] for name in self.names} - {None}
        if len(chosen) > 1:
            raise RequestError(
                f"{' and '.join(self.names)} are one matrix (tied) and get two schemes from the rules: "
                f"{', '.join(sorted(scheme.describe() for scheme in chosen))}. Give both one rule."
            )
        return next(iter(chosen), None)


def _find_head_embeddings(weights: Weights) -> list[_HeadOrEmbedding]:
    """Return embedding and head, as one matrix if they are tied."""
    model: Any = weights.model
    embed, head = model.get_input_embeddings(), output_embeddings(model)
    paths = {id(module): name for name, module in model.named_modules()}
    matrices = []
    tied = head is not None and f"{paths[id(head)]}.weight" in weights.tied
    if isinstance(embed, nn.Embedding):
        module = paths[id(embed)]
        names = (_stored(weights, module), *((paths[id(head)],) if tied else ()))
        matrices.append(_HeadOrEmbedding(module, names[0], embed, "tied" if tied else "embedding", names))
    if isinstance(head, nn.Linear) and not tied:
        module = paths[id(head)]
        matrices.append(_HeadOrEmbedding(module, _stored(weights, module), head, "head", (_stored(weights, module),)))
    return matrices


def _say_adapted(
    options: ConvertOptions, form: Format, adapted: dict[tuple[int, int | None, int | None], int], targets: Targets
) -> None:
    """Add warnings (problems with ``--strict-groups``) for changed, short and unusual group sizes.

    adapted: as ``_fit`` returns it.
    """
    for (width, asked, size), count in sorted(adapted.items(), key=str):
        name = "one scale per channel" if size is None else f"groups of {size}"
        text = f"{width} inputs are no multiple of {asked}: {name} for {count} of {len(targets.chosen)} linears"
        if asked and width % asked == 0:
            text = (
                f"{name} also for {count} of {len(targets.chosen)} linears with {width} inputs: one model in"
                f" {form.name} has one size"
            )
        if options.strict_groups:
            targets.problems.append(
                f"{text}; --strict-groups forbids it. {_dividing(targets)}, choose --format native (only quantkit reads"
                " short groups), or leave it out."
            )
        else:
            targets.warnings.append(
                f"{text} ({form.name} has no short groups; native has)" if width % (asked or 1) else text
            )
    sizes = {size for t in targets.chosen.values() if (size := t.scheme.group_size) is not None}
    common = min(sizes, default=0)
    if (
        adapted
        and not options.allocates
        and len(sizes) > 1
        and all(t.in_features % common == 0 for t in targets.chosen.values())
    ):
        targets.warnings.append(f"--group-size {common} gives all linears one group size, which more engines read")
    along_rows = [t for t in targets.chosen.values() if t.scheme.number not in OF_BITSANDBYTES]
    ragged = sum(1 for t in along_rows if t.scheme.group_size and t.in_features % t.scheme.group_size)
    if ragged:
        targets.warnings.append(
            f"{ragged} of {len(targets.chosen)} linears end in a short group (only quantkit reads those)"
        )
    integers = (t.scheme for t in targets.chosen.values() if t.scheme.number == "integer")
    for size in sorted({scheme.group_size for scheme in integers} - set(COMMON_GROUPS), key=str):
        targets.warnings.append(
            f"groups of {size}: the kernels of vLLM, SGLang and others know 32, 64, 128 and per channel"
        )


def _dividing(targets: Targets) -> str:
    """Name the largest usual group size that divides the inputs of every linear, as a remedy."""
    widths = {target.in_features for target in targets.chosen.values()}
    size = next((size for size in (128, 64, 32, 16) if not any(width % size for width in widths)), None)
    return "No usual group size divides all of them" if size is None else f"Use --group-size {size}, which divides all"


def _say_split(form: Format, schemes: Any, targets: Targets) -> None:
    """Add a problem for fused linears with different schemes.

    In the native format, where nothing is fused, it is only a warning.
    """
    for sentence in split_fused(schemes):
        if form.name == "native":
            targets.warnings.append(f"{sentence} (quantkit's own format and engine take them as they are)")
        else:
            targets.problems.append(sentence)


def second_copy(weights: Weights, target: Target) -> str | None:
    """Return the stored name of the head's own tensor where a file stores a tied matrix twice, else None.

    It is not copied: the packed matrix serves as both.
    """
    if target.kind != "tied":
        return None
    heads = [weights.stored(twin) for twin, first in weights.tied.items() if first == target.parameter]
    return next((stored for stored in heads if stored != weights.stored(target.parameter)), None)
