"""From what was typed, in Python or on the command line, to the options of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.convert.options.checks import refuse_unknown
from quantkit.convert.options.float_schemes import apply_scheme
from quantkit.convert.options.gguf_request import apply_gguf
from quantkit.convert.options.options import ConvertOptions
from quantkit.convert.options.presets import apply_activations, apply_preset, apply_target
from quantkit.errors import RequestError

ALIASES = {"products": "matmul_precision"}  # former names of options, still understood


def renamed(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``typed`` with former names of options replaced by those of today.

    Raises RequestError for an option that is given under both names.
    """
    for old, new in ALIASES.items():
        if old in typed and new in typed:
            flags = (f"--{name.replace('_', '-')}" for name in (old, new))
            raise RequestError(f"{' and '.join(flags)} are one option under two names. Leave one of them out.")
    return {ALIASES.get(name, name): value for name, value in typed.items()}


def resolve_options(
    source: str | Path, out: str | Path, preset: str | None, typed: Mapping[str, Any]
) -> ConvertOptions:
    """Fill in what the preset, ``activations`` and a target stand for, and validate everything once.

    typed: the options that were written out, and no others: an option that is given wins over what the preset sets.

    Raises TypeError for an option that does not exist, RequestError for a value that cannot be or a contradiction.
    """
    refuse_unknown(typed)
    given = dict(typed)
    stages = (lambda options: apply_preset(preset, options), apply_scheme, apply_activations, apply_target, apply_gguf)
    for complete in stages:
        given.update(complete(given))
    return ConvertOptions(source=str(source), out=Path(out), preset=preset, **given)
