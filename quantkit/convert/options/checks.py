"""Refusal of options that do not exist, and of options that have no effect beside the others."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from quantkit import algorithms
from quantkit.convert.options.gguf_request import decided_by_type
from quantkit.convert.options.options import DEFAULTS, ConvertOptions
from quantkit.errors import RequestError


def refuse_unknown(given: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for an option that does not exist; the message names the likely one.

    >>> refuse_unknown(["bits", "groupsize"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: convert() got an unexpected option 'groupsize' (did you mean 'group_size'?). Known: ...
    """
    unknown = sorted(set(given) - set(DEFAULTS))
    if unknown:
        named = ", ".join(_with_hint(name) for name in unknown)
        a, s = ("an ", "") if len(unknown) == 1 else ("", "s")
        known = ", ".join(sorted([*DEFAULTS, "on_progress"]))
        raise TypeError(f"convert() got {a}unexpected option{s} {named}. Known: {known}")


def _with_hint(name: str) -> str:
    """Quote a name that does not exist, with the existing one that is most like it."""
    near = [known for known in DEFAULTS if known.startswith(name)] or get_close_matches(name, DEFAULTS, 1)
    return f"{name!r} (did you mean {near[0]!r}?)" if near else repr(name)


def refuse_without_effect(given: Iterable[str], options: ConvertOptions) -> None:
    """Refuse options that were given and have no effect; ignored silently, they would seem to be in force.

    Giving the default value of an option asks for nothing and is allowed, unless another option decides the same thing.

    given: the names that were written out.
    options: the options of the conversion.

    Raises RequestError that names all of them.
    """
    decided = _decided_elsewhere(options)
    useless = {name: why for name, why in _without_effect(options).items() if getattr(options, name) != DEFAULTS[name]}
    useless |= decided
    idle = [name for name in useless if name in set(given)]
    if idle:
        flags = ", ".join(_flag(name, getattr(options, name)) for name in idle)
        reasons = "; ".join(dict.fromkeys(useless[name] for name in idle))
        verb, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise RequestError(f"{flags} {verb} no effect: {reasons}. Leave {them} out.")


def _decided_elsewhere(options: ConvertOptions) -> dict[str, str]:
    """Return options of which every value, the default too, contradicts another option; with the reason."""
    decided = {}
    if options.allocates:
        decided["bits"] = f"{options.target} chooses the bits"
    if options.kv_budget is not None:
        decided["kv_bits"] = "--kv-budget chooses the bits"
    if options.format == "gguf":
        decided |= decided_by_type(options)
    if options.method in algorithms.FOLDING:
        decided["fold"] = f"--method {options.method} always scales channels"
    return decided


def _flag(name: str, value: Any) -> str:
    """Spell an option with that value as on the command line."""
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _without_effect(options: ConvertOptions) -> dict[str, str]:
    """Return options that have no effect beside the others, with the reason."""
    useless: dict[str, str] = {}
    if options.method in ("awq", "tune") and options.scales == "minmax":
        useless["damping"] = f"--method {options.method} --scales minmax takes no ranges from statistics"
    useless["allow_rounding"] = (
        "it goes with a repack, and weights are rounded anew here (--repack keeps those of GGUF, FP8, NVFP4, MXFP4)"
    )
    useless["dtype"] = "it goes with --dequantize"
    if options.method != "tune":
        useless["tune_steps"] = f"--method {options.method} does not learn"
    if options.method not in algorithms.CALIBRATED:
        useless["damping"] = f"--method {options.method} uses no statistics of a text"
    if options.method != "gptq":
        useless["fold"] = f"--method {options.method} does not scale channels"
        useless["guided"] = f"--method {options.method} does not weigh tokens"
        useless["gptaq"] = f"--method {options.method} has no targets of its own"
    if options.method in ("smooth", "kquant"):
        useless["damping"] = f"--method {options.method} rounds without a Hessian"
    if not (options.needs_data or options.allocates):
        why = f"--method {options.method} reads no text" if options.imatrix is None else "--imatrix has the statistics"
        kept = {"samples"} if options.distil else {"calibration", "samples", "seq_len"}
        drawn = set() if options.draws or options.distil else {"seed", "matmul_precision"}
        useless |= {
            name: why
            for name in ("calibration", "samples", "seq_len", "seed", "matmul_precision")
            if name in kept | drawn
        }
    if not options.cache.wanted:
        useless["kv_scales"] = (
            "--kv-bits 16 keeps the cache as it is (a cache with scales needs --kv-bits 8, 4, 3, 2 or k4v2)"
        )
    if not (options.needs_data or options.distil) and options.allocates:
        useless["matmul_precision"] = f"--method {options.method} uses no statistics"
    if options.kv_bits == "fp8":
        useless["kv_scales"] = "--kv-bits fp8 has scales of its own"
    return useless
