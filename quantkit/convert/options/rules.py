"""Rules: other bits, groups or symmetry for some modules, or 16 bit. ``GLOB=bits:8,group:64``; the first match wins.

A pattern is compared with module names as the checkpoint has them (``model.layers.0.mlp.down_proj``). It matches a
whole name or what follows a dot in it, so ``mlp.down_proj`` and ``*.down_proj`` take every block's; ``*`` crosses dots,
``?`` and ``[0-3]`` work as in a shell; ``re:`` introduces a regular expression for the whole name. Head and embeddings
are taken only by a pattern that ends in their own name (``lm_head``, ``*.embed_tokens``): ``*=bits:8`` means the
linears.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from quantkit.core.blocks import KINDS, BlockKind
from quantkit.core.scheme import Scheme
from quantkit.errors import RequestError

SYNTAX = (
    "a rule is GLOB=SETTING[,SETTING...] with the settings bits:2..8, group:SIZE or group:channel, sym, asym; "
    "or GLOB=keep for 16 bit. Example: --rule '*.down_proj=bits:8,group:64'."
)
OF_BLOCKS = (
    "with --format gguf a rule is GLOB=TYPE or GLOB=keep for 16 bit, with the types"
    f" {', '.join(name.lower() for name in KINDS)}. Example: --rule '*.v_proj=q6_k'."
)

# Linears that engines run as one matrix: their shards must agree in scheme. vLLM: packed_modules_mapping of each model
# (llama.py qkv_proj, gate_up_proj; deepseek_v2.py fused_qkv_a_proj); SGLang and lmdeploy fuse the same ones.
FUSED = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"q_a_proj", "kv_a_proj_with_mqa"}),
)
EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.[^.]+$")


@dataclass(frozen=True, slots=True)
class Rule:
    """One parsed rule. A field that is None keeps the job's option; group_size 0 is per channel.

    block: of a GGUF file's tensor, a key of ``core.blocks.KINDS``; nothing else is then set.
    """

    text: str
    pattern: str
    keep: bool = False
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    block: str | None = None

    def matches(self, name: str) -> bool:
        """Tell whether a module name matches the pattern, as a whole or after a dot."""
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], name) is not None
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"*.{self.pattern}")

    def names(self, name: str) -> bool:
        """Tell whether the pattern matches and ends in the module's own last name, as head and embeddings require."""
        return self.matches(name) and self.pattern.rstrip("$)").endswith(name.rpartition(".")[2])

    def scheme(self, base: Scheme) -> Scheme | None:
        """Return the scheme of a matched module, None for 16 bit.

        base: the scheme of the whole job.

        Raises RequestError for a value outside its range.
        """
        if self.keep:
            return None
        if base.number != "integer":
            raise RequestError(f"beside {base.describe()} a rule can only keep modules at 16 bit: {self.pattern}=keep")
        size = base.group_size if self.group_size is None else (self.group_size or None)
        symmetric = base.symmetric if self.symmetric is None else self.symmetric
        return replace(base, bits=self.bits or base.bits, group_size=size, symmetric=symmetric)


def parse_rules(texts: Iterable[str], base: Scheme, *, blocks: bool = False) -> tuple[Rule, ...]:
    """Parse and validate rules.

    texts: rules as they are typed.
    base: the scheme of the whole job.
    blocks: the job writes GGUF, whose tensors have block formats.

    Raises RequestError that names the rule and shows the syntax.
    """
    if isinstance(texts, str):
        raise RequestError(f"rules={texts!r}: give a list of rules, [{texts!r}].")
    return tuple(parse_rule(text, base, blocks=blocks) for text in texts)


def parse_rule(text: str, base: Scheme, *, blocks: bool = False) -> Rule:
    """Parse one rule.

    text: the rule as it is typed.
    base: the scheme of the whole job.
    blocks: as in ``parse_rules``.

    Raises RequestError for wrong syntax or a value outside its range.

    >>> parse_rule("*.down_proj=bits:8,group:channel", Scheme(4, 128)).scheme(Scheme(4, 128)).describe()
    'W8 channel sym'
    """
    pattern, equals, settings = text.rpartition("=")
    pattern = pattern.strip()
    if not equals or not pattern:
        raise _bad(text, "no pattern and settings joined by '='")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise _bad(text, f"{pattern[3:]!r} is no regular expression ({error})") from None
    if blocks:
        return _block_rule(text, pattern, settings.strip())
    values: dict[str, object] = {}
    for setting in settings.split(","):
        key, value = _setting(text, setting.strip())
        if key in values:
            raise _bad(text, f"{key} is set twice")
        values[key] = value
    if values.get("keep") and len(values) > 1:
        raise _bad(text, "'keep' leaves a module at 16 bit and goes with no other setting")
    rule = Rule(text, pattern, **values)  # type: ignore[arg-type]
    try:
        rule.scheme(base)
    except RequestError as error:
        raise _bad(text, str(error).rstrip(".")) from None
    return rule


def _block_rule(text: str, pattern: str, setting: str) -> Rule:
    """Make a rule for tensors of a GGUF file."""
    if setting == "keep":
        return Rule(text, pattern, keep=True)
    if setting.upper() not in KINDS:
        raise RequestError(f"--rule {text!r}: {setting!r} is no block format; {OF_BLOCKS}")
    return Rule(text, pattern, block=setting.upper())


def _setting(text: str, setting: str) -> tuple[str, object]:
    plain: dict[str, tuple[str, object]] = {
        "keep": ("keep", True),
        "sym": ("symmetric", True),
        "asym": ("symmetric", False),
    }
    if setting in plain:
        return plain[setting]
    key, _, value = setting.partition(":")
    if key == "group" and value in ("channel", "-1"):
        return "group_size", 0
    if setting.upper() in KINDS:
        raise _bad(text, f"{setting} is a block format of GGUF files, and goes with --format gguf")
    if key not in ("bits", "group"):
        near = difflib.get_close_matches(key, ["bits", "group", "sym", "asym", "keep"], 1)
        raise _bad(text, f"{setting!r} is no setting" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) == 0:
        raise _bad(text, f"{setting!r}: {key} needs a whole number above 0")
    return ("bits" if key == "bits" else "group_size"), int(value)


def _bad(text: str, what: str) -> RequestError:
    return RequestError(f"--rule {text!r}: {what}; {SYNTAX}")


class Problem(NamedTuple):
    """Why something is impossible, without its subject: problems with one reason are printed as one line."""

    # a module's stored name, or a rule
    subject: str
    reason: str


def collapse(problems: Sequence[Problem]) -> list[str]:
    """Turn problems into lines; many layers with one reason share a line that counts them."""
    by_reason: dict[str, list[str]] = {}
    for subject, reason in problems:
        by_reason.setdefault(reason, []).append(subject)
    return [
        f"{subjects[0]}{f' and {len(subjects) - 1} more' if len(subjects) > 1 else ''}: {reason}"
        for reason, subjects in by_reason.items()
    ]


@dataclass(frozen=True, slots=True)
class Choice:
    """The schemes that rules give to the modules of a model.

    schemes: by module name, None for 16 bit.
    problems: rules without effect.
    taken: the modules that some rule takes, with the first that does.
    """

    schemes: Mapping[str, Scheme | None]
    problems: tuple[Problem, ...]
    taken: Mapping[str, Rule] = field(default_factory=dict)


def choose_schemes(
    rules: Sequence[Rule], base: Scheme, linears: Sequence[str], head_embeddings: Sequence[str]
) -> Choice:
    """Give every module its scheme by the rules, first match wins.

    linears: the blocks' modules, ``base`` unless a rule takes them.
    head_embeddings: head and embeddings, 16 bit unless a rule names them.

    Raises RequestError for a rule that matches nothing, with the nearest names.
    """
    taken: dict[str, Rule] = {}
    problems = []
    for rule in rules:
        hits = [name for name in linears if rule.matches(name)] + [name for name in head_embeddings if rule.names(name)]
        if not hits:
            raise RequestError(_matches_nothing(rule, [*linears, *head_embeddings]))
        fresh = [name for name in hits if name not in taken]
        if not fresh:
            by = dict.fromkeys(taken[name].text for name in hits)
            problems.append(
                Problem(
                    f"rule {rule.text!r} has no effect",
                    f"earlier rules take all it matches ({', '.join(by)}). Put it before them, or leave it out.",
                )
            )
        taken.update(dict.fromkeys(fresh, rule))
    schemes: dict[str, Scheme | None] = {}
    for name in [*linears, *head_embeddings]:
        default = base if name not in head_embeddings else None
        schemes[name] = taken[name].scheme(base) if name in taken else default
    return Choice(schemes, tuple(problems), taken)


def _matches_nothing(rule: Rule, names: Sequence[str]) -> str:
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    wanted = rule.pattern.removeprefix("re:")
    near = difflib.get_close_matches(wanted, names, 3, 0.5)
    near += [last[key] for key in difflib.get_close_matches(wanted.rpartition(".")[2], list(last), 3, 0.5)]
    shown = list(dict.fromkeys(near))[:3]
    known = (
        f"Nearest: {', '.join(shown)}"
        if shown
        else f"Its modules' last names: {', '.join(dict.fromkeys(name.rpartition('.')[2] for name in names))}"
    )
    return f"--rule {rule.text!r}: matches no module of this model. {known}."


def scheme_words(scheme: Scheme | BlockKind | None) -> str:
    """Name the scheme of a weight: ``W4 g64 asym``, ``Q4_K``, or ``16 bit`` for None."""
    if scheme is None:
        return "16 bit"
    return scheme.name if isinstance(scheme, BlockKind) else scheme.describe()


def split_fused(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Return a sentence for each kind of fused linears whose schemes differ, with the rule that gives them one.

    schemes: by module name, None for 16 bit.
    """
    groups_of: dict[str, dict[str, list[str]]] = {}
    for name in schemes:
        for group, pattern in fused_groups(name):
            groups_of.setdefault(group, {}).setdefault(pattern, []).append(name)
    problems: dict[tuple[str, str], list[str]] = {}
    for group, by_pattern in groups_of.items():
        for pattern, names in by_pattern.items():
            words: dict[str, str] = {}
            for name in names:
                scheme = schemes[name]
                words.setdefault(scheme_words(scheme), name.removeprefix(f"{group}."))
            if len(words) > 1:
                differing = ", ".join(f"{name} {word}" for word, name in words.items())
                problems.setdefault((differing, pattern), []).append(group)
    return [
        f"{groups[0]}{f' and {len(groups) - 1} more' if len(groups) > 1 else ''}: {differing}. Engines run"
        f" these as one matrix and need one scheme: give one rule for all of them, '{pattern}=...'."
        for (differing, pattern), groups in problems.items()
    ]


def fused_groups(name: str) -> list[tuple[str, str]]:
    """Return each set of fused linears that a module belongs to: (owner, pattern of a rule that covers them all).

    name: the module's name.
    """
    experts = EXPERTS.match(name)
    if experts:
        return [(experts[1], "*.experts.*")]
    owner, _, last = name.rpartition(".")
    return [(owner, f"re:.*\\.({'|'.join(sorted(fused))})") for fused in FUSED if last in fused]
